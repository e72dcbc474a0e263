"""The thresholds from which two measurements of a link count as different networks."""

from __future__ import annotations

from cgx_ray.planner.cost import Link

# Ratio of two bandwidths. Larger than the spread of an estimate that is sure (1.15x), so noise is no change.
LINK_CHANGE = 1.5
# Ratio of two latencies. Larger than for bandwidths, since busy processors add to latencies.
LATENCY_CHANGE = 2.0
# Least difference of two latencies, seconds: below it a busy processor explains the difference.
MIN_LATENCY_CHANGE_S = 1e-3


def network_cause(old: Link, new: Link) -> str | None:
    """Return in words how `new` differs from `old`, or None if both count as the same network."""
    if is_other_latency(old.alpha_s, new.alpha_s):
        verb = _verb(old.alpha_s, new.alpha_s)
        return f"latency {verb} from {old.alpha_s * 1e3:.1f} to {new.alpha_s * 1e3:.1f} ms"
    if not 1 / LINK_CHANGE < new.bandwidth_gbps / old.bandwidth_gbps < LINK_CHANGE:
        verb = _verb(old.bandwidth_gbps, new.bandwidth_gbps)
        return f"bandwidth {verb} from {_rate(old.bandwidth_gbps)} to {_rate(new.bandwidth_gbps)}"
    return None


def is_other_latency(old_s: float, new_s: float) -> bool:
    return abs(new_s - old_s) > MIN_LATENCY_CHANGE_S and not 1 / LATENCY_CHANGE < new_s / old_s < LATENCY_CHANGE


def _verb(old: float, new: float) -> str:
    return "rose" if new > old else "fell"


def _rate(gbps: float) -> str:
    return f"{gbps:.2f} Gbit/s" if gbps >= 1 else f"{gbps * 1e3:.0f} Mbit/s"
