"""Findings of `cgx-ray doctor`, on this machine and on the nodes of a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Use(StrEnum):
    DEMO = "demo"
    CPU = "CPU run"
    GPU = "GPU run"


EVERYTHING = frozenset(Use)
NOTHING: frozenset[Use] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    needed_for  uses that cannot work with this `problem`; empty if they only become slower
    problem     in words; "" if there is none
    remedy      the command or setting that removes the problem
    """

    name: str
    found: str
    needed_for: frozenset[Use] = NOTHING
    problem: str = ""
    remedy: str = ""
