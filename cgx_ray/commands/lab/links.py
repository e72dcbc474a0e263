"""`cgx-ray lab set`, `cut`, `reconnect` and `status`: the links of a running lab."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from cgx_ray.commands.lab.link_options import change_of, describe_backend, lab_option, link_options
from cgx_ray.errors import LabConfigError
from cgx_ray.lab.handle import LabHandle
from cgx_ray.lab.link import DIRECTIONS, LINK_WORDS, Direction
from cgx_ray.lab.switch import Counters
from cgx_ray.report.show import STANDARD_OUTPUT, write_json

# A measurement is sound if 99 % of the packets are at most this late.
_SOUND_MS = 0.2


@click.command("set")
@click.option("--host", type=int, help="Change the links of this host only.")
@click.option("--direction", type=click.Choice(DIRECTIONS), help="Change this direction only, seen from the host.")
@link_options({})
@lab_option
def set_links(host: int | None, direction: Direction | None, pid: int | None, **words: str | None) -> None:
    """Change links now, while traffic flows."""
    change = change_of(words)
    if not change:
        raise LabConfigError(f"nothing to set; give one of {', '.join(f'--{word}' for word in LINK_WORDS)}")
    LabHandle.find(pid).set(host, direction, **change)


@click.command()
@click.argument("host", type=int)
@lab_option
def cut(host: int, pid: int | None) -> None:
    """Lose all packets to and from a host."""
    LabHandle.find(pid).cut(host)


@click.command()
@click.argument("host", type=int)
@lab_option
def reconnect(host: int, pid: int | None) -> None:
    """Connect a host again."""
    LabHandle.find(pid).reconnect(host)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@lab_option
def status(as_json: bool, pid: int | None) -> None:
    """Show links, packets, drops and lateness."""
    handle = LabHandle.find(pid)
    counters = handle.counters() if handle.backend == "switch" else None
    if as_json:
        write_json(STANDARD_OUTPUT, _describe(handle, counters))
        return
    click.echo(f"lab {handle.pid}: {len(handle.hosts)} hosts, {describe_backend(handle)}")
    for host in handle.hosts:
        cut_off = "" if handle.is_connected(host.index) else "  CUT OFF"
        click.echo(f"{host.name}  {host.address}{cut_off}")
        for direction in DIRECTIONS:
            counted = "" if counters is None else _describe_counts(counters, host.index, direction)
            click.echo(f"  {direction:4} {handle.link(host.index, direction)}{counted}")
    if counters:
        late = f"{counters.late_p50_ms:.3f} / {counters.late_p99_ms:.3f} / {counters.late_max_ms:.3f}"
        is_sound = counters.late_p99_ms < _SOUND_MS
        verdict = "sound" if is_sound else "too late: this machine is too busy for these links"
        click.echo(f"delivered {counters.delivered}, late by {late} ms (median / p99 / most): {verdict}")


def _describe(handle: LabHandle, counters: Counters | None) -> dict[str, Any]:
    return {
        "pid": handle.pid,
        "backend": handle.backend,
        "hosts": [asdict(host) for host in handle.hosts],
        "connected": [handle.is_connected(host.index) for host in handle.hosts],
        "links": [
            {direction: asdict(handle.link(host.index, direction)) for direction in DIRECTIONS} for host in handle.hosts
        ],
        "counters": counters and asdict(counters),
    }


def _describe_counts(counters: Counters, host: int, direction: Direction) -> str:
    count = counters.hosts[host][direction]
    dropped = count.dropped_queue + count.dropped_loss + count.dropped_mtu + count.dropped_cut
    return f"  {count.packets} packets, {count.bytes / 1e6:.1f} MB, {dropped} dropped"
