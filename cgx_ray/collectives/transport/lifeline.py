"""A ring of connections beside all others: signs of life of the neighbours, and the last words of a rank that fails.

A rank that waits for messages cannot tell a peer that computes from one that is stopped, and a collective of the vendor
does not end when one rank gives up. So each rank is also connected with the next one and with the one before. It sends
both a beat several times within `silent_s`, from a thread that needs no lock of Python's: a rank is silent only while
its process or host stands still. A neighbour that is silent for longer is a verdict; so are the words of a rank that
fails. The first verdict goes round the ring in both directions and ends the exchanges of all ranks, with one
cause that all of them know. Two connections per rank, whatever the number of ranks.

The end of a process is no verdict: it may have finished its training. A rank that still needs it sees its data
connections close and reports that. If it did not say goodbye, its neighbours know its number by then.
"""

from __future__ import annotations

import atexit
import contextlib
import hmac
import os
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cgx_ray.errors import TransportError
from cgx_ray.ports import listen
from cgx_ray.runtime_ext.checks import native

# Seconds without a sign of life after which a rank counts as stopped. Long enough for a machine that swaps, and for a
# link that is cut for a while.
SILENT_S = 60.0
TOKEN_BYTES = 32
# Longest wait for the first error of another rank, in seconds. It may come a little later than the end of the
# connections that a rank waits on.
WORDS_S = 1.0

# Beats that a rank sends within `silent_s`. It sends at least one per second.
_BEATS = 8
# Time of one that has connected to show the token, in seconds. Ranks send theirs at once.
_HELLO_S = 2.0
# Connections that may take that time at once. Beyond it the oldest is disconnected.
_MAX_STRANGERS = 128
# Connections that wait to be accepted. While the queue is full, ranks try again after a second.
_BACKLOG = 1024
# Kind of a message, the rank that it is about, and the bytes of text after it.
_FRAME = struct.Struct("<cIH")
_BEAT, _WORDS, _BYE = b"B", b"W", b"Q"
_MAX_TEXT_BYTES = 4096


@dataclass(slots=True, eq=False)
class _Link:
    """A connection with a neighbour. `silence_s` counts only time in which this rank was running itself."""

    peer: int
    socket: socket.socket
    unread: bytearray = field(default_factory=bytearray)
    silence_s: float = 0.0
    has_left: bool = False


