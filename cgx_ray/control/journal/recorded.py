"""The situation that a policy was given, as JSON: written with every decision, and read back to decide again.

The layers are in the journal's `start` line alone; groups name them by their index there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from cgx_ray.control.learned.learned_errors import LearnedErrors
from cgx_ray.control.policies.adaptive import Adaptive
from cgx_ray.control.policies.named_policies import recorded_policy
from cgx_ray.control.policies.policy import PlannerInput, Policy, Situation, Static
from cgx_ray.plan import GroupPlan, Layer, Option, Plan
from cgx_ray.planner.candidates import CodecCost, CodecCosts
from cgx_ray.planner.cost import Link, Network
from cgx_ray.planner.engine_cost import HOST_ENGINE, EngineCost
from cgx_ray.planner.planned_group import PlannedGroup, fixed_groups, groups_of, period_of
from cgx_ray.planner.prediction import Measured


def situation_fields(situation: Situation) -> dict[str, Any]:
    """Return `situation` as JSON."""
    planner_input = situation.planner_input
    now = planner_input.now
    links = [_link_fields(measured.network.between) for measured in planner_input.states]
    return {
        "cause": situation.cause,
        "link": situation.link,
        "groups": group_fields(situation.plan.groups, now.layers),
        "dense_groups": group_fields(planner_input.dense_groups, now.layers),
        "version": situation.plan.version,
        "period": situation.plan.period,
        "network": {
            "num_nodes": now.network.num_nodes,
            "ranks_per_node": now.network.ranks_per_node,
            "between": _link_fields(now.network.between),
            "inside": _link_fields(now.network.inside) if now.network.inside is not None else None,
            "device_sums": now.network.device_sums,
            "node_sizes": list(now.network.node_sizes),
        },
        # More than one only if the link changes too fast to follow.
        "recent_links": links if len(links) > 1 else [],
        "backward_s": list(now.backward_s),
        "after_s": now.after_s,
        "codec_s": cost_fields(now.codec_costs),
        "gain": dict(now.gain),
        "squared_errors": {
            str(bits): [errors.get(layer.name) for layer in now.layers] for bits, errors in now.squared_errors.items()
        },
        "encodes_on": now.encodes_on,
        "max_period": now.max_period,
        "loss_fall": now.loss_fall,
        "bus": _link_fields(now.bus) if now.bus is not None else None,
        "engine": asdict(now.engine) if now.engine != HOST_ENGINE else None,
        "errors": planner_input.errors.recorded(),
        "plan_s": [
            {"groups": group_fields(groups, now.layers), "period": period_of(groups), "step_s": step_s}
            for groups, step_s in planner_input.plan_s.items()
        ],
        "banned": sorted(map(str, situation.banned)),
    }


def read_layers(start: Mapping[str, Any]) -> tuple[Layer, ...]:
    """Return the layers of a journal's `start` line."""
    return tuple(Layer(**fields) for fields in start["layers"])


def read_policy(start: Mapping[str, Any]) -> Policy:
    """Return the policy of a journal's `start` line. Raises ConfigError for one that no installed package offers."""
    fields = start["policy"]
    if fields["kind"] == "static":
        return Static()
    if fields["kind"] == "own":
        return recorded_policy(fields["name"], fields["given"])
    given = {
        "min_gain": fields["min_gain"],
        # Earlier journals have none.
        "periods": tuple(fields.get("periods", (1,))),
        "max_loss": fields.get("max_loss"),
    }
    if fields.get("fidelity") is not None:
        policy = Adaptive(fidelity=fields["fidelity"], **given)
        # Another version may have other codecs.
        if list(map(str, policy.options)) == fields["options"]:
            return policy
    return Adaptive(candidates=tuple(map(Option.parse, fields["options"])), **given)


def _read_network(fields: Mapping[str, Any]) -> Network:
    inside = fields["inside"]
    return Network(
        num_nodes=fields["num_nodes"],
        ranks_per_node=fields["ranks_per_node"],
        between=Link(**fields["between"]),
        inside=Link(**inside) if inside is not None else None,
        # Earlier journals have neither.
        device_sums=fields.get("device_sums", False),
        node_sizes=tuple(fields.get("node_sizes", ())),
    )


