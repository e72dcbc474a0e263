"""Errors of cgx_ray. Every message says what was given, what is allowed and what to do next."""

import difflib
import errno
import functools
import inspect
import operator
import os
import resource
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

_T = TypeVar("_T")


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


class LimitError(CGXError, RuntimeError):
    """A process may open no more files, or start no more threads."""


class StateError(CGXError, ValueError):
    """A checkpoint's compression state cannot be restored into this model."""


class LabError(CGXError, RuntimeError):
    """An emulated network could not be made or changed."""


def limit_met(error: BaseException) -> str | None:
    """Return which limit of this process `error` comes from, and how to raise it; None if it comes from none.

    Libraries in C++ report it in words only, which are those of the system.
    """
    said = str(error)
    if os.strerror(errno.EMFILE) in said:
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return f"this process may have {most} files open: raise that limit with ulimit -n"
    if "can't start new thread" in said or os.strerror(errno.EAGAIN) in said:
        most, _ = resource.getrlimit(resource.RLIMIT_NPROC)
        allowed = "any number of" if most == resource.RLIM_INFINITY else most
        return (
            f"no thread can be started, and this user may have {allowed} threads: raise that limit with ulimit -u, or "
            "pids.max of the container, or free memory"
        )
    return None


def nearest(name: str, known: Iterable[str]) -> str:
    """Return which of `known` is most like `name`; "" if none is like it."""
    names, given = list(known), name.lower()
    # To difflib, neither "sar" nor "srq" is close to "sra", as short names never are.
    swapped = [one for one in names if sorted(one) == sorted(given)]
    replaced = [one for one in names if len(one) == len(given) > 2 and sum(map(operator.ne, one, given)) == 1]
    return next(iter(swapped or replaced or difflib.get_close_matches(given, names, n=1, cutoff=0.7)), "")


def unknown(what: str, name: object, known: Sequence[str]) -> str:
    """Say that `name` is none of `known`, which one it may be, and which there are. `what`: as "codec"."""
    near = nearest(str(name), map(str, known))
    return f"unknown {what} {name!r}; {f'did you mean {near!r}? ' if near else ''}known: {', '.join(known)}"


def names_arguments(cls: type[_T]) -> type[_T]:
    """Decorate a dataclass: an argument that it does not take is a ConfigError, which names the most similar one."""
    make = cls.__init__
    known = [name for name in inspect.signature(make).parameters if name != "self"]

    @functools.wraps(make)
    def check(self: _T, *values: Any, **arguments: Any) -> None:
        for name in arguments:
            if name not in known:
                raise ConfigError(f"{cls.__name__} got {unknown('argument', name, known)}")
        make(self, *values, **arguments)

    setattr(cls, "__init__", check)  # noqa: B010 - mypy lets no method be replaced
    return cls


def listed(names: Sequence[str]) -> str:
    """The first three of `names`, for a message, and how many more there are."""
    num_more = len(names) - 3
    return ", ".join(names[:3]) + (f" and {num_more} more" if num_more > 0 else "")
