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
    return _LINK.sub(lambda link: _site_link(link, source), text)


def _site_link(link: re.Match[str], source: str) -> str:
    target, _, anchor = link["target"].partition("#")
    if not target or "://" in target:
        return link[0]
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    if (ROOT / path).is_dir():
        path = f"{path}/README.md"
    made = ELSEWHERE.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
    if made is None and os.path.exists(ROOT / path):
        return link["text"]
    # What does not exist stays as it is, so that MkDocs finds it.
    return f"{link['picture']}[{link['text']}]({made or target}{'#' if anchor else ''}{anchor})"
