"""Hook of MkDocs: pages from outside docs/, and links that work in the checkout as well as in the site.

Links in the Markdown files are those of the checkout. In the site, a link to a page goes to that page, and a link to
any other file of the checkout becomes its text: the site has no sources.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
# Pages of the site that lie elsewhere in the checkout.
ELSEWHERE = {
    "README.md": "index.md",
    "LOG.md": "log.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "examples/README.md": "examples.md",
    "dashboards/README.md": "boards.md",
    "deploy/k8s/README.md": "kubernetes.md",
}
_LINK = re.compile(r"(?P<picture>!?)\[(?P<text>(?:`[^`]*`|[^][`])*)\]\((?P<target>[^()\s]+)\)")
_DEFINITION = re.compile(r"^(\[[^\]\n]+\]): (\S+)$", re.MULTILINE)
_FENCE = re.compile(r"^( *)```.*?^\1```\s*?$", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of ELSEWHERE."""
    for path, name in ELSEWHERE.items():
        files.append(File.generated(config, name, content=(ROOT / path).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the page with the links of the site; code stays as it is."""
    name = page.file.src_uri
    source = next((path for path, made in ELSEWHERE.items() if made == name), f"docs/{name}")
    parts, end = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [with_site_links(markdown[end : fence.start()], source), fence[0]]
        end = fence.end()
    return "".join([*parts, with_site_links(markdown[end:], source)])


def with_site_links(text: str, source: str) -> str:
    """Return `text`, from the file `source` of the checkout, with links as they are in the site."""
    text = _LINK.sub(lambda link: _site_link(link, source), text)
    return _DEFINITION.sub(lambda link: f"{link[1]}: {_site_target(link[2], source) or link[2]}", text)


def _site_link(link: re.Match[str], source: str) -> str:
    target = _site_target(link["target"], source)
    return link["text"] if target is None else f"{link['picture']}[{link['text']}]({target})"


def _site_target(link: str, source: str) -> str | None:
    """Return the target in the site, or None for a file of the checkout that is no page."""
    target, _, anchor = link.partition("#")
    if not target or "://" in target:
        return link
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    if (ROOT / path).is_dir():
        path = f"{path}/README.md"
    made = ELSEWHERE.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
    if made is None:
        # What does not exist stays as it is, so that MkDocs finds it.
        return None if os.path.exists(ROOT / path) else link
    page = ELSEWHERE.get(source) or source.removeprefix("docs/")
    return posixpath.relpath(made, posixpath.dirname(page) or ".") + ("#" if anchor else "") + anchor