class Lifeline:
    """This rank's place in the ring. Every method may be called from any thread.

    address  host and port where the rank before connects
    cause    the first verdict, in words; None while all is well
    lost     the first neighbour that hung up without a goodbye, in words; None if there is none
    """

    def __init__(self, rank: int, world_size: int, host: str, silent_s: float = SILENT_S) -> None:
        """Listen on `host`, for `connect` only: ranks open the ports of their mesh later.

        Raises OSError if `host` is no address of this machine, ConfigError if all ports of CGX_PORTS are in use.
        """
        self._listener = listen(host)
        self._listener.listen(_BACKLOG)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self.cause: str | None = None
        self.lost: str | None = None
        self._rank, self._world_size, self._silent_s = rank, world_size, silent_s
        self._links: list[_Link] = []
        self._every_s = min(silent_s / _BEATS, 1.0)
        self._heartbeat: native.Heartbeat | None = None
        self._lock = threading.Lock()
        self._is_known = threading.Event()
        self._is_ending = False
        self._called: list[weakref.WeakMethod[Callable[[], object]]] = []
        self._called_on_loss: list[weakref.WeakMethod[Callable[[], object]]] = []
        self._later: tuple[float, Callable[[], object]] | None = None
        self._waker, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="cgx-ray-lifeline", daemon=True)
        _lifelines.add(self)

    def connect(self, addresses: Sequence[tuple[str, int]], token: bytes, timeout_s: float) -> None:
        """Connect with the neighbours and start to watch them. Call it on all ranks.

        addresses  `address` of each rank
        token      TOKEN_BYTES secret bytes that all ranks of the run have

        Raises TransportError if a neighbour cannot be reached within `timeout_s`.
        """
        end_s = time.monotonic() + timeout_s
        following, before = (self._rank + 1) % self._world_size, (self._rank - 1) % self._world_size
        half = TOKEN_BYTES // 2
        peer = following
        try:
            dialled = socket.create_connection(addresses[following], timeout=timeout_s)
            self._links.append(_Link(following, dialled))
            dialled.sendall(token[:half])
            peer = before
            self._links.append(_Link(before, _accept(self._listener, token[:half], end_s)))
            self._links[-1].socket.sendall(token[half:])
            peer = following
            answer = _read(dialled, half, end_s)
        except OSError as error:
            raise TransportError(
                f"rank {self._rank} cannot reach rank {peer} at {addresses[peer][0]} for signs of life ({error}); "
                "let TCP through between the nodes, or set GLOO_SOCKET_IFNAME to the interface that they share"
            ) from error
        finally:
            self._listener.close()
        if not hmac.compare_digest(answer, token[half:]):
            raise TransportError(f"rank {self._rank}: not rank {following} answered at {addresses[following]}")
        for link in self._links:
            link.socket.setblocking(False)
        atexit.register(self.close)
        sockets = [link.socket.fileno() for link in self._links]
        self._heartbeat = native.Heartbeat(sockets, _FRAME.pack(_BEAT, self._rank, 0), self._every_s)
        self._thread.start()

    def call_on_verdict(self, method: Callable[[], object]) -> None:
        """Call `method`, of an object that may be gone by then, after the verdict of another rank, at once if late."""
        with self._lock:
            self._called.append(weakref.WeakMethod(method))
            is_late = self.cause is not None
        if is_late:
            method()

    def call_on_loss(self, method: Callable[[], object]) -> None:
        """Call `method`, of an object that may be gone by then, when a neighbour hangs up without a goodbye."""
        self._called_on_loss.append(weakref.WeakMethod(method))

    def call_later(self, delay_s: float, call: Callable[[], object]) -> None:
        """Have the thread of this ring call `call`, which may `close` it, after `delay_s`. Takes no lock."""
        self._later = time.monotonic() + delay_s, call

    def report_failure(self, text: str) -> None:
        """Let all ranks know that this one has failed. Does nothing after another verdict."""
        is_named = text.startswith((f"rank {self._rank}:", f"rank {self._rank},"))
        self._pronounce(self._rank, text if is_named else f"rank {self._rank}: {text}", is_own=True)

    def wait(self, timeout_s: float) -> str | None:
        """Return the cause, or which neighbour is lost, as soon as there is one; None after `timeout_s`."""
        self._is_known.wait(timeout_s)
        return self.cause or self.lost

    def close(self) -> None:
        """Say goodbye to the neighbours and hang up. Return when that is done, also by another thread."""
        with self._lock:
            is_first, self._is_ending = not self._is_ending, True
        if is_first:
            if self._heartbeat is not None:
                self._heartbeat.stop()
            self._send(_FRAME.pack(_BYE, self._rank, 0))
            self._waker.send(b"\0")
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()
        if is_first:
            for opened in (self._listener, self._waker, self._woken, *(link.socket for link in self._links)):
                opened.close()
            atexit.unregister(self.close)

    def close_copies(self) -> None:
        """In a forked child: close its copies, which would hide the end of this rank from its neighbours."""
        # Another thread may have held the lock, and is not in the child.
        self._lock, self._is_ending = threading.Lock(), True
        if self._heartbeat is not None:
            self._heartbeat.close_copy()
        for opened in (self._listener, self._waker, self._woken, *(link.socket for link in self._links)):
            opened.close()

    def _run(self) -> None:
        last_s = time.monotonic()
        while not self._is_ending:
            with selectors.PollSelector() as selector:
                selector.register(self._woken, selectors.EVENT_READ)
                for link in self._links:
                    if not link.has_left:
                        selector.register(link.socket, selectors.EVENT_READ)
                selector.select(self._every_s)
            if self._is_ending:
                return
            now_s = time.monotonic()
            # This process may have been stopped itself, or without Python's lock: then its neighbours are not to blame
            # for the time.
            passed_s, last_s = min(now_s - last_s, 2 * self._every_s), now_s
            for link in self._links:
                if not link.has_left:
                    self._listen(link, passed_s)
            if self._later is not None and now_s >= self._later[0]:
                call, self._later = self._later[1], None
                call()

    def _listen(self, link: _Link, passed_s: float) -> None:
        """Take in what has come from a neighbour, or count its silence."""
        try:
            received = link.socket.recv(1 << 16)
        except BlockingIOError:
            link.silence_s += passed_s
            if link.silence_s > self._silent_s:
                link.has_left = True
                self._pronounce(link.peer, f"rank {link.peer} has been silent for {self._silent_s:g} s")
            return
        except OSError:
            received = b""
        link.silence_s = 0.0
        link.unread += received
        while len(link.unread) >= _FRAME.size:
            kind, rank, num_bytes = _FRAME.unpack_from(link.unread)
            if len(link.unread) < _FRAME.size + num_bytes:
                break
            text = bytes(link.unread[_FRAME.size : _FRAME.size + num_bytes]).decode(errors="replace")
            del link.unread[: _FRAME.size + num_bytes]
            link.has_left |= kind == _BYE
            if kind == _WORDS:
                self._pronounce(rank, text)
        if not received and not link.has_left:
            link.has_left = True
            self.lost = self.lost or f"rank {link.peer} hung up and did not say why"
            self._is_known.set()
            _call(self._called_on_loss)

    def _pronounce(self, rank: int, text: str, *, is_own: bool = False) -> None:
        """Take up the first verdict and pass it on, also to a silent rank, which may come back."""
        with self._lock:
            if self.cause is not None:
                return
            self.cause = text
        self._is_known.set()
        words = text.encode()[:_MAX_TEXT_BYTES]
        self._send(_FRAME.pack(_WORDS, rank, len(words)) + words)
        if not is_own:
            _call(self._called)

    def _send(self, frame: bytes) -> None:
        with self._lock:
            for link in self._links:
                # The buffer is full only if the neighbour has not read hundreds of beats. Then it counts as silent, and
                # the frame may be lost.
                with contextlib.suppress(OSError):
                    link.socket.send(frame)


