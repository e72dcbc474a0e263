"""Ports at which cgx_ray listens: those that the kernel picks, or a range for networks with a firewall.

`CGX_PORTS=20000-20999` names the range, first and last port. It counts for the process that has it, so set it on every
node: in the container's environment, or for a Ray job in `runtime_env={"env_vars": ...}`. It is no setting of a run,
because it belongs to a machine's firewall, as GLOO_SOCKET_IFNAME belongs to its network cards.
"""

from __future__ import annotations

import errno
import os
import re
import socket

from cgx_ray.errors import ConfigError

VARIABLE = "CGX_PORTS"
# Ports below are for programs of root.
_FIRST, _LAST = 1024, 65535
# To the kernel, port 0 is any free port.
ANY = (0, 0)
REMEDY = f"give {VARIABLE} at least one port per rank of the node and 5 for its monitors"


def port_range() -> tuple[int, int]:
    """Return first and last port of CGX_PORTS, or `ANY` if it is not set. Raises ConfigError on another text."""
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return ANY
    found = re.fullmatch(r"([0-9]+)\s*-\s*([0-9]+)", text)
    first, last = (int(found[1]), int(found[2])) if found else ANY
    if not _FIRST <= first <= last <= _LAST:
        raise ConfigError(
            f"{VARIABLE} {text!r} is not allowed; give the first and the last port, from {_FIRST} to {_LAST}, such as "
            "20000-20999"
        )
    return first, last


def listen(host: str) -> socket.socket:
    """Return a socket that listens on `host`, at the first port of the range where no other process does.

    Raises OSError if `host` is not an address of this machine, ConfigError if all ports are in use.
    """
    first, last = port_range()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in range(first, last + 1):
        try:
            # It sets SO_REUSEADDR, without which connections that ended a minute ago would keep a port in use.
            return socket.create_server((host, port), family=family)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise ConfigError(f"all ports from {first} to {last} are in use on {host}; {REMEDY}")


def free_port(host: str) -> int:
    """Return a port for a program that listens on `host` itself. Another program may take it first; 0 is any."""
    if port_range() == ANY:
        return 0
    with listen(host) as found:
        return int(found.getsockname()[1])
