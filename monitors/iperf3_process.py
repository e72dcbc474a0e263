"""Run one end of an iperf3 test. `iperf3_probe` starts this file as a process of its own.

    check                               answers {"version": ...} if libiperf can be loaded
    server HOST PORT PEER MAX_S         answers {"port": ...} once it listens, then serves one test from PEER
    client HOST PORT NUM_BYTES MAX_S SOURCE
                                        answers {"received_bits_per_s": ..., "sent_bytes": ...}

The answer is one line of JSON on standard output; after a failure it is {"error": ...}. The process ends when its
standard input does. A parent that dies closes that pipe, however it dies.

This file is started by its path and imports the standard library and iperf3 only, so that it starts in 0.1 s.
"""

from __future__ import annotations

import ctypes
import ipaddress
import json
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import iperf3

# Given a name, the package does not search by ldconfig and gcc. This is the name its search would try last.
LIBRARY = "libiperf.so.0" if sys.platform == "linux" else None
LISTEN_POLL_S = 1e-3

# Linux's packet filters, for which Python has no names: an instruction, where the header of IP begins, and the source
# address in it by version.
SO_ATTACH_FILTER = 26
FILTER = struct.Struct("@HBBI")
NETWORK_HEADER = 0xFFF00000
SOURCE_AT = {4: 12, 6: 8}


class _Client(iperf3.Client):
    """A client that stops after a number of bytes. libiperf can do that, the package has no property for it."""

    def stop_after(self, num_bytes: int) -> None:
        set_bytes = self.lib.iperf_set_test_bytes
        set_bytes.argtypes, set_bytes.restype = (ctypes.c_void_p, ctypes.c_uint64), None
        set_bytes(self._test, num_bytes)


def check() -> None:
    answer(version=_Client(lib_name=LIBRARY).iperf_version)


def serve(host: str, port_text: str, peer: str, max_s: str) -> None:
    """Serve one test to the address `peer` only, for at most `max_s`, on a port, or on any free one if it is 0."""
    server = iperf3.Server(verbose=False, lib_name=LIBRARY)
    server.bind_address, server.port = host, int(port_text)
    results: list[Any] = []
    test = threading.Thread(target=lambda: results.append(server.run()), daemon=True)
    stdout = os.dup(1)  # the package points descriptor 1 elsewhere while libiperf runs
    test.start()
    # libiperf does not report that it listens. Connecting to find out would use up the one test.
    while (port := listening_port(peer)) is None and test.is_alive():
        time.sleep(LISTEN_POLL_S)
    if port is not None:
        answer(stdout, port=port)
    # A client that connects and sends nothing would keep libiperf for ever.
    test.join(float(max_s))
    if port is None:
        answer(stdout, error=results[0].error)


def listening_port(peer: str) -> int | None:
    """Port of the socket with which this process listens, None if there is none yet. Only `peer` finds the server."""
    for fd in map(int, os.listdir("/dev/fd")):
        try:
            sock = socket.socket(fileno=fd)
        except OSError:
            continue  # no socket, or closed meanwhile
        try:
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                if sys.platform == "linux":
                    admit_only(sock, peer)
                return int(sock.getsockname()[1])
        finally:
            sock.detach()
    return None


def admit_only(listener: socket.socket, peer: str) -> None:
    """Have the kernel drop what others than the host `peer` send: libiperf itself takes the first who comes."""
    address = ipaddress.ip_address(socket.getaddrinfo(peer, None)[0][4][0])
    words = struct.unpack(f"!{len(address.packed) // 4}I", address.packed)
    program = b""
    for index, word in enumerate(words):
        # Go on with the next word of the address if this one is the same, else to the last instruction.
        load = FILTER.pack(0x20, 0, 0, NETWORK_HEADER + SOURCE_AT[address.version] + 4 * index)
        program += load + FILTER.pack(0x15, 0, 2 * (len(words) - index) - 1, word)
    program += FILTER.pack(0x06, 0, 0, 0xFFFFFFFF) + FILTER.pack(0x06, 0, 0, 0)  # keep the packet; drop it
    memory = ctypes.create_string_buffer(program)
    words_and_pointer = struct.pack("@HP", len(program) // FILTER.size, ctypes.addressof(memory))
    listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, words_and_pointer)


def measure(host: str, port: str, num_bytes: str, max_s: str, source: str) -> None:
    """Send `num_bytes` from the address `source`, rounded up to a block of 128 KiB, for at most `max_s`."""
    client = _Client(verbose=False, lib_name=LIBRARY)
    client.server_hostname, client.port, client.duration = host, int(port), int(max_s)
    client.bind_address = source
    client.stop_after(int(num_bytes))
    result = client.run()
    if result.error is not None:
        answer(error=result.error)
    else:
        answer(received_bits_per_s=result.received_bps, sent_bytes=result.sent_bytes)


def answer(fd: int = 1, /, **values: object) -> None:
    os.write(fd, json.dumps(values).encode() + b"\n")


def end_with_parent() -> NoReturn:
    while os.read(0, 1):
        pass
    os._exit(1)


def main() -> NoReturn:
    threading.Thread(target=end_with_parent, daemon=True).start()
    roles: dict[str, Callable[..., None]] = {"check": check, "server": serve, "client": measure}
    role, *words = sys.argv[1:]
    try:
        roles[role](*words)
    except OSError as error:
        answer(error=str(error))  # the package could not load libiperf
    # The package's destructors call libiperf again, also after a test that failed.
    os._exit(0)


if __name__ == "__main__":
    main()