def _call(methods: Sequence[weakref.WeakMethod[Callable[[], object]]]) -> None:
    for reference in methods:
        method = reference()
        if method is not None:
            method()


def _accept(listener: socket.socket, hello: bytes, end_s: float) -> socket.socket:
    """Return the first connection that begins with `hello`, and disconnect all others.

    Raises OSError if none comes until `end_s`, or if this process may not open more files.
    """
    strangers: dict[socket.socket, float] = {}  # by connection, the end of its time; the oldest is the first
    with selectors.PollSelector() as selector:

        def disconnect(opened: socket.socket) -> None:
            del strangers[opened]
            selector.unregister(opened)
            opened.close()

        selector.register(listener, selectors.EVENT_READ)
        try:
            while (now_s := time.monotonic()) < end_s:
                for opened in [opened for opened, until_s in strangers.items() if until_s <= now_s]:
                    disconnect(opened)
                ready = {key.fileobj for key, _ in selector.select(min([end_s, *strangers.values()]) - now_s)}
                for opened in [opened for opened in strangers if opened in ready]:
                    with contextlib.suppress(OSError):
                        if hmac.compare_digest(opened.recv(len(hello)), hello):
                            del strangers[opened]
                            return opened
                    disconnect(opened)
                if listener in ready:
                    if len(strangers) == _MAX_STRANGERS:
                        disconnect(next(iter(strangers)))
                    opened, _ = listener.accept()
                    strangers[opened] = now_s + _HELLO_S
                    # It counts as readable once all of the hello has come, or its end.
                    opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, len(hello))
                    selector.register(opened, selectors.EVENT_READ)
        finally:
            for opened in strangers:
                opened.close()
    raise TimeoutError("timed out")


def _read(opened: socket.socket, num_bytes: int, end_s: float) -> bytes:
    """Return `num_bytes` bytes. Raises OSError if they do not come until `end_s`."""
    received = b""
    while len(received) < num_bytes:
        opened.settimeout(max(end_s - time.monotonic(), 0.01))
        part = opened.recv(num_bytes - len(received))
        if not part:
            raise ConnectionError("hung up")
        received += part
    return received


_lifelines: weakref.WeakSet[Lifeline] = weakref.WeakSet()


def _close_copies() -> None:
    for lifeline in _lifelines:
        lifeline.close_copies()


os.register_at_fork(after_in_child=_close_copies)
