"""History of a controller: handed to its successor, and written to a file in case it crashes."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cgx_ray.control.gains.loss_trend import LossFall
from cgx_ray.control.journal.facts import LinkKind, link_between
from cgx_ray.control.journal.sentences import RunTotals
from cgx_ray.control.learned.learned_errors import LearnedErrors
from cgx_ray.control.learned.measured import dense_groups, is_dense
from cgx_ray.control.trial.bans import Bans
from cgx_ray.control.trial.steps_beside_predictions import DenseBaseline
from cgx_ray.plan import Layer, Plan
from cgx_ray.planner.candidates import CodecCosts
from cgx_ray.planner.cost import Link
from cgx_ray.planner.engine_cost import HOST_ENGINE, EngineCost
from cgx_ray.planner.legs import EncodesOn
from cgx_ray.planner.prediction import Measured

logger = logging.getLogger(__name__)

# Rises when `History` changes, so that a snapshot of another version is not misread.
SNAPSHOT_FORMAT = 15
# Newest plans that are handed over. Ranks and leases refer to the last two or three.
KEPT_PLANS = 8
# Raised by a pickle that is cut or changed.
_READ_ERRORS = (
    *(pickle.UnpicklingError, LookupError, TypeError, ValueError, AttributeError, EOFError, ImportError, MemoryError),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """Report of the ranks when they begin.

    first_plan   to start with, unless there is one from before
    codec_costs  by codec, measured on the ranks (calibration)
    encodes_on   where codecs run
    bus, engine  as in `Measured`
    step         that the ranks begin with
    is_sharded   FSDP2 cuts the parameters: plans are chosen by trial (`trial.tried_codecs`)
    is_simulated
                 messages cross a simulated link
    """

    layers: tuple[Layer, ...]
    first_plan: Plan
    codec_costs: CodecCosts = field(default_factory=dict)
    encodes_on: EncodesOn = "thread"
    bus: Link | None = None
    engine: EngineCost = HOST_ENGINE
    step: int = 0
    is_sharded: bool = False
    is_simulated: bool = False

    @property
    def of_device(self) -> dict[str, Any]:
        """Fields of `Measured` about the device that holds the gradients, besides times of codecs."""
        return {"encodes_on": self.encodes_on, "bus": self.bus, "engine": self.engine}

    def link_kind(self, nodes: Sequence[str]) -> LinkKind:
        """Return what lies between the ranks. `nodes`: address of each rank's node; empty if unknown."""
        return "simulated" if self.is_simulated else link_between(nodes)

    @property
    def dense_plan(self) -> Plan:
        """The plan that others are compared with: that of DDP."""
        return self.first_plan if is_dense(self.first_plan) else dense_groups(self.first_plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """Measurements, errors and bans so far. Times are by the monotonic clock of the controller's node.

    measured   newest measurements: network, compute, gains
    baseline   of dense steps, for this number of workers
    loss_fall  since the first losses of the run
    """

    measured: Measured
    errors: LearnedErrors
    bans: Bans
    baseline: DenseBaseline
    loss_fall: LossFall


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The newest plans and all that was learned, see `GainWatch` for `gain_ratios`.

    learned, registration  None before the first measurements and before the first worker group
    totals                 over the steps of the whole run
    num_faults             errors that ended the training on a rank, by rank and kind
    """

    plans: tuple[Plan, ...] = ()
    gain_ratios: Mapping[str, float] = field(default_factory=dict)
    learned: Learned | None = None
    registration: Registration | None = None
    num_faults: Mapping[tuple[int, str], int] = field(default_factory=dict)
    totals: RunTotals = field(default_factory=RunTotals)


class Snapshot:
    """The history in a file of the controller's node. Only processes of this run's user may be able to write it."""

    def __init__(self, path: Path, *, warns: bool = True) -> None:
        """`warns`: log the first failure."""
        self.path = path
        self._warns = warns

    def write(self, history: History) -> None:
        """Replace the file at once. If that fails there is none: an old one would lack plans that ranks may have."""
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            new = self.path.with_suffix(".new")
            new.write_bytes(pickle.dumps(SNAPSHOT_FORMAT) + pickle.dumps(history))
            os.replace(new, self.path)
        except OSError as error:
            # A file system that has become read-only keeps it.
            with contextlib.suppress(OSError):
                self.path.unlink(missing_ok=True)
            if self._warns:
                self._warns = False
                logger.warning(
                    "the controller cannot keep its history in %s: %s; if it crashes, ranks keep their plan for good",
                    self.path,
                    error,
                )

    def read(self) -> History | None:
        """Return the history, or None if there is none of this version."""
        if not self.path.exists():
            return None
        try:
            with self.path.open("rb") as file:
                # A history of another version cannot always be read.
                version = pickle.load(file)
                history = pickle.load(file) if version == SNAPSHOT_FORMAT else None
        except _READ_ERRORS as error:
            logger.warning("%s is damaged (%r); the controller begins without its history", self.path, error)
            return None
        if not isinstance(history, History):
            logger.warning("%s has format %s, this version reads %s", self.path, version, SNAPSHOT_FORMAT)
            return None
        return history
