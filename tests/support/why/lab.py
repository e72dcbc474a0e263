"""`cgx-ray why` in all hosts of a lab, on the training of `sleeping_training.py`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from cgx_ray.lab.jobs import run_in_hosts
from cgx_ray.lab.namespaces import Lab
from cgx_ray.lab.system import ip_batch

SCRIPT = Path(__file__).with_name("sleeping_training.py")


def ask_why(
    lab: Lab,
    folder: Path,
    *words: str,
    num_steps: int = 30,
    options: tuple[str, ...] = (),
    interrupt_s: int | None = None,
    **env: str,
) -> dict[str, Any]:
    """Train with `words` in all hosts until `num_steps` were observed. Return the verdict's JSON.

    options      of `cgx-ray why`
    interrupt_s  seconds after which somebody on host 0 types Ctrl-C
    """
    verdict, said = folder / "why.json", list[str]()
    argv = [sys.executable, "-m", "cgx_ray", "why", "--stop", "--steps", str(num_steps), "--json", str(verdict)]
    argv += [*options, "--", sys.executable, str(SCRIPT), *words]
    if interrupt_s is not None:
        where = f'[ $RANK = 0 ] && exec timeout --foreground --preserve-status --signal INT {interrupt_s} "$@"'
        argv = ["sh", "-c", f'{where}; exec "$@"', "sh", *argv]
    status = run_in_hosts(
        lab,
        range(len(lab.hosts)),
        argv,
        lambda host, line: said.append(f"[{host}] {line}"),
        {**os.environ, **env},
    )
    print("".join(said))  # of a test that fails
    found: dict[str, Any] = json.loads(verdict.read_text())
    assert status == (found["exit_status"] if interrupt_s is None else 130)
    assert found["notes"] == []
    return found


def add_cards(lab: Lab) -> None:
    """Give each host of the lab a second card, `eth1`, on a fast switch of its own."""
    lines = ["link add br1 type bridge", "link set br1 up"]
    for host in lab.hosts:
        lines.append(f"link add w{host.index} type veth peer name eth1 netns {host.namespace}")
        lines.append(f"link set w{host.index} master br1 up")
    ip_batch(lab.switch, lines)
    for host in lab.hosts:
        ip_batch(host.namespace, [f"address add 10.78.0.{host.index + 1}/24 dev eth1", "link set eth1 up"])
