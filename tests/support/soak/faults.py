"""Faults of the soak test: which there are, and how a seed draws them. A training must survive each of them."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class SoakKind(StrEnum):
    """Effect of a fault. Those of `IN_LOOP` happen inside the training loop, the others are done to it from outside."""

    NAN = "NaN in a loss"
    UNUSED = "layers unused"
    UNUSED_BY_ONE = "layers unused by one rank"
    SLOW_RANK = "slow rank"
    RANK_STOPPED = "rank stopped"
    HOST_CUT = "host cut off"
    ALL_SLOW = "all links 20x slower"
    HOST_SLOW = "one link 10x slower"
    LATENCY = "latency of 30 ms"
    LOSS = "1 % of packets lost"
    BUSY = "busy host"
    AGENT_KILLED = "agent killed"
    AGENT_STOPPED = "agent stopped"
    CONTROLLER_KILLED = "controller killed"
    CONTROLLER_STOPPED = "controller stopped"
    READING_REFUSED = "pressure unreadable"
    STRANGERS = "300 silent strangers"
    JOURNAL_FULL = "journal on a full disk"
    JOURNAL_PIPE = "pipe in place of the journal"


IN_LOOP = (SoakKind.NAN, SoakKind.UNUSED, SoakKind.UNUSED_BY_ONE, SoakKind.SLOW_RANK)
# Shares of the steps between which faults begin. At first nothing is decided yet; the end shows whether all recovers.
_FIRST_SHARE, _LAST_SHARE = 0.05, 0.85
# Steps for which layers are unused, or a rank is slow.
_MAX_LOOP_STEPS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakFault:
    """One fault.

    step       after which it begins; in the loop, the first step that has it
    target     rank or host that it is about, where the kind is about one
    seconds    that it lasts; of no meaning in the loop
    num_steps  that it lasts in the loop; of no meaning elsewhere
    """

    kind: SoakKind
    step: int
    target: int
    seconds: float
    num_steps: int

    @property
    def is_in_loop(self) -> bool:
        return self.kind in IN_LOOP

    def __str__(self) -> str:
        if self.kind is SoakKind.NAN:
            length = "once"
        else:
            length = f"for {self.num_steps} steps" if self.is_in_loop else f"for {self.seconds:.1f} s"
        return f"step {self.step}: {self.kind}, {length}"

    def fields(self) -> dict[str, Any]:
        """Return what the training loop needs."""
        return {"kind": self.kind.name, "first": self.step, "last": self.step + self.num_steps - 1, "rank": self.target}


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakOptions:
    """Sizes of a soak test.

    seed             of the faults, the model, its batches and the codecs
    steps            of each of the two trainings
    faults           number of faults
    num_hosts        of the lab; each has `ranks_per_host` ranks
    longest_s        seconds of the longest fault; the shortest takes a fifth
    step_s           seconds that a step takes at least, so that a fault of seconds does not last for all steps
    width, num_layers
                     of the model
    """

    seed: int
    steps: int
    faults: int
    num_hosts: int = 2
    ranks_per_host: int = 2
    longest_s: float = 5.0
    step_s: float = 0.1
    width: int = 256
    num_layers: int = 6

    @property
    def num_ranks(self) -> int:
        return self.num_hosts * self.ranks_per_host

    def draw(self) -> list[SoakFault]:
        """Return the faults in order of their steps. All kinds come about equally often."""
        chance = random.Random(self.seed)
        places = range(math.ceil(_FIRST_SHARE * self.steps), int(_LAST_SHARE * self.steps))
        rounds = [chance.sample(list(SoakKind), len(SoakKind)) for _ in range(math.ceil(self.faults / len(SoakKind)))]
        kinds = itertools.chain.from_iterable(rounds)
        faults = []
        for step, kind in zip(sorted(chance.sample(places, self.faults)), kinds, strict=False):
            is_rank = kind in IN_LOOP or kind is SoakKind.RANK_STOPPED
            faults.append(
                SoakFault(
                    kind=kind,
                    step=step,
                    target=chance.randrange(self.num_ranks if is_rank else self.num_hosts),
                    seconds=chance.uniform(self.longest_s / 5, self.longest_s),
                    num_steps=1 if kind is SoakKind.NAN else chance.randint(2, _MAX_LOOP_STEPS),
                )
            )
        return faults
