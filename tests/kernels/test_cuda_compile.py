"""Compilation of the CUDA kernels, which needs no GPU, and the files that keep the results."""

from __future__ import annotations

import functools
import logging
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from cgx_ray.runtime_ext import cuda_compile

# The smallest number of bits, one that divides a 32-bit word evenly, and one that does not.
DEFINES = {"qsgd": ["CGX_BITS=1", "CGX_BITS=4", "CGX_BITS=5"]}
SOURCES = sorted(path.stem for path in (cuda_compile.SOURCES / "cuda").glob("*.cu"))
BUILDS = [
    pytest.param(source, define, marks=[] if define in (None, "CGX_BITS=4") else pytest.mark.slow)
    for source in SOURCES
    for define in DEFINES.get(source, [None])
]
BUILD = ("qsgd", "sm_90", "CGX_BITS=4")
# Several claims look at the same machine code, which takes a second or two to compile.
compiled = functools.cache(cuda_compile.compile_source)


# For A100 the registers are measured, which compiles too.
@pytest.mark.parametrize(("source", "define"), BUILDS)
def test_every_kernel_compiles_for_h100(source: str, define: str | None) -> None:
    machine_code = compiled(source, "sm_90", define)
    assert machine_code.startswith(b"\x7fELF")
    assert f"{source}_".encode() in machine_code


# Fused instructions, those that flush denormals to zero, and divisions and roots without correct rounding.
_INEXACT = re.compile(r"\bfma\.\S+|\b\w+\S*\.(?:ftz|approx|full)\b\S*")


@pytest.mark.parametrize(("source", "define"), BUILDS)
def test_compiled_arithmetic_keeps_denormal_numbers_and_fuses_only_what_the_source_does(
    source: str, define: str | None
) -> None:
    _, *entries = compiled(source, "compute_90", define).decode().split(".entry ")
    ptx = {entry.partition("(")[0]: entry for entry in entries}
    for name, text in ptx.items():
        found = _INEXACT.findall(text)
        if not name.endswith("_sum"):
            assert found == [], name
            continue
        # `add_(alpha=)` of torch is fused: each element that is divided by the number of ranks takes its residual so.
        num_averaged = text.count("div.rn.f32") - ptx[name.replace("_sum", "_encode_float32")].count("div.rn.f32")
        assert found == ["fma.rn.f32"] * num_averaged


@pytest.mark.parametrize(
    ("option", "instruction"),
    [
        ("--fmad=true", "fma.rn.f32"),
        pytest.param("--ftz=true", "add.rn.ftz.f32", marks=pytest.mark.slow),
        pytest.param("--prec-div=false", "div.full.f32", marks=pytest.mark.slow),
    ],
)
def test_other_options_would_show_in_the_compiled_arithmetic(option: str, instruction: str) -> None:
    options = [given for given in cuda_compile.OPTIONS if given.partition("=")[0] != option.partition("=")[0]]
    ptx, _ = cuda_compile.compile_with_log("qsgd", "compute_90", "CGX_BITS=4", (*options, option))
    assert instruction in _INEXACT.findall(ptx.decode())


def test_a_source_that_does_not_compile_says_where() -> None:
    with pytest.raises(RuntimeError, match=r"qsgd.cu does not compile for sm_90[\s\S]*CGX_BITS"):
        cuda_compile.compile_source("qsgd", "sm_90")


