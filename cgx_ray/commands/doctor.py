"""`cgx-ray doctor`: what this machine has for cgx_ray, what is missing, and the command that brings it."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import resource
import shutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

import click
from packaging.requirements import Requirement
from packaging.version import Version
from rich.console import Console

from cgx_ray.commands.finding import EVERYTHING, Finding, Use
from cgx_ray.commands.options import console_for, json_option
from cgx_ray.lab.namespaces import Lab
from cgx_ray.monitors import iperf3_probe
from cgx_ray.report.show import new_table, print_line, write_json

# File descriptors of a rank: connections to 1,000 others with 4 streams each, and Ray's own.
MIN_OPEN_FILES = 4096
# Bytes of the largest receive buffer of a socket: 1 Gbit/s over 50 ms has 6 MB under way.
MIN_SOCKET_BYTES = 6 << 20
# Bytes of shared memory through which 8 ranks of one host talk: 16 MiB of rings, and 1 MiB per rank for sums.
MIN_SHARED_BYTES = 24 << 20
# Clock sources that are read without a system call.
FAST_CLOCKS = frozenset({"tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "arch_sys_counter"})

# Exists where NVIDIA's driver is loaded.
_GPU_DRIVER = Path("/proc/driver/nvidia/version")


@click.command()
@click.option("--cluster", metavar="ADDRESS", help="Look at all nodes of this Ray cluster instead; `auto` finds it.")
@json_option("the findings")
def doctor(cluster: str | None, json_path: str | None) -> None:
    """Say what this machine has, what is missing, and how to get it.

    The exit status is the sum of 1 if the demo cannot work, 2 if training on CPUs cannot, 4 if this machine has a GPU
    and training on it cannot.

    With --cluster: network cards, MTUs, clocks, ports and versions of all nodes, and the exit status is 1 if something
    is wrong with them.
    """
    console = console_for(json_path)
    if cluster is not None:
        sys.exit(_look_at_cluster(cluster, console, json_path))
    findings = [finding for look in CHECKS for finding in look()]
    _show(console, findings)
    broken = broken_uses(findings)
    for use in Use:
        print_line(console, f"{use.value}: {'cannot work here' if use in broken else 'can work'}")
    if json_path is not None:
        rows = [asdict(finding) | {"needed_for": sorted(finding.needed_for)} for finding in findings]
        write_json(json_path, {"findings": rows, "works": {use.value: use not in broken for use in Use}})
    sys.exit(exit_status(broken if has_gpu() else broken - {Use.GPU}))


def _look_at_cluster(address: str, console: Console, json_path: str | None) -> int:
    from cgx_ray.commands.cluster_doctor import cluster_findings  # noqa: PLC0415 - Ray may not load

    findings = cluster_findings(address)
    _show(console, findings)
    if json_path is not None:
        write_json(json_path, {"findings": [asdict(finding) | {"needed_for": []} for finding in findings]})
    return int(any(finding.problem for finding in findings))


def has_gpu() -> bool:
    """Return whether this machine has an NVIDIA GPU, with or without what uses it."""
    return _GPU_DRIVER.exists() or any(Path("/dev").glob("nvidia[0-9]*"))


def broken_uses(findings: Iterable[Finding]) -> frozenset[Use]:
    """Return the uses that cannot work."""
    return frozenset(use for finding in findings if finding.problem for use in finding.needed_for)


def exit_status(broken: frozenset[Use]) -> int:
    return sum(1 << place for place, use in enumerate(Use) if use in broken)


def _show(console: Console, findings: list[Finding]) -> None:
    table = new_table(None, "", "found", num_left=2, wrap=True)
    for finding in findings:
        table.add_row(finding.name, f"{finding.found}{'; ' if finding.problem else ''}{finding.problem}")
    console.print(table)
    for finding in findings:
        if finding.problem:
            print_line(console, f"{finding.name}: {finding.remedy}", style="yellow")


def _python() -> list[Finding]:
    return [Finding(name="Python", found=platform.python_version())]


def _packages() -> list[Finding]:
    """Compare what is installed with the lower bounds of this package."""
    findings = []
    for line in importlib.metadata.requires("cgx-ray") or []:
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": "plots"}):
            continue
        install = f"pip install '{requirement}'" if requirement.marker is None else 'pip install "cgx-ray[plots]"'
        uses = EVERYTHING if requirement.marker is None else frozenset({Use.DEMO})
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            problem = "is not installed"
            findings.append(_package(requirement.name, "", uses, problem, install))
            continue
        is_old = not requirement.specifier.contains(Version(version), prereleases=True)
        problem = f"older than {requirement.specifier} allows" if is_old else ""
        findings.append(_package(requirement.name, version, uses, problem, install))
    return findings


def _package(name: str, version: str, uses: frozenset[Use], problem: str, install: str) -> Finding:
    return Finding(name=name, found=version or "-", needed_for=uses, problem=problem, remedy=install)


def _kernels() -> list[Finding]:
    name = "CPU kernels"
    try:
        from cgx_ray.runtime_ext.checks import native  # noqa: PLC0415 - it may not load
    except ImportError as error:
        problem, remedy = f"do not load: {error}", "pip install --force-reinstall --no-deps cgx-ray"
        return [Finding(name=name, found="-", needed_for=EVERYTHING, problem=problem, remedy=remedy)]
    return [Finding(name=name, found=native.instruction_sets()[-1])]


def _gpus() -> list[Finding]:
    """Look for GPUs, and for CuPy and NVRTC, which compile and launch the kernels for them."""
    try:
        import torch  # noqa: PLC0415 - it may not load
    except ImportError as error:
        return [_package("torch", "", EVERYTHING, f"does not load: {error}", "pip install --force-reinstall torch")]
    if not torch.cuda.is_available():
        return [
            Finding(
                name="GPU",
                found="none",
                needed_for=frozenset({Use.GPU}),
                problem="torch finds no CUDA device" if torch.version.cuda else "this torch is built for the CPU only",
                remedy="install a driver and a torch for CUDA, then pip install 'cgx-ray[cuda12]' or 'cgx-ray[cuda13]'",
            )
        ]
    extra = f"pip install 'cgx-ray[cuda{(torch.version.cuda or '13').partition('.')[0]}]'"
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    findings = [Finding(name="GPU", found=", ".join(names))]
    for name, module in (("CuPy", "cupy"), ("NVRTC", "cuda.bindings.nvrtc")):
        try:
            version = getattr(importlib.import_module(module), "__version__", "loads")
            findings.append(Finding(name=name, found=version))
        except ImportError as error:
            needed_for = frozenset({Use.GPU})
            findings.append(
                Finding(name=name, found="-", needed_for=needed_for, problem=f"does not load: {error}", remedy=extra)
            )
    return findings


def _probes() -> list[Finding]:
    if iperf3_probe.available():
        return [Finding(name="libiperf", found="loads")]
    problem = "does not load; bandwidth is probed over TCP instead"
    return [Finding(name="libiperf", found="-", problem=problem, remedy="apt-get install libiperf0")]


def _lab() -> list[Finding]:
    reason = Lab.available(rates_only=True)
    if reason is None:
        return [Finding(name="lab", found="links can be emulated")]
    remedy = "run as root with iproute2 installed, in a container with --cap-add NET_ADMIN --cap-add SYS_ADMIN"
    # Without a lab the demo slows its links down in software.
    return [Finding(name="lab", found="-", problem=reason, remedy=remedy)]


def _limits() -> list[Finding]:
    open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    problem = f"fewer than {MIN_OPEN_FILES:,}, which 1,000 ranks need" if open_files < MIN_OPEN_FILES else ""
    remedy = f"ulimit -n {16 * MIN_OPEN_FILES}"
    findings = [Finding(name="open files", found=f"{open_files:,}", problem=problem, remedy=remedy)]
    path = Path("/proc/sys/net/ipv4/tcp_rmem")
    if path.exists():
        socket_bytes = int(path.read_text().split()[2])
        problem = "limits the rate of far links" if socket_bytes < MIN_SOCKET_BYTES else ""
        remedy = f"sysctl -w net.ipv4.tcp_rmem='4096 131072 {4 * MIN_SOCKET_BYTES}'"
        found = f"{socket_bytes / 2**20:.0f} MiB at most"
        findings.append(Finding(name="TCP receive buffer", found=found, problem=problem, remedy=remedy))
    return findings


def _shared_memory() -> list[Finding]:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        problem, remedy = "is missing, so ranks of this host talk over TCP", "mount -t tmpfs tmpfs /dev/shm"
        return [Finding(name=str(folder), found="-", problem=problem, remedy=remedy)]
    free = shutil.disk_usage(folder).free
    is_small = free < MIN_SHARED_BYTES
    return [
        Finding(
            name=str(folder),
            found=f"{free / 2**20:,.0f} MiB free",
            problem="may be too small for the ranks of this host, which then talk over TCP" if is_small else "",
            remedy="mount -o remount,size=2g /dev/shm, or docker run --shm-size=2g",
        )
    ]


def _clock() -> list[Finding]:
    source = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    if not source.exists():
        return []
    name = source.read_text().strip()
    problem = "" if name in FAST_CLOCKS else "takes a system call to read, so time stamps are slow"
    remedy = f"echo tsc > {source}, if the machine offers it"
    return [Finding(name="clock", found=name, problem=problem, remedy=remedy)]


CHECKS: tuple[Callable[[], list[Finding]], ...] = (
    _python,
    _packages,
    _kernels,
    _gpus,
    _probes,
    _lab,
    _limits,
    _shared_memory,
    _clock,
)
