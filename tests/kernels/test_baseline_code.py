"""The kernels' object files hold no instruction for newer processors where an old one would run it.

One binary serves every x86-64 processor: the widest loops that it can run are chosen when it starts. So loops for AVX2
and AVX-512 may be in functions of their own only. A function of a header that two object files have is merged by the
linker, and it may keep the one that was compiled for AVX2: such a function must not be among them.
"""

from __future__ import annotations

import platform
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# AVX and later (all begin with v, unlike verr and verw), and BMI. Not tzcnt: an old processor takes it for bsf, which
# gives the same unless the operand is 0, and the compiler uses it where it is not.
NEWER = re.compile(
    r"^(v(?!err\b|erw\b)\w+|andn|bextr|bls\w+|bzhi|mulx|pdep|pext|rorx|sarx|shlx|shrx|lzcnt|movbe|k\w+[bwdq])$"
)

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="there are no such loops on other processors")


def objects() -> list[Path]:
    newest = max(ROOT.glob("build/cp*/CMakeFiles/_native.dir"), key=lambda path: path.stat().st_mtime)
    return sorted(newest.glob("runtime_ext/csrc/**/*.o"))


def functions_with_newer_code(path: Path) -> set[str]:
    """Return the mangled names of functions of an object file with instructions that old processors lack."""
    argv = ["objdump", "--disassemble", "--no-show-raw-insn", str(path)]
    found, name = set(), ""
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.endswith(">:\n"):
                name = line.partition("<")[2][:-3]
            elif line.count("\t") and NEWER.match(line.split("\t")[1].split()[0]):
                found.add(name)
    return found


def merged_functions(path: Path) -> set[str]:
    """Return the mangled names of functions that the linker merges with those of other object files."""
    listed = subprocess.run(["nm", "--defined-only", str(path)], check=True, capture_output=True, text=True)
    lines = [line.split() for line in listed.stdout.splitlines()]
    return {name for _, kind, name in lines if kind in "WVu"}


def test_newer_instructions_are_only_in_functions_that_are_chosen_at_run_time() -> None:
    paths, wrong, num_loops = objects(), {}, 0
    for path in paths:
        newer = functions_with_newer_code(path)
        num_loops += len(newer)
        if "_avx" in path.name:
            wrong |= dict.fromkeys(newer & merged_functions(path), path.name)
        else:  # a function with several versions; the linker's resolver chooses
            wrong |= dict.fromkeys((name for name in newer if ".arch_x86_64_v" not in name), path.name)
    assert wrong == {}
    assert len(paths) > 20
    assert num_loops > 10, "the loops for AVX2 are not where this test looks"
