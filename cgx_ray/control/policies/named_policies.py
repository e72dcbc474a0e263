"""Policies by name: those of cgx_ray, and those that installed packages offer.

A package offers a policy by an entry point of the group `cgx_ray.policies`, such as `thrifty = "my_package:Thrifty"`.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from cgx_ray.control.policies.adaptive import Adaptive
from cgx_ray.control.policies.paper_policies import ByteComp, Cgx, Cupcake, Flexible
from cgx_ray.control.policies.policy import Policy, Static, as_codec
from cgx_ray.errors import ConfigError, nearest, unknown
from cgx_ray.installed import load, offered, package_of

OWN: Mapping[str, type[Policy]] = {
    "adaptive": Adaptive,
    "bytecomp": ByteComp,
    "cgx": Cgx,
    "cupcake": Cupcake,
    "flexible": Flexible,
    "static": Static,
}
ENTRY_POINTS = "cgx_ray.policies"
# Characters of an object that an error shows at most.
LONGEST_SHOWN = 80


def as_policy(policy: object, arguments: Mapping[str, Any]) -> Policy:
    """Return `policy`, or the one that it names, made with those of `arguments` that are not None."""
    given = {name: value for name, value in arguments.items() if value is not None}
    found = _named_policy(policy, given) if isinstance(policy, str) else policy
    shown = repr(policy) if len(repr(policy)) <= LONGEST_SHOWN else f"{repr(policy)[:LONGEST_SHOWN]}..."
    if found is policy and given:
        raise ConfigError(f"{', '.join(given)} cannot be given beside policy {shown}; give it to the policy itself")
    if isinstance(found, type) or not isinstance(found, Policy):
        raise ConfigError(
            f"policy {shown} is not allowed; give a name such as 'adaptive', or an object such as "
            "Adaptive(fidelity='balanced') or one whose class is a subclass of cgx_ray.policies.Policy"
        )
    try:
        if type(found).__module__ == "__main__":
            raise TypeError("its class is defined in the script itself")
        pickle.dumps(found)
    except Exception as error:
        raise ConfigError(
            f"policy {shown} cannot be sent to the process that decides ({error}); give an object that can be "
            "pickled, and whose class is in a module that can be imported"
        ) from error
    return found


def _named_policy(name: str, given: Mapping[str, Any]) -> Policy:
    packaged = {} if name in OWN else offered(ENTRY_POINTS, OWN)
    if name not in OWN and name not in packaged:
        raise ConfigError(
            f"{unknown('policy', name, tuple(OWN))}; of installed packages: {', '.join(sorted(packaged)) or 'none'}; "
            "install the package that offers it, or give a policy object"
        )
    cls = OWN[name] if name in OWN else _load(packaged[name])
    allowed = _arguments(cls)
    for argument, value in given.items():
        if argument == "codec":
            as_codec(value)  # raises for a wrong name first
        if argument not in allowed:
            near = nearest(argument, allowed)
            takers = " or ".join(repr(other) for other in OWN if argument in _arguments(OWN[other]))
            raise ConfigError(
                f"{argument} {value!r} is not allowed with policy {name!r}, which takes "
                f"{', '.join(allowed) or 'no argument'}; {f'did you mean {near!r}? Else ' if near else ''}"
                f"leave it out, or give policy={takers}"
            )
    return _make(cls, given)


def _arguments(cls: type[Policy]) -> list[str]:
    """Return the names of the arguments of a policy that is a dataclass; none of others."""
    return [one.name for one in getattr(cls, "__dataclass_fields__", {}).values() if one.init]


def _load(entry: EntryPoint) -> type[Policy]:
    """Return the class of an entry point. Raises ConfigError if it cannot be imported, or is no policy."""
    cls = load("policy", entry)
    if not (isinstance(cls, type) and callable(getattr(cls, "decide", None))):
        raise ConfigError(
            f"policy {entry.name!r} of package {package_of(entry)!r} is {cls!r}; its entry point must name a class "
            "with `decide`, such as a subclass of cgx_ray.policies.Policy"
        )
    return cls


def _make(cls: type[Policy], given: Mapping[str, Any]) -> Policy:
    """Return `cls(**given)`."""
    try:
        return cls(**given)
    except TypeError as error:
        raise ConfigError(f"policy {cls.__name__} cannot be made ({error}); give a policy object") from error


def recorded_policy(name: str, given: Mapping[str, Any]) -> Policy:
    """Return a policy of an installed package, as a journal has recorded it: class and arguments.

    Raises ConfigError if no entry point names the class. A journal may come from anyone, so nothing else is imported.
    """
    for entry in entry_points(group=ENTRY_POINTS):
        if entry.value.replace(" ", "") == name:
            return _make(_load(entry), given)
    raise ConfigError(
        f"policy {name!r} cannot be made again: no installed package offers it as an entry point of {ENTRY_POINTS!r}"
    )
