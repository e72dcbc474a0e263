"""Connection to a running Ray cluster."""

from __future__ import annotations

import signal
import socket

import click
import ray

from cgx_ray.errors import ConfigError

CONNECT_TIMEOUT_S = 5.0

address_option = click.option("--address", default="auto", show_default=True, help="Address of a running Ray cluster.")


def connect(address: str) -> None:
    """Connect to the Ray cluster at `address`. Raises ConfigError if there is none."""
    try:
        host, _, port = address.rpartition(":")
        if host and port.isdigit():
            # Ray itself would try for minutes.
            socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()
        handler = signal.getsignal(signal.SIGTERM)
        ray.init(address=address, log_to_driver=False)
        # Ray's own one ends the process inside its C++ code, which aborts.
        signal.signal(signal.SIGTERM, handler)
    except OSError as error:
        raise ConfigError(f"no Ray cluster at {address!r} ({error}); start one, or give its --address") from error
