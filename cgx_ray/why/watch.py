"""The observer's thread: looks at connections and the node, writes the rank's record, and brings it to rank 0.

Each rank writes its record into the folder on its own node every five seconds, so an end of any kind loses little. If
ranks are on several nodes, they also hand it over through the store of torch.distributed, and rank 0 writes all: when
it is whole, and before that as far as it goes, for a step that never ends and for Ctrl-C.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from cgx_ray.untrusted import parse_json
from cgx_ray.why.meters import ConnectionMeter, NodeMeter, card_bytes
from cgx_ray.why.records import GATHERED_FILE, RankRecord, from_json, rank_file, to_json

if TYPE_CHECKING:
    import torch.distributed as dist

# Seconds between two looks at connections: a look takes 0.1 ms, and a step of a second should have several.
LOOK_S = 0.25
# Seconds of a look in which cards may show what others send: of a compute of 50 ms, one look in two.
_QUIET_S = 0.02
# Seconds between two writes of the record, which takes 6 ms of a processor: 0.1 % of its time.
_WRITE_S = 5.0
# Seconds after which a rank first hands over what it has seen so far; then after twice as long, and so on.
_SOON_S = 8.0
# Bytes of a piece that is handed over: where large packets get lost, it passes.
_PIECE_BYTES = 1000
# Seconds that the end of a process waits for the records of other ranks, and for rank 0 to have them.
GATHER_S = 5.0
# Seconds that rank 0 gives others to see that it has all records: where its script then ends, theirs would fail.
_LINGER_S = 2.0
_KEY, _ALL = "cgx_ray_why", "all"


class Watch:
    """Thread of one rank. `record` makes the rank's record from what meters have read."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        world_size: int,
        store: dist.Store | None,
        record: Callable[[Watch], RankRecord],
        guarded: Callable[[Callable[[], None]], Callable[[], None]],
    ) -> None:
        """
        store    None if all ranks are on this node
        guarded  makes of a function one that cannot end the training
        """
        self._folder, self._rank, self._world_size, self._store = folder, rank, world_size, store
        self._record = record
        self.connections, self.node = ConnectionMeter(), NodeMeter()
        # Of a training without steps all is of interest.
        self.connections.begin()
        self._is_over = threading.Event()
        # The process ends before all steps were measured.
        self._is_cut = False
        # Ranks whose record of the current number rank 0 lacks.
        self._others = set(range(1, world_size))
        # Until then it waits for other ranks: as long as the training goes on.
        self._last_s = math.inf
        self._thread = threading.Thread(target=guarded(self._run), name="cgx-why", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """True once all was measured."""
        return self._is_over.is_set()

    def begin(self) -> None:
        """Measure from now on."""
        self.connections.begin()
        self.node.begin()

    def end(self) -> None:
        """Take what was measured for the whole of it: the thread hands it over and ends."""
        self.connections.sample()
        self._is_over.set()

    def finish(self) -> None:
        """Hand over what was seen until now, at the end of the process."""
        self._last_s = time.monotonic() + GATHER_S
        self._is_cut = not self.is_over
        self.end()
        self._thread.join(2 * GATHER_S)

    def _run(self) -> None:
        try:
            self._watch()
        finally:
            self._store = None  # the training may have ended its process group, and with it the store

    def _watch(self) -> None:
        written_s, start_s = 0.0, time.monotonic()
        num_handed = 0
        while not self._is_over.wait(LOOK_S):
            self._look()
            now_s = time.monotonic()
            if now_s - written_s < _WRITE_S:
                continue
            written_s = now_s
            record = self._record(self)
            self._write(record)
            if self._store is not None and now_s - start_s >= _SOON_S * 2**num_handed:
                num_handed += self._share(record, num_handed)
        record = dataclasses.replace(self._record(self), is_whole=True)
        self._write(record)
        if self._rank == 0:
            self._gather()
        elif self._store is not None:
            self._hand_over(record, str(self._rank))
            self._wait_for(lambda: self._holds(_ALL))
            self._say_gathered([])

    def _look(self) -> None:
        """Look at connections, and at what cards carry for others while they rest."""
        seen = self.connections.sample()
        if self._store is None:
            return  # ranks of one node use no card
        before, start_s = card_bytes(), time.monotonic()
        time.sleep(_QUIET_S)
        after, seconds = card_bytes(), time.monotonic() - start_s
        if self.connections.sample() == seen:
            self.node.add_quiet(before, after, seconds)

    def _share(self, record: RankRecord, number: int) -> bool:
        """Hand over what this rank has seen, as its record `number`. On rank 0: return whether all others did."""
        if self._rank:
            self._hand_over(record, f"{self._rank}/{number}")
            return True
        self._others -= {rank for rank in self._others if self._take(f"{rank}/{number}")}
        if self._others:
            return False
        self._others = set(range(1, self._world_size))
        return True

    def _gather(self) -> None:
        """Wait for the records of all ranks, and write those of other nodes."""
        missing = set(range(self._world_size)) - {0}

        def take_all() -> bool:
            missing.difference_update([rank for rank in missing if self._has_whole(rank)])
            return not missing

        self._wait_for(take_all)
        if self._store is not None:
            self._store.set(f"{_KEY}/{_ALL}", "1")
            time.sleep(_LINGER_S)
        self._say_gathered(sorted(missing))

    def _say_gathered(self, missing: list[int]) -> None:
        """Let `--stop` end the script, unless it ends by itself, with a status of its own."""
        if not self._is_cut:
            self._write_json(GATHERED_FILE, {"missing": missing})

    def _has_whole(self, rank: int) -> bool:
        """Return whether this node has the whole record of `rank`."""
        if self._store is not None:
            return self._take(str(rank))
        path = self._folder / rank_file(rank)
        return path.exists() and from_json(RankRecord, parse_json(path.read_bytes())).is_whole

    def _hand_over(self, record: RankRecord, name: str) -> None:
        """Put a record into the store, under a name that it had none under."""
        assert self._store is not None
        packed = zlib.compress(json.dumps(to_json(record)).encode())
        starts = range(0, len(packed), _PIECE_BYTES)
        for place, start in enumerate(starts):
            piece = packed[start : start + _PIECE_BYTES]
            # It takes bytes, too.
            self._store.set(f"{_KEY}/{name}/piece{place}", piece)  # type: ignore[arg-type]
            self._holds(_ALL)  # waits for an answer: the next piece would go into the same packet
        self._store.set(f"{_KEY}/{name}", str(len(starts)))

    def _take(self, name: str) -> bool:
        """Write the record that was handed over under this name, if there is one. Return whether there is."""
        if self._store is None or not self._holds(name):
            return False
        num_pieces = int(self._store.get(f"{_KEY}/{name}"))
        packed = b"".join(self._store.get(f"{_KEY}/{name}/piece{place}") for place in range(num_pieces))
        self._write(from_json(RankRecord, parse_json(zlib.decompress(packed))))
        return True

    def _holds(self, key: str) -> bool:
        # Asked first, since `get` would keep the store from the training until the key is there.
        return self._store is not None and self._store.check([f"{_KEY}/{key}"])

    def _wait_for(self, is_there: Callable[[], bool]) -> None:
        while not is_there() and time.monotonic() < self._last_s:
            time.sleep(LOOK_S)

    def _write(self, record: RankRecord) -> None:
        self._write_json(rank_file(record.rank), to_json(record))

    def _write_json(self, name: str, data: object) -> None:
        new = self._folder / f".{name}.{os.getpid()}"
        new.write_text(json.dumps(data))
        new.replace(self._folder / name)
