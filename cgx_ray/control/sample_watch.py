"""A watch over the samples that the controller decides from: if none come, the journal says so."""

from __future__ import annotations

import logging

from cgx_ray.control.journal import Journal, no_samples_entry
from cgx_ray.errors import listed
from cgx_ray.monitors.sample import NodeSample

logger = logging.getLogger(__name__)

# Seconds without a sample of any rank that are worth a line: a checkpoint or an evaluation usually takes less.
NO_SAMPLES_S = 60.0


class SampleWatch:
    """Knows when ranks and monitors have reported last. Any thread may use it."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        # When the last sample of a step came; at first, when samples were first waited for.
        self._sampled_s: float | None = None
        self._last_step = -1
        self._reported_s: dict[str, float] = {}
        self._is_noted = False

    def add(self, sample: NodeSample, now_s: float) -> None:
        """Note that a node has reported."""
        self._reported_s[sample.node_id] = now_s
        if sample.steps:
            self._sampled_s = now_s
            self._last_step = max(self._last_step, *(step.step for step in sample.steps))

    def look(self, now_s: float, time_s: float) -> None:
        """Write down that no samples have come for NO_SAMPLES_S, once until they come again. Call it now and then."""
        if self._sampled_s is None:
            self._sampled_s = now_s
        seconds = now_s - self._sampled_s
        was_noted, self._is_noted = self._is_noted, seconds >= NO_SAMPLES_S
        if was_noted or not self._is_noted:
            return
        quiet = sorted(node for node, seen_s in dict(self._reported_s).items() if now_s - seen_s >= NO_SAMPLES_S)
        self._journal.write(no_samples_entry(seconds, quiet, step=self._last_step, time_s=time_s))
        logger.warning(
            "no samples for %.0f s: the plan in force stays until they come again. Either no rank trains, or the "
            "monitors do not report; nodes that have stopped to report: %s",
            seconds,
            listed(quiet) or "none",
        )
