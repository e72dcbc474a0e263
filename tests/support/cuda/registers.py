"""Registers and spills of the CUDA kernels, and the table of them that is checked in.

After a change of the kernels, or of NVRTC's version in constraints.txt, write the table anew, which takes 5 minutes:
`PYTHONPATH=tests .venv/bin/python -m support.cuda.registers`
"""

from __future__ import annotations

import csv
import itertools
import re
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from cgx_ray.runtime_ext import cuda_compile

TABLE = Path(__file__).resolve().parents[2] / "kernels" / "registers.csv"
# A100, its smaller kin, L4 and RTX 40, H100 and H200, B200, RTX 50
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
SOURCES = sorted(path.stem for path in (cuda_compile.SOURCES / "cuda").glob("*.cu"))
BITS = range(1, 9)

_KERNEL = re.compile(
    r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers",
    re.DOTALL,
)


class Build(NamedTuple):
    """A source with its macro, and what it is compiled for."""

    source: str
    bits: int | None
    architecture: str


class Use(NamedTuple):
    """Registers and memory that a thread of a kernel uses."""

    registers: int
    spilled_bytes: int


def builds(architectures: Iterable[str] = ARCHITECTURES, bits: Iterable[int] = BITS) -> list[Build]:
    """Return all builds of all sources; of qsgd, one for each number of `bits`."""
    sources = [(source, each) for source in SOURCES for each in (bits if source == "qsgd" else [None])]
    return [Build(*source, architecture) for source, architecture in itertools.product(sources, architectures)]


def measure(build: Build) -> dict[str, Use]:
    """Return what the compiler says of each kernel."""
    define = None if build.bits is None else f"CGX_BITS={build.bits}"
    options = (*cuda_compile.OPTIONS, "--ptxas-options=-v")
    code, said = cuda_compile.compile_with_log(build.source, build.architecture, define, options)
    found = {
        name: Use(int(registers), int(stores) + int(loads)) for name, stores, loads, registers in _KERNEL.findall(said)
    }
    assert sorted(found) == cuda_compile.kernel_names(build.source, code), said
    return found


def read_table() -> tuple[tuple[int, ...], dict[Build, dict[str, Use]]]:
    """Return the version of NVRTC that the table is of, and the table."""
    with TABLE.open(newline="") as file:
        head, *rows = csv.reader(file)
    table: dict[Build, dict[str, Use]] = {}
    for kernel, bits, *cells in rows:
        for architecture, cell in zip(head[2:], cells, strict=True):
            build = Build(kernel.partition("_")[0], int(bits) if bits else None, architecture)
            table.setdefault(build, {})[kernel] = Use(*map(int, cell.split("/")))
    return tuple(map(int, head[0].rpartition(" ")[2].split("."))), table


def write_table() -> None:
    """Write a row for each kernel, and a column for each architecture: registers/spilled bytes."""
    with ThreadPoolExecutor() as pool:
        measured = dict(zip(builds(), pool.map(measure, builds()), strict=True))
    rows: dict[tuple[str, int | None], list[str]] = {}
    for build, kernels in measured.items():
        for kernel, use in kernels.items():
            rows.setdefault((kernel, build.bits), []).append(f"{use.registers}/{use.spilled_bytes}")
    version = ".".join(map(str, cuda_compile.nvrtc_version()))
    with TABLE.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([f"kernel with NVRTC {version}", "bits", *ARCHITECTURES])
        writer.writerows([kernel, bits or "", *cells] for (kernel, bits), cells in rows.items())


if __name__ == "__main__":
    sys.exit(write_table())
