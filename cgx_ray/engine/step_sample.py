"""Builds the sample of a finished step: its times, bytes, rates and gains."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from cgx_ray.collectives import Transport
from cgx_ray.engine.counted import counted_bursts, counted_lags, counted_peers
from cgx_ray.engine.sharded.shard_exchange import ShardExchange
from cgx_ray.engine.step import StepRun
from cgx_ray.engine.telemetry import Telemetry
from cgx_ray.monitors.sample import Burst, StepSample, Transfer


class Span(NamedTuple):
    """Time that a group spent in one phase: "ready" from the step's start, "encode", "exchange" or "decode".

    begin_s, end_s  by `time.perf_counter`, which processes of one Linux machine share
    """

    group: int
    phase: str
    begin_s: float
    end_s: float


def spans_of_step(step: StepRun, began_s: float) -> list[Span]:
    """Return what each group of `step` did when, group by group."""
    spans = []
    for group, phases in zip(step.groups, step.phases, strict=True):
        spans.append(Span(group.index, "ready", began_s, step.ready_at[group.index]))
        spans += [Span(group.index, *lap) for lap in phases.laps]
        spans += [Span(group.index, "exchange", *round_) for round_ in phases.rounds]
    return spans


def sample_of_step(
    step: StepRun, transport: Transport, telemetry: Telemetry, began_s: float, ended_s: float
) -> StepSample:
    """Return the sample of `step`, which lasted from `began_s` to `ended_s`. Of a round, it is the mean step.

    Empties the transport's counters of bytes and rates.
    """
    seconds = exchange_seconds([phases.rounds for phases in step.phases], [g.sent_bytes for g in step.groups])
    bursts: tuple[Burst, ...] = ()
    rate_from: dict[int, float] = {}
    rank, nodes, num_steps = transport.rank, transport.nodes, step.num_steps
    with telemetry.optional("rates of arrival", step.number):
        arrived = transport.take_bursts()
        bursts = counted_bursts(_bursts(arrived), rank, nodes)
        rate_from = _rates(arrived, counted_peers(rank, nodes, step.number))
    return StepSample(
        rank=rank,
        step=step.number,
        num_steps=num_steps,
        plan_version=step.plan_version,
        step_s=(ended_s - began_s) / num_steps,
        compute_s=(step.last_arrival - began_s) / num_steps,
        encode_s=sum(phases.encode for phases in step.phases) / num_steps,
        exchange_s=sum(seconds) / num_steps,
        decode_s=sum(phases.decode for phases in step.phases) / num_steps,
        wire_bytes=round((step.shared_bytes + sum(group.sent_bytes for group in step.groups)) / num_steps),
        card_bytes=transport.take_card_bytes(),
        dense_bytes=sum(group.dense_bytes for group in step.groups),
        ready_s=tuple((ready - began_s) / num_steps for ready in step.ready_at),
        transfers=_transfers(step, seconds),
        gain=step.meter.gains if step.meter is not None else {},
        kept=step.meter.kept() if step.meter is not None else {},
        gain_curve=step.meter.curve() if step.meter is not None else (),
        norm=step.meter.norm if step.meter is not None else None,
        residual_norm=step.meter.residual_norm() if step.meter is not None else None,
        is_finite=all(group.is_finite for group in step.groups),
        layer_errors=step.meter.layer_errors() if step.meter is not None else {},
        error_bits=step.meter.bits if step.meter is not None else None,
        bursts=bursts,
        rate_from=rate_from,
        # Of the greeting before this step, on all ranks.
        lag_s=counted_lags(rank, nodes, transport.lag_s),
        num_local=transport.num_local,
    )


def sample_of_shards(done: ShardExchange, rank: int, dense_bytes: int, step_s: float, waited_s: float) -> StepSample:
    """Return the sample of a step of a sharded model, before `done` begins the next step.

    Empties the transports' counters of bytes. There are no transfers, since the planner knows schemes of whole
    gradients only.

    rank      in the whole run
    waited_s  seconds that the training thread has waited for the exchange, also in a pause before the step
    """
    return StepSample(
        rank=rank,
        step=done.step,
        plan_version=done.plan_version,
        step_s=step_s,
        compute_s=max(step_s - waited_s, 0.0),
        encode_s=sum(phases.encode for phases in done.phases),
        exchange_s=sum(phases.exchange for phases in done.phases),
        decode_s=sum(phases.decode for phases in done.phases),
        wire_bytes=done.sent_bytes,
        card_bytes=sum(transport.take_card_bytes() for transport in done.transports),
        dense_bytes=dense_bytes,
        ready_s=(),
        transfers=(),
        # Ranks form a grid of shards by replicas, and so do the ranks of one node.
        num_local=math.prod(transport.num_local for transport in done.transports),
    )


def _transfers(step: StepRun, seconds: Sequence[float]) -> tuple[Transfer, ...]:
    return tuple(
        Transfer(
            group=group.index,
            scheme=str(group.plan.option.scheme),
            codec=group.codec_text,
            intra=str(group.plan.option.intra),
            numel=group.numel,
            wire_bytes=group.wire_bytes,
            index_bytes=group.index_bytes,
            sent_bytes=group.sent_bytes,
            dense_bytes=group.dense_bytes,
            seconds=exchange_s,
        )
        for group, exchange_s in zip(step.groups, seconds, strict=True)
    )


def exchange_seconds(rounds: Sequence[Sequence[tuple[float, float]]], num_bytes: Sequence[int]) -> list[float]:
    """Return, by group, its share of the time in which messages were under way.

    rounds     by group, (begin, end) of the times in which its messages were under way
    num_bytes  by group, bytes sent

    Groups that were under way at the same time share that time in proportion to their bytes, as they share the link.
    The shares add up to the time in which any group was under way.
    """
    spans = [(begin, end, group) for group, found in enumerate(rounds) for begin, end in found]
    borders = sorted({border for begin, end, _ in spans for border in (begin, end)})
    seconds = [0.0] * len(rounds)
    for begin, end in itertools.pairwise(borders):
        open_groups = [group for opened, closed, group in spans if opened <= begin and end <= closed]
        weights = [max(num_bytes[group], 1) for group in open_groups]
        for group, weight in zip(open_groups, weights, strict=True):
            seconds[group] += (end - begin) * weight / sum(weights)
    return seconds


def _bursts(arrived: Sequence[tuple[int, int, float]]) -> tuple[Burst, ...]:
    """Return the bursts of all ranks together, which are those of rank -1.

    arrived  (rank, bytes, seconds) of each reception
    """
    return tuple(Burst(count, took_s) for peer, count, took_s in arrived if peer < 0)


def _rates(arrived: Sequence[tuple[int, int, float]], peers: Sequence[int]) -> dict[int, float]:
    """Return the mean rate of each of `peers` that has sent something. `arrived`: as for `_bursts`."""
    num_bytes, seconds = dict.fromkeys(peers, 0), dict.fromkeys(peers, 0.0)
    for peer, count, took_s in arrived:
        if peer in num_bytes:
            num_bytes[peer] += count
            seconds[peer] += took_s
    return {peer: num_bytes[peer] / seconds[peer] for peer in peers if seconds[peer] > 0}
