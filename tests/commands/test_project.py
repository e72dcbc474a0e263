"""Claims about the project's own files: dependencies, make targets, and what must not be committed."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from collections import Counter
from functools import cache
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


@cache
def trees() -> dict[Path, ast.Module]:
    """Return the syntax of all Python files."""
    return {path: ast.parse(path.read_text()) for path in tracked_files(".py")}


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
    assert {"demo", "quick", "test", "check", "bench", "test-gpu"} <= named
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


def test_a_folder_is_read_at_a_glance() -> None:
    """It has at most 20 modules. One of tests may have 40 files: each is read alone, found by its claim."""
    folders = Counter(path.parent.relative_to(ROOT) for path in tracked_files(".py") if path.name != "__init__.py")
    limits = {folder: 40 if folder.parts[:1] == ("tests",) else 20 for folder in folders}
    assert {str(folder): n for folder, n in folders.items() if n > limits[folder]} == {}


# Why these modules of under 50 lines with one user are not part of it.
SHORT = {
    "bench/scale/timed_loop.py": "runs in the process of the loop, which imports no Ray; its user does",
    "cgx_ray/cli.py": "the entry point that pyproject.toml and docs/commands.md name, and which imports no command",
    "cgx_ray/integrations/accelerate.py": "users of Accelerate import it, and nothing else may need accelerate",
    "cgx_ray/lab/json_fields.py": "the checks of untrusted JSON, apart from what the fields mean",
    "cgx_ray/policies.py": "the public door of policies, which users import",
    "cgx_ray/session/served_metrics.py": "the only module of session that imports the monitors' endpoint",
    "runtime_ext/layer_ends.py": "an argument of kernels; its user is a floor above, and tests of kernels make it",
}


def test_a_short_module_with_one_user_has_a_reason() -> None:
    modules = {_module_of(path): path for path in trees() if path.relative_to(ROOT).parts[0] != "tests"}
    users = Counter[Path]()
    for user in modules.values():
        used = {modules[name] for node in ast.walk(trees()[user]) for name in _imported(node) if name in modules}
        users.update(used - {user})
    short = {path for path, tree in trees().items() if users[path] == 1 and path.read_text().count("\n") < 50}
    assert {str(path.relative_to(ROOT)) for path in short if path.stem[:2] != "__"} == SHORT.keys()


def _imported(node: ast.AST) -> list[str]:
    """Return what may be modules. A relative import is one of the package's own door, which is no user."""
    if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


def _module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    if parts[0] in ("monitors", "runtime_ext"):
        parts = ("cgx_ray", *parts)
    return ".".join(parts).removesuffix(".py").removesuffix(".__init__")


def test_functions_are_short() -> None:
    long = {}
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if num_lines > 60:
                    long[f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"] = num_lines
    assert long == {}


def test_a_class_name_has_one_meaning() -> None:
    names = Counter(
        node.name
        for path, tree in trees().items()
        if path.relative_to(ROOT).parts[0] != "tests"
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    )
    # Of Lightning and of transformers: nobody imports both.
    assert {name: count for name, count in names.items() if count > 1} == {"CGXCallback": 2}


# Functions that make a tensor of torch's default type, or on its default device, unless they are given others.
TENSOR_MAKERS = {
    "arange", "as_tensor", "asarray", "empty", "empty_permuted", "empty_strided", "eye", "full", "linspace", "logspace",
    "ones", "rand", "randint", "randn", "randperm", "range", "scalar_tensor", "tensor", "tril_indices", "triu_indices",
    "zeros",
}  # fmt: skip


def test_what_runs_in_a_training_depends_on_no_default_of_torch() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: torch.{node.func.attr} without dtype= and device="
        for path, tree in trees().items()
        if path.relative_to(ROOT).parts[0] in {"cgx_ray", "cgx_ray_autoload", "monitors", "runtime_ext"}
        for node in ast.walk(tree)
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
