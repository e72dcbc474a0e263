"""Compile the CUDA sources by NVRTC, and keep the results in CuPy's folder of compiled kernels."""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import re
import tempfile
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).resolve().parent / "csrc"
INCLUDE_FOLDERS = (SOURCES / "cuda", SOURCES / "include")
# No contraction, no fast-math: the kernels agree bit for bit with `reference`. By default, division and square root are
# rounded correctly and denormal numbers are kept.
OPTIONS = ("--std=c++17", "--fmad=false", "--device-as-default-execution-space")
INSTALL = (
    "gradients on a CUDA device need CuPy and cuda-bindings, which do not load; install them: "
    'pip install "cgx-ray[cuda12]" or "cgx-ray[cuda13]", the version that torch.version.cuda names'
)


def architecture_for(capability: tuple[int, int]) -> str:
    """Return what to compile for, on a device of this compute capability: sm_90 is machine code, compute_90 is PTX.

    PTX is for devices that NVRTC does not know. It is that of the newest architecture which both know, and the driver
    compiles it when it is loaded. Raises RuntimeError if the device is older than all that NVRTC knows.
    """
    number = 10 * capability[0] + capability[1]
    known = _checked(_nvrtc().nvrtcGetSupportedArchs())
    if number in known:
        return f"sm_{number}"
    older = [other for other in known if other < number]
    if not older:
        version = ".".join(map(str, nvrtc_version()))
        raise RuntimeError(
            f"a CUDA device of compute capability {capability[0]}.{capability[1]} is too old for NVRTC {version}, "
            f"which takes {min(known) // 10}.{min(known) % 10} or newer; use a torch for an older CUDA, such as 12.6"
        )
    return f"compute_{max(older)}"


def nvrtc_version() -> tuple[int, int]:
    major, minor = _checked(_nvrtc().nvrtcVersion())
    return major, minor


def compile_source(source: str, architecture: str, define: str | None = None) -> bytes:
    """Return csrc/cuda/`source`.cu compiled for `architecture`, machine code or PTX as `architecture_for` says.

    define  NAME=VALUE of a macro

    Raises RuntimeError with the compiler's log if the source does not compile.
    """
    return compile_with_log(source, architecture, define)[0]


def compile_with_log(
    source: str, architecture: str, define: str | None = None, options: tuple[str, ...] = OPTIONS
) -> tuple[bytes, str]:
    """Do as `compile_source`, and return what the compiler says as well.

    NVRTC is called directly, because CuPy's RawModule(code=...) compiles with -ftz=true, which flushes denormal
    numbers.
    """
    nvrtc = _nvrtc()
    includes = [f"--include-path={folder}" for folder in INCLUDE_FOLDERS]
    arguments = [*options, *includes, f"--gpu-architecture={architecture}"]
    if define is not None:
        arguments.append(f"--define-macro={define}")
    text = (SOURCES / "cuda" / f"{source}.cu").read_bytes()
    program = _checked(nvrtc.nvrtcCreateProgram(text, f"{source}.cu".encode(), 0, [], []))
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(arguments), [argument.encode() for argument in arguments])
        log = bytes(_checked(nvrtc.nvrtcGetProgramLogSize(program)))
        _checked(nvrtc.nvrtcGetProgramLog(program, log))
        said = log.rstrip(b"\0").decode()
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise RuntimeError(f"{source}.cu does not compile for {architecture}:\n{said}")
        size, get = nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN
        if architecture.startswith("compute_"):
            size, get = nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX
        code = bytes(_checked(size(program)))
        _checked(get(program, code))
        return code.rstrip(b"\0") if get is nvrtc.nvrtcGetPTX else code, said
    finally:
        _checked(nvrtc.nvrtcDestroyProgram(program))


def kernel_names(source: str, code: bytes) -> list[str]:
    """Return the kernels in the result of `compile_source`: each has a section of machine code, or an entry of PTX."""
    pattern = rb"\.text\.(%b_\w+)(?=\0)" if code.startswith(b"\x7fELF") else rb"\.entry (%b_\w+)\("
    return sorted({name.decode() for name in re.findall(pattern % source.encode(), code)})


def compiled_file(source: str, architecture: str, define: str | None, folder: Path | None) -> Path:
    """Return the file that holds the result of `compile_source`; make it if it is missing.

    It is in `folder`, or in a temporary folder of this process if that is None or cannot be written.
    """
    name = _file_name(source, architecture, define)
    folders = [] if folder is None else [folder]
    for file in (known / name for known in [*folders, *(Path(own.name) for own in _own_folders)]):
        if file.exists():
            return file
    code = compile_source(source, architecture, define)
    problem = "this user has no home directory"
    if folder is not None:
        try:
            _write(folder / name, code)
            return folder / name
        except OSError as error:
            problem = f"{folder} cannot be written ({error.strerror})"
    file = _own_folder(problem) / name
    _write(file, code)
    return file


def cache_folder() -> Path | None:
    """Return CuPy's cache folder, so that CUPY_CACHE_DIR moves both caches; None if this user has no home."""
    if given := os.environ.get("CUPY_CACHE_DIR"):
        return Path(given)
    try:
        return Path.home() / ".cupy" / "kernel_cache"
    except RuntimeError:
        return None


def _file_name(source: str, architecture: str, define: str | None) -> str:
    digest = hashlib.sha256(repr((source, architecture, define, OPTIONS, nvrtc_version())).encode())
    headers = [header for folder in INCLUDE_FOLDERS for header in folder.glob("*.h")]
    for path in sorted([SOURCES / "cuda" / f"{source}.cu", *headers]):
        digest.update(path.read_bytes())
    ending = "ptx" if architecture.startswith("compute_") else "cubin"
    return f"cgx_ray-{source}-{digest.hexdigest()[:32]}.{ending}"


def _write(file: Path, content: bytes) -> None:
    """Write a file that other users may read. Other processes see all of it or none, and an error leaves nothing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    number, name = tempfile.mkstemp(dir=file.parent, prefix=file.stem)
    try:
        with open(number, "wb") as new:
            new.write(content)
        os.chmod(name, 0o644)
        os.replace(name, file)
    except BaseException:
        os.unlink(name)
        raise


# None, or one. It goes when Python ends.
_own_folders: list[tempfile.TemporaryDirectory[str]] = []


def _own_folder(problem: str) -> Path:
    """Return a temporary folder that only this process uses, and say once why it is needed."""
    if not _own_folders:
        logger.warning(
            "%s, so each process compiles its CUDA kernels again; set CUPY_CACHE_DIR to a folder that can be written",
            problem,
        )
        folder = tempfile.TemporaryDirectory(prefix="cgx_ray-kernels-", ignore_cleanup_errors=True)
        atexit.register(folder.cleanup)
        _own_folders.append(folder)
    return Path(_own_folders[0].name)


def _checked(answer: tuple[Any, ...]) -> Any:
    """Return the values of a call to NVRTC; raise RuntimeError if the call failed."""
    status, *values = answer
    if status.value != 0:
        raise RuntimeError(f"NVRTC: {status.name}")
    return values[0] if len(values) == 1 else values


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc  # noqa: PLC0415 - most machines that compress on the CPU have none
    except ImportError as error:
        raise ImportError(INSTALL) from error
    return nvrtc