def read_situation(fields: Mapping[str, Any], layers: Sequence[Layer]) -> Situation:
    """Return the situation that `situation_fields` wrote. `layers`: those of the `start` line before it.

    Raises ConfigError, PlanError or LookupError for values that no situation has.
    """
    between = _read_network(fields["network"])
    groups = read_groups(fields["groups"], layers)
    # Earlier journals have no period.
    period = fields.get("period", 1)
    plan = Plan(version=fields["version"], world_size=between.num_workers, groups=groups, period=period)
    now = Measured(
        layers=tuple(layers),
        backward_s=tuple(fields["backward_s"]),
        after_s=fields["after_s"],
        network=between,
        codec_costs=_read_costs(fields["codec_s"]),
        gain=fields["gain"],
        # Earlier journals have none.
        squared_errors={
            int(bits): {layer.name: error for layer, error in zip(layers, errors, strict=True) if error is not None}
            for bits, errors in fields.get("squared_errors", {}).items()
        },
        encodes_on=fields["encodes_on"],
        max_period=fields.get("max_period", 1),
        loss_fall=fields.get("loss_fall", 1.0),
        bus=Link(**fields["bus"]) if fields.get("bus") is not None else None,
        engine=EngineCost(**fields["engine"]) if fields.get("engine") is not None else HOST_ENGINE,
        # Every plan has the fixed groups, so the plan in force has them too.
        fixed=fixed_groups(plan, layers),
    )
    # Earlier journals have none.
    ran = [
        (replace(plan, groups=read_groups(one["groups"], layers), period=one.get("period", 1)), one["step_s"])
        for one in fields.get("plan_s", ())
    ]
    dense = read_groups(fields.get("dense_groups", ()), layers)
    links = [Link(**link) for link in fields["recent_links"]]
    return Situation(
        cause=fields["cause"],
        plan=plan,
        link=fields.get("link", "network"),
        planner_input=PlannerInput(
            now=now,
            states=[replace(now, network=replace(between, between=link)) for link in links] or [now],
            errors=LearnedErrors.read(fields["errors"]),
            plan_s={groups_of(own, layers): step_s for own, step_s in ran},
            # Earlier journals have none.
            dense_groups=groups_of(replace(plan, groups=dense, period=1), layers) if dense else (),
        ),
        banned=frozenset(map(Option.parse, fields["banned"])),
    )


def group_fields(groups: Sequence[GroupPlan | PlannedGroup], layers: Sequence[Layer]) -> list[dict[str, Any]]:
    """Return `groups` as JSON. `layers`: in registration order."""
    place = {layer.name: index for index, layer in enumerate(layers)}
    return [
        {
            "layers": [place[name] for name in group.layers],
            "option": str(group.option),
            "device": str(group.option.device),
            "fixed": group.is_fixed,
        }
        for group in groups
    ]


def read_groups(fields: Sequence[Mapping[str, Any]], layers: Sequence[Layer]) -> tuple[GroupPlan, ...]:
    """Return the groups that `group_fields` wrote."""
    return tuple(
        GroupPlan(
            layers=tuple(layers[index].name for index in group["layers"]),
            # Texts of options did not say the device at first.
            option=Option.parse(group["option"]).on(group["device"]),
            is_fixed=group.get("fixed", False),
            numel=sum(layers[index].numel for index in group["layers"]),
        )
        for group in fields
    )


def cost_fields(costs: CodecCosts) -> dict[str, dict[str, float]]:
    """Return the times of each codec by name, those of rows if they were measured."""
    return {codec: cost.known() for codec, cost in costs.items()}


def _read_costs(fields: Mapping[str, Any]) -> dict[str, CodecCost]:
    # Earlier journals have lists, in the order of the names.
    named = {
        codec: times if isinstance(times, Mapping) else dict(zip(CodecCost.__slots__, times, strict=False))
        for codec, times in fields.items()
    }
    return {codec: CodecCost(**times) for codec, times in named.items()}


def _link_fields(link: Link) -> dict[str, float]:
    return {"alpha_s": link.alpha_s, "beta_s_per_byte": link.beta_s_per_byte}
