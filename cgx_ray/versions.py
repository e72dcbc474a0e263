"""The oldest torch and Ray that cgx_ray works with, as in pyproject.toml, and the newest of docs/versions.md."""

from __future__ import annotations

import re
import warnings

from cgx_ray.errors import ConfigError

OLDEST = {"torch": "2.11", "ray": "2.54"}
NEWEST = {"torch": "2.15", "ray": "2.60"}
_INSTALL = {"torch": "torch", "ray": "ray[default,train]"}


def check_version(package: str, version: str) -> None:
    """Raise ConfigError with the command that helps if `version` of `package` is older than cgx_ray works with.

    Without it, an old version fails somewhere inside, with the name of an attribute that it lacks. Warns of one that is
    newer than all that were run. A module calls it when it is imported, so once per process.
    """
    if _numbers(version) > _numbers(NEWEST[package]):
        warnings.warn(
            f"{package} {version} is newer than the newest that cgx_ray was run with, {NEWEST[package]}; if something "
            f"fails, run: pip install '{_INSTALL[package]}=={NEWEST[package]}.*'",
            stacklevel=2,
        )
    if _numbers(version) < _numbers(OLDEST[package]):
        raise ConfigError(
            f"{package} {version} is older than the oldest that cgx_ray works with, {OLDEST[package]}; "
            f"run: pip install '{_INSTALL[package]}>={OLDEST[package]}'"
        )


def _numbers(version: str) -> tuple[int, ...]:
    """Return (2, 13) of "2.13.0+cpu": major and minor release."""
    return tuple(int(number) for number in re.findall(r"[0-9]+", version)[:2])