def test_a_source_is_compiled_once_for_each_device_and_macro(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def compile_source(*build: object) -> bytes:
        calls.append(build)
        return repr(build).encode()

    monkeypatch.setattr(cuda_compile, "compile_source", compile_source)
    builds = [("qsgd", "sm_90", "CGX_BITS=4"), ("qsgd", "sm_80", "CGX_BITS=4"), ("qsgd", "sm_90", "CGX_BITS=5")]
    for build in builds + builds:
        assert cuda_compile.compiled_file(*build, tmp_path).read_bytes() == repr(build).encode()
    assert calls == builds
    assert len(list(tmp_path.iterdir())) == len(builds)


@pytest.mark.parametrize(
    ("capability", "architecture"),
    [
        ((8, 0), "sm_80"),
        ((9, 0), "sm_90"),
        # Newer than all that NVRTC knows, and one that it skips.
        ((13, 7), "compute_120"),
        ((8, 5), "compute_80"),
    ],
)
def test_unknown_devices_get_ptx_of_the_newest_architecture_that_they_have(
    capability: tuple[int, int], architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_compile._nvrtc(), "nvrtcGetSupportedArchs", lambda: (_Success, [75, 80, 90, 100, 120]))
    assert cuda_compile.architecture_for(capability) == architecture


def test_a_device_that_nvrtc_has_given_up_is_one_clear_error() -> None:
    with pytest.raises(RuntimeError, match=r"capability 3\.0 is too old for NVRTC \d+\.\d+, which takes \d+\.\d"):
        cuda_compile.architecture_for((3, 0))


class _Success:
    value = 0


@pytest.mark.parametrize(("source", "define"), BUILDS)
def test_machine_code_and_ptx_name_the_same_kernels(source: str, define: str | None) -> None:
    code, ptx = (compiled(source, f"{kind}_90", define) for kind in ("sm", "compute"))
    names = cuda_compile.kernel_names(source, code)
    text = (cuda_compile.SOURCES / "cuda" / f"{source}.cu").read_text()
    # Names of macros end in ##, for the type.
    declared = set(re.findall(rf"\b({source}_\w+?)_?(?:##\w+)?\(", text))
    assert {re.sub("_(float32|float16|bfloat16)$", "", name) for name in names} == declared
    assert cuda_compile.kernel_names(source, ptx) == names


def test_a_file_is_for_all_users_and_nothing_lies_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_compile, "compile_source", lambda *_: b"code")
    before = os.umask(0o077)
    try:
        file = cuda_compile.compiled_file(*BUILD, tmp_path / "new" / "folder")
    finally:
        os.umask(before)
    assert stat.S_IMODE(file.stat().st_mode) == 0o644
    assert [*file.parent.iterdir()] == [file]


def test_an_error_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="does not compile"):
        cuda_compile.compiled_file("qsgd", "sm_90", None, tmp_path)
    monkeypatch.setattr(cuda_compile, "compile_source", lambda *_: b"code")
    monkeypatch.setattr(cuda_compile, "_own_folders", [])
    monkeypatch.setattr(os, "replace", _disk_full)
    with pytest.raises(OSError, match="No space left"):
        cuda_compile.compiled_file(*BUILD, tmp_path)
    own = cuda_compile._own_folders[0]
    assert [*tmp_path.iterdir()] == [*Path(own.name).iterdir()] == []
    own.cleanup()


def _disk_full(*_: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("home", ["a file", "unknown"])
def test_without_a_home_that_can_be_written_a_temporary_folder_is_used(
    home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiled = []
    monkeypatch.setattr(cuda_compile, "compile_source", lambda *build: compiled.append(build) or b"code")
    monkeypatch.setattr(cuda_compile, "_own_folders", [])
    monkeypatch.delenv("CUPY_CACHE_DIR", raising=False)
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    if home == "unknown":
        monkeypatch.setattr(Path, "home", _no_home)
    with caplog.at_level(logging.WARNING):
        files = [cuda_compile.compiled_file(*BUILD, cuda_compile.cache_folder()) for _ in range(3)]
        cuda_compile.compiled_file("qsgd", "sm_90", "CGX_BITS=3", cuda_compile.cache_folder())
    assert files[0].read_bytes() == b"code"
    assert len(set(files)) == 1
    assert [define for _, _, define in compiled] == ["CGX_BITS=4", "CGX_BITS=3"]
    (record,) = caplog.records
    why = "this user has no home directory" if home == "unknown" else "cannot be written (Not a directory)"
    assert why in record.getMessage()
    assert "set CUPY_CACHE_DIR" in record.getMessage()
    folder = files[0].parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    cuda_compile._own_folders[0].cleanup()
    assert not folder.exists()


IN_A_TEMPORARY_FOLDER = """
from pathlib import Path
from cgx_ray.runtime_ext import cuda_compile
cuda_compile.compile_source = lambda *build: b"code"
print(cuda_compile.compiled_file("qsgd", "sm_90", "CGX_BITS=4", Path("/dev/null/cache")))
"""


def test_the_temporary_folder_goes_when_python_ends() -> None:
    argv = [sys.executable, "-W", "error", "-c", IN_A_TEMPORARY_FOLDER]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    file = Path(done.stdout.strip())
    assert file.name.startswith("cgx_ray-qsgd-")
    assert not file.parent.exists()
    (said,) = done.stderr.splitlines()
    assert said.startswith("/dev/null/cache cannot be written (Not a directory), so each process compiles")


def _no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_the_folder_is_that_of_cupy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CUPY_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cuda_compile.cache_folder() == tmp_path / ".cupy" / "kernel_cache"
    monkeypatch.setenv("CUPY_CACHE_DIR", "elsewhere")
    assert cuda_compile.cache_folder() == Path("elsewhere")
