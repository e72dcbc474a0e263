"""Errors of cgx_ray. Every message says what was given, what is allowed and what to do next."""

import difflib
import errno
import functools
import inspect
import operator
import os
import resource
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

# Longest value of an argument that an error repeats.
_SHOWN_CHARS = 40
_Callable = TypeVar("_Callable", bound=Callable[..., Any])


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


class LabConfigError(LabError, ConfigError):
    """A link, a schedule or a lab cannot be as it was given."""


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


def names_arguments(made: _Callable) -> _Callable:
    """Decorate a class or a function whose arguments have names.

    An argument that it does not take is a ConfigError, which names the most similar one. So is one without its name,
    where it needs one: that error says what to write. A class may have `elsewhere`: by argument that it does not take,
    where that is given.
    """
    elsewhere: Mapping[str, str] = getattr(made, "elsewhere", {})
    call = made.__init__ if isinstance(made, type) else made  # type: ignore[misc]
    parameters = {name: one for name, one in inspect.signature(call).parameters.items() if name != "self"}
    num_selves = len(inspect.signature(call).parameters) - len(parameters)

    @functools.wraps(call)
    def checked(*values: Any, **arguments: Any) -> Any:
        try:
            return call(*values, **arguments)
        except TypeError:
            # Looked at only then: plans have thousands of groups. The error may as well be another one.
            if misplaced := sorted(elsewhere.keys() & arguments.keys()):
                raise ConfigError(f"{made.__name__} takes no {misplaced[0]}; {elsewhere[misplaced[0]]}") from None
            if (problem := _wrong_call(made.__name__, parameters, values[num_selves:], arguments)) is not None:
                raise ConfigError(problem) from None
            raise

    if not isinstance(made, type):
        return cast(_Callable, checked)
    setattr(made, "__init__", checked)  # noqa: B010 - mypy lets no method be replaced
    return made


def _wrong_call(
    name: str, parameters: Mapping[str, inspect.Parameter], values: Sequence[object], arguments: Mapping[str, object]
) -> str | None:
    """Return which of these arguments `name` does not take, and what to write; None if none of them is the problem."""
    known = [one for one, parameter in parameters.items() if parameter.kind is not parameter.VAR_KEYWORD]
    if len(known) == len(parameters) and (wrong := [one for one in arguments if one not in known]):
        return f"{name} got {unknown('argument', wrong[0], known)}"
    unnamed = [one for one, parameter in parameters.items() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    if len(values) <= len(unnamed):
        return None
    free = [one for one in known if one not in unnamed and one not in arguments]
    named = {**dict(zip(free, values[len(unnamed) :], strict=False)), **arguments}
    written = ", ".join([*unnamed, *(f"{one}={_shown(value)}" for one, value in named.items())])
    takes = f"all arguments but {', '.join(unnamed)}" if unnamed else "all arguments"
    return f"{name} takes {takes} by name; did you mean {name}({written})?"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS and not text.startswith("<") else "..."


def listed(names: Sequence[str]) -> str:
    """The first three of `names`, for a message, and how many more there are."""
    num_more = len(names) - 3
    return ", ".join(names[:3]) + (f" and {num_more} more" if num_more > 0 else "")
