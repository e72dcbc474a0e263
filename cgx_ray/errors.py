"""Errors of cgx_ray. Every message says what was given, what is allowed and what to do next."""

from collections.abc import Sequence


class CGXError(Exception):
    """Base of every error that cgx_ray raises on purpose."""


class ConfigError(CGXError, ValueError):
    """An argument is not allowed: unknown policy, codec, scheme, bits, density."""


class PlanError(CGXError, ValueError):
    """A plan does not fit the model or the world size. The plan in force stays in force."""


class WireError(CGXError, RuntimeError):
    """A message is broken or belongs to another plan, step or group. Nothing was decoded."""


class DamagedMessageError(WireError):
    """A message was changed on its way: its checksum (CRC-32C) is wrong."""


class TransportError(CGXError, RuntimeError):
    """A peer did not answer, or the group of processes broke."""


class PeerTimeoutError(TransportError):
    """A peer did not answer within the time-out."""


class ReplicaError(CGXError, RuntimeError):
    """Ranks hold different weights, so they train different models."""


class StateError(CGXError, ValueError):
    """A checkpoint's compression state cannot be restored into this model."""


class LabError(CGXError, RuntimeError):
    """An emulated network could not be made or changed."""


def listed(names: Sequence[str]) -> str:
    """The first three of `names`, for a message, and how many more there are."""
    num_more = len(names) - 3
    return ", ".join(names[:3]) + (f" and {num_more} more" if num_more > 0 else "")
