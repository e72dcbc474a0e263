"""Errors of cgx_ray. Every message says what was given, what is allowed and what to do next."""


class CGXError(Exception):
    """Base of every error that cgx_ray raises on purpose."""


class ConfigError(CGXError, ValueError):
    """An argument is not allowed: unknown policy, codec, scheme, bits, density."""


class PlanError(CGXError, ValueError):
    """A plan does not fit the model or the world size. The plan in force stays in force."""


class WireError(CGXError, RuntimeError):
    """A message is broken or belongs to another plan, step or group. Nothing was decoded."""


class TransportError(CGXError, RuntimeError):
    """A peer did not answer, or the group of processes broke."""


class StateError(CGXError, ValueError):
    """A checkpoint's compression state cannot be restored into this model."""


class LabError(CGXError, RuntimeError):
    """An emulated network could not be made or changed."""
