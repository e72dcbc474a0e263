"""Bandwidth as libiperf measures it, through the package iperf3.

libiperf redirects the standard output of its process, ends that process on some errors and runs one test at a time.
So each end of a test is a process of its own, `iperf3_process`.
"""

from __future__ import annotations

import functools
import json
import logging
import selectors
import subprocess
import sys
from pathlib import Path
from typing import Any

from cgx_ray.ports import free_port

logger = logging.getLogger(__name__)

# A test on a link that has become slow ends here, and what came until then is its rate.
MAX_TEST_S = 5
# Of a server until it listens, of a client until its test is over.
ANSWER_TIMEOUT_S = 20.0
# Seconds after which a server ends, tested or not: several times what the probes before a test take on a slow link.
MAX_SERVE_S = 120.0


def available() -> bool:
    """Return True if libiperf loads on this node. Logs a failure. Tries again only if a process could not answer."""
    try:
        return _loads()
    except OSError as error:
        logger.warning("bandwidth is probed over TCP this time, because iperf3 could not be tried: %s", error)
        return False


@functools.cache
def _loads() -> bool:
    """Try once to load libiperf. Raises OSError, and so keeps no answer, if no process starts or answers in time."""
    process = _start("check")
    try:
        _answer(process, "iperf3", "version")
    except TimeoutError:
        raise
    except OSError as error:
        logger.warning(
            "bandwidth is probed over TCP without iperf3, whose library does not load here (%s); "
            "install it, on Debian and Ubuntu: apt-get install libiperf0",
            error,
        )
        return False
    finally:
        _end(process)
    return True


class Iperf3Server:
    """An iperf3 server for one test from one address, for at most MAX_SERVE_S. Once constructed it listens."""

    def __init__(self, host: str, peer: str) -> None:
        """Listen on `host`, for the address `peer`, at a port as `ports.listen` chooses it.

        Raises OSError with iperf3's message.
        """
        self._process = _start("server", host, str(free_port(host)), peer, str(MAX_SERVE_S))
        try:
            port = int(_answer(self._process, f"iperf3 server on {host}", "port"))
        except BaseException:
            self.close()
            raise
        self.address: tuple[str, int] = (host, port)

    def close(self) -> None:
        """End the server, and a test that is under way. May be called again."""
        _end(self._process)


def measure_iperf3(host: str, port: int, num_bytes: int, source: str) -> float:
    """Send `num_bytes` to an `Iperf3Server`, for at most MAX_TEST_S; returns bytes a second as it received them.

    A test is over when the client has written everything, and libiperf's server then drops what it has not read yet.
    So few bytes, which socket buffers hold, may give a rate of 0.

    source  address of this node that the server expects

    Raises OSError with iperf3's message if the test fails, TimeoutError if it takes longer than ANSWER_TIMEOUT_S.
    """
    what = f"iperf3 to {host}:{port}"
    process = _start("client", host, str(port), str(num_bytes), str(MAX_TEST_S), source)
    try:
        return float(_answer(process, what, "received_bits_per_s")) / 8
    finally:
        _end(process)


def _start(*words: str) -> subprocess.Popen[bytes]:
    """Start `iperf3_process`. It ends when its standard input is closed, so it never outlives this process."""
    # -P keeps this folder off the module path: its files must not hide modules of the same name.
    argv = [sys.executable, "-P", str(Path(__file__).with_name("iperf3_process.py")), *words]
    return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def _answer(process: subprocess.Popen[bytes], what: str, field: str) -> Any:
    """Wait for the line that `iperf3_process` answers; return its `field`.

    Raises OSError, whose message begins with `what`, if there is no line, or one with an error or without `field`.
    """
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        if not selector.select(ANSWER_TIMEOUT_S):
            raise TimeoutError(f"{what} took longer than {ANSWER_TIMEOUT_S:g} s")
    line = process.stdout.readline()
    if not line:
        said = process.communicate()[1].decode(errors="replace").strip().rpartition("\n")[2]
        raise OSError(f"{what}: its process ended with {process.returncode} and no answer; {said}")
    try:
        answer = json.loads(line)
    except ValueError as error:
        raise OSError(f"{what}: its process answered {line!r}, which is not JSON") from error
    if isinstance(answer, dict) and "error" in answer:
        raise OSError(f"{what}: {answer['error']}")
    if not isinstance(answer, dict) or field not in answer:
        raise OSError(f"{what}: its process answered {line!r}, which has no {field!r}")
    return answer[field]


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()
