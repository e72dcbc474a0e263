"""Claims about the project's own files: dependencies, make targets, and what must not be committed."""

from __future__ import annotations

import ast
import re
import statistics
import subprocess
import tomllib
from collections import Counter
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]


SOURCES = {".py", ".pyi", ".c", ".cpp", ".h", ".cu"}


def tracked_files(*suffixes: str) -> list[Path]:
    """Return the files that git tracks, with these suffixes or all."""
    git = ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z"]
    names = subprocess.run(git, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    paths = [ROOT / name for name in names if name]
    return [path for path in paths if path.is_file() and (not suffixes or path.suffix in suffixes)]


def direct_requirements() -> list[Requirement]:
    """Return the requirements in pyproject.toml, without the extras that only some machines can install."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = pyproject["project"]
    lines = pyproject["build-system"]["requires"] + project["dependencies"] + project["optional-dependencies"]["dev"]
    return [Requirement(line) for line in lines]


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().split()
    return {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}


def test_constraints_pin_every_direct_dependency_within_its_bounds() -> None:
    pinned = pins()
    wrong = {
        str(requirement): pinned.get(canonicalize_name(requirement.name), "not pinned")
        for requirement in direct_requirements()
        if pinned.get(canonicalize_name(requirement.name), "") not in requirement.specifier
    }
    assert wrong == {}


def test_every_constraint_is_an_exact_version() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert [line for line in lines if not re.fullmatch(r"[\w.-]+==\d[\w.]*", line)] == []


def test_make_has_every_target_that_the_documents_name() -> None:
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    # A command stands in backquotes or starts a line; "make a plan" in the middle of a sentence is English.
    command = re.compile(r"(?:`|^\s*(?:\$ )?)make ([a-z][\w-]*)", re.MULTILINE)
    named = {
        target
        for path in ("README.md", "CONTRIBUTING.md", "docs/design.md")
        for target in command.findall((ROOT / path).read_text())
    }
    assert {"demo", "test", "check", "bench", "test-gpu"} <= named
    assert named - targets == set()


def test_tracked_files_name_no_machine_path_and_no_package_registry() -> None:
    # Written in pieces, so that this file is not its own finding.
    unwanted = re.compile(
        "|".join(
            [
                r"(?<![\w.])/" + r"(?:root|work|home/\w+|Users/\w+|opt/\w+)/",
                r"py" + r"pi\.org",
                r"python" + r"hosted\.org",
                r"download\.py" + r"torch\.org",
                r"index" + r"-url",
            ]
        )
    )
    paths = tracked_files()
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path in paths
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1)
        if unwanted.search(line)
    ]
    assert paths
    assert found == []


def test_files_are_short() -> None:
    lines = {path: path.read_text().count("\n") for path in tracked_files(*SOURCES)}
    assert {str(path.relative_to(ROOT)): n for path, n in lines.items() if n > 450} == {}
    assert statistics.median(n for path, n in lines.items() if path.name != "__init__.py") <= 140


def test_functions_are_short() -> None:
    long = {}
    for path in tracked_files(".py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if num_lines > 60:
                    long[f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"] = num_lines
    assert long == {}


def test_a_class_name_has_one_meaning() -> None:
    names = Counter(
        node.name
        for path in tracked_files(".py")
        if path.relative_to(ROOT).parts[0] != "tests"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    assert {name: count for name, count in names.items() if count > 1} == {}


# Functions that make a tensor of torch's default type, or on its default device, unless they are told others.
TENSOR_MAKERS = {
    "arange", "as_tensor", "asarray", "empty", "empty_permuted", "empty_strided", "eye", "full", "linspace", "logspace",
    "ones", "rand", "randint", "randn", "randperm", "range", "scalar_tensor", "tensor", "tril_indices", "triu_indices",
    "zeros",
}  # fmt: skip


def test_what_runs_in_a_training_depends_on_no_default_of_torch() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: torch.{node.func.attr} without dtype= and device="
        for path in tracked_files(".py")
        if path.relative_to(ROOT).parts[0] in {"cgx_ray", "cgx_ray_autoload", "monitors", "runtime_ext"}
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == "torch"
        and node.func.attr in TENSOR_MAKERS
        and not {"dtype", "device"} <= {keyword.arg for keyword in node.keywords}
    ]
    assert found == []


def test_documents_are_narrow_and_the_readme_is_one_page() -> None:
    wide = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in tracked_files(".md")
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if len(line) > 120
    ]
    assert wide == []
    assert len((ROOT / "README.md").read_text().split()) <= 800
