"""No CUDA kernel spills, and each uses as many registers as the table says: by NVRTC, without a GPU."""

from __future__ import annotations

import pytest
from support.cuda.registers import ARCHITECTURES, SOURCES, Build, builds, measure, read_table

from cgx_ray.runtime_ext import cuda_compile

VERSION, TABLE = read_table()
# What spilled first when it did, on the oldest and on the most common GPU. The others are slow.
QUICK = [Build("qsgd", 3, "sm_80"), Build("qsgd", 8, "sm_90"), Build("select", None, "sm_80")]


def _name(build: Build) -> str:
    return f"{build.source}{build.bits or ''}-{build.architecture}"


@pytest.mark.long
@pytest.mark.parametrize(
    "build",
    [pytest.param(build, id=_name(build), marks=[] if build in QUICK else pytest.mark.slow) for build in builds()],
)
def test_no_kernel_spills_and_registers_are_those_of_the_table(build: Build) -> None:
    found = measure(build)
    assert {name: use.spilled_bytes for name, use in found.items() if use.spilled_bytes} == {}
    # Other versions of the compiler may use others.
    if cuda_compile.nvrtc_version() == VERSION:
        assert found == TABLE[build], "write tests/kernels/registers.csv anew: support/cuda/registers.py says how"


def test_the_table_has_all_builds_and_no_spill() -> None:
    assert TABLE.keys() == set(builds())
    assert len(SOURCES) >= 5
    assert {(build, name) for build, row in TABLE.items() for name, use in row.items() if use.spilled_bytes} == set()
    assert {build.architecture for build in TABLE} == set(ARCHITECTURES)
