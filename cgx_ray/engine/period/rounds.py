"""Rounds: the ranks of a DDP model train alone for some steps, then average what these have changed.

Local SGD (McMahan et al. 2017; Stich 2019), with what keeps an optimizer on the way that it would go with mean
gradients: `rho`. docs/period.md explains it. Moments of optimizers stay each rank's own until gradients are exchanged
again: to average the first ones too doubles the bytes, and half the period costs the same loss with as many
(docs/log/2026-11-26.md, entry 92).
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from cgx_ray.codecs.codec import is_finite
from cgx_ray.engine.engine import CLOSED, Engine
from cgx_ray.engine.forward_hook import ForwardHook
from cgx_ray.engine.layers import averaged_parameters
from cgx_ray.engine.period.common_states import share_states
from cgx_ray.engine.period.local_gradients import LocalBucket, LocalGradients
from cgx_ray.engine.period.local_optimizers import LocalOptimizers
from cgx_ray.engine.period.rho import Rho, num_sums
from cgx_ray.engine.step import Content, PendingBucket
from cgx_ray.engine.weight_check import WeightCheck
from cgx_ray.errors import CGXError, ConfigError, StateError
from cgx_ray.plan import STEPS_TOGETHER
from cgx_ray.torch_compat import allows_uneven_inputs

logger = logging.getLogger(__name__)

# State of one whose gradients are exchanged, and have not told rho yet.
NO_ROUND: Mapping[str, Any] = {
    "rho": None,
    "num_replicas": 1,
    "moments_rho": None,
    "may_differ": False,
    "has_own_states": False,
    "anchor": {},
    "folds": [],
}


class Rounds:
    """Follows the period of the plan in force, between `DdpBuckets` and its engine.

    is_alone  True in a step whose gradients stay on their rank
    """

    def __init__(self, model: DistributedDataParallel, engine: Engine, weights: WeightCheck) -> None:
        """`weights`: compares those that all ranks have in common."""
        # DDP's C++ part holds this object, out of the garbage collector's sight.
        self._model = weakref.ref(model)
        self._engine = engine
        self._weights = weights
        self._layers = {layer.name: layer for layer in engine.layers}
        named = averaged_parameters(model)
        self._parameters = {name: named[name] for name in self._layers}
        self._world_size = engine.plan.world_size
        self._rho = Rho(self._world_size, list(self._layers))
        # While ranks train alone.
        self._gradients: LocalGradients | None = None
        self._optimizers: LocalOptimizers | None = None
        # Parameters after the last round, the same on all ranks; empty while gradients are exchanged.
        self._anchor: dict[str, Tensor] = {}
        # Folds of the steps that have no round yet.
        self._folds: list[Tensor] = []
        # True in a round that a checkpoint has brought.
        self._begun_before = False
        # The last one of the last round, and the same if an optimizer has stepped since then, without new gradients.
        self._last_folds: list[Tensor] = []
        self._late_folds: list[Tensor] = []
        # True if a checkpoint has all steps so far.
        self._is_saved = False
        # Of a checkpoint, see `LocalOptimizers`; None: 1.
        self._moments_rho: Mapping[str, float] | None = None
        # As in `LocalOptimizers`, in the last round.
        self._may_differ = False
        # True once optimizers have stepped alone, until their states are made the same.
        self._has_own_states = False
        self._broadcasts_buffers = False
        self._forward_hook: torch.utils.hooks.RemovableHandle | None = None
        self._is_closed = False
        self.is_alone = False
        engine.rounds = self

    def begin_step(self) -> None:
        """Set `is_alone` before a step's first gradient. All ranks come to the same."""
        if self._is_closed:
            raise CGXError(CLOSED)
        period = self._engine.plan.period
        if period == 1 or self._engine.step < STEPS_TOGETHER:
            if self._gradients is not None:
                self._return()
            elif self._optimizers is None:
                self._take_states_of_checkpoint()
            self.is_alone = False
            return
        model = self._model()
        if model is not None and allows_uneven_inputs(model):
            raise ConfigError(
                f"the plan has period {period}, and ranks inside join() may have fewer steps than others; give period "
                "1, or all ranks as many batches (drop_last)"
            )
        if self._is_other_inside and not self._folds:
            self._return()
        if self._gradients is None:
            self._enter()
        self.is_alone = self._has_own_states = True

    def take(self, bucket: LocalBucket) -> None:
        """Take a bucket of a step in which ranks train alone. It goes back at `end_step`."""
        assert self._gradients is not None
        self._gradients.take(bucket)

    def end_step(self) -> None:
        """End a step in which ranks train alone, at its last bucket."""
        assert self._gradients is not None
        assert self._optimizers is not None
        self._folds.append(self._gradients.finish(self._optimizers.rho))
        # The round under way has them.
        self._late_folds, self._is_saved = [], False
        self._optimizers.note_gradients()
        self._engine.count_step()

    def end_round(self) -> None:
        """End the round under way, if there is one: average what has changed. Call it on all ranks, between steps."""
        self._take_late_steps()
        if self._folds and self._anchor:
            self._average()

    def close(self) -> None:
        """Remove all hooks. Warns of steps after the last round that neither the other ranks nor a state have got."""
        folds = self._folds or self._late_folds
        if folds and self._anchor and not (self._is_closed or self._is_saved):
            logger.warning(
                "closed in a round, whose %s the other ranks have not got, so their parameters differ: call "
                "attachment.end_round() on all ranks before, or save attachment.state_dict() of each",
                f"{len(folds)} step" if len(folds) == 1 else f"{len(folds)} steps",
            )
        self._is_closed = True
        self._leave()
        self._engine.sums.close()

    @property
    def _is_inside(self) -> bool:
        """True if the plan in force has sums inside nodes, and nodes have several ranks."""
        return self._engine.plan.has_inside and self._engine.sums.num_nodes < self._world_size

    @property
    def _is_other_inside(self) -> bool:
        """True if the plan in force sums inside nodes and the rounds do not, or the other way round."""
        return self._gradients is not None and self._gradients.is_inside != self._is_inside

    @property
    def _is_due(self) -> bool:
        return len(self._folds) >= self._engine.plan.period

    @property
    def _usual_rho(self) -> Mapping[str, float]:
        return self._rho.by_layer if self._may_differ else self._rho.whole

    def _enter(self) -> None:
        """Begin to train alone."""
        # Without the optimizers of a checkpoint, if it has brought some.
        self._leave()
        self._gradients = LocalGradients(self._engine, self._engine.take_residuals(), is_inside=self._is_inside)
        self._rho.begin(self._gradients.num_replicas)
        # What averages add to 16-bit parameters may be less than their last bit.
        self._anchor = {name: one.detach().to(_wide(one), copy=True) for name, one in self._parameters.items()}
        self._optimizers = LocalOptimizers(self._parameters, self._on_optimizer, moments_rho=self._moments_rho)
        self._moments_rho, self._optimizers.rho = None, self._usual_rho
        self._folds = []
        model = self._model()
        if model is not None:
            # Each rank keeps its own until the round's end, else each forward pass would wait for rank 0.
            self._broadcasts_buffers, model.broadcast_buffers = model.broadcast_buffers, False
            # Dynamo, which a compiled model would have look into it, cannot.
            untraced = torch.compiler.disable(self._before_forward)
            self._forward_hook = model.register_forward_pre_hook(ForwardHook(untraced))

    def _take_states_of_checkpoint(self) -> None:
        """Have optimizers' states that a checkpoint has brought from rounds made the same, before each one's next step.

        Moments become the user's own then.
        """
        if self._has_own_states:
            self._optimizers = LocalOptimizers(
                self._parameters, self._on_optimizer, on_first=self._share_states, moments_rho=self._moments_rho
            )
            self._moments_rho = None

    def _share_states(self, optimizers: Mapping[str, Sequence[Optimizer]]) -> None:
        share_states(optimizers, self._parameters, self._engine)
        self._has_own_states = False

    def _return(self) -> None:
        """Begin to exchange gradients, with optimizers' states that are the same on all ranks. A collective call."""
        assert self._optimizers is not None
        optimizers = self._optimizers.of_layers
        self._leave()
        if optimizers and self._has_own_states:
            self._share_states(optimizers)
        else:
            # A checkpoint has brought the round, and no optimizer has stepped since then.
            self._take_states_of_checkpoint()

    def _leave(self, *, keeps_moments: bool = False) -> None:
        """Begin to exchange gradients. `keeps_moments`: the optimizers' moments are of another run by now."""
        self.is_alone = False
        if self._optimizers is not None:
            if not self._optimizers.have_any_stepped:
                self._moments_rho = self._optimizers.moments_rho
            self._optimizers.close(keeps_moments=keeps_moments)
            self._optimizers = None
        if self._forward_hook is not None:
            self._forward_hook.remove()
            self._forward_hook = None
        if self._anchor and (model := self._model()) is not None:
            model.broadcast_buffers = self._broadcasts_buffers
        self._gradients, self._anchor, self._folds = None, {}, []
        self._last_folds, self._late_folds = [], []

    def _on_optimizer(self) -> None:
        assert self._optimizers is not None
        if self._is_due and self._optimizers.have_all_stepped:
            self._average()
        elif not self._folds:
            self._late_folds, self._is_saved = self._last_folds, False

    def _before_forward(self, model: nn.Module, given: object) -> None:
        if not torch.is_grad_enabled():
            # A rank may make it alone.
            return
        is_leaving = self._engine.plan.period == 1 or self._is_other_inside
        if is_leaving:
            self._take_late_steps()
        # Where optimizers take turns, or skip a step.
        if self._folds and (is_leaving or self._is_due):
            self._average()
        if is_leaving and not self._folds:
            self._return()

    def _take_late_steps(self) -> None:
        """Begin another round if an optimizer has stepped after the last one had ended."""
        if not self._folds:
            self._folds, self._late_folds = self._late_folds, []

    def _average(self) -> None:
        """Exchange what has changed since the last round, and apply the mean change.

        Raises CGXError on all ranks if the parameters of a rank are not finite. They stay as they are then.
        """
        engine, steps = self._engine, range(self._engine.step - len(self._folds), self._engine.step)
        with torch.inference_mode(mode=False), torch.no_grad():
            changes = self._changes()
            self._check_optimizers(changes)
            is_sound = all(map(is_finite, changes.values()))
            if not is_sound:
                # What is lost here would spread.
                for change in changes.values():
                    change.zero_()
            bad_R = torch.zeros(self._world_size, dtype=torch.float64, device="cpu")
            bad_R[dist.get_rank()] = not is_sound
            numbers = [bad_R, Rho.message(torch.stack(self._folds)), *self._statistics()]
            pending = PendingBucket(
                gradients=changes,
                buffer=next(iter(changes.values())),
                future=engine.streams.future(),
                computed=engine.streams.mark(),
                weights=self._weights.hash_at(steps[-1], steps[0], self._anchor),
                content=Content.CHANGES,
                steps=steps,
                shared=torch.cat([one.to("cpu", torch.float64).flatten() for one in numbers]),
            )
            engine.submit(pending)
            pending.future.wait()
            assert pending.shared is not None
            bad_R, means, *statistics = pending.shared.split([one.numel() for one in numbers])
            if bad := torch.nonzero(bad_R).flatten().tolist():
                raise CGXError(
                    f"step {steps[-1]}: rank {bad[0]} has NaN or Inf in its parameters, or in what {len(steps)} steps "
                    "have changed in them; the parameters of no rank were averaged: start from a checkpoint, with a "
                    "smaller learning rate or a shorter period"
                )
            self._apply(changes)
            for own, mean in zip(self._statistics(), statistics, strict=True):
                own.copy_(mean.view_as(own))
        self._last_folds, self._folds, self._begun_before = self._folds[-1:], [], False
        self._rho.add(means)
        if self._optimizers is not None:
            # Optimizers step with the mean gradient again from now on, if the plan has no period any more.
            self._may_differ = self._optimizers.may_differ
            self._optimizers.rho = self._usual_rho if engine.plan.period > 1 else dict.fromkeys(self._layers, 1.0)

    def _check_optimizers(self, changes: Mapping[str, Tensor]) -> None:
        """Raise ConfigError if something other than an optimizer of torch has changed the parameters of this round."""
        assert self._optimizers is not None
        if self._optimizers.has_stepped or self._begun_before:
            return
        if any(bool(change.any()) for change in changes.values()):
            with self._engine.failing_together():
                raise ConfigError(
                    "the parameters changed in a round without a step of a torch.optim.Optimizer, whose learning rate "
                    "rounds adapt; step with one, or give period 1"
                )

    def _changes(self) -> dict[str, Tensor]:
        """Return what has changed, by layer, side by side in the order of the plan, in float32 at least."""
        names = [name for group in self._engine.plan.groups for name in group.layers]
        changes = {}
        for dtype in {_wide(self._parameters[name]) for name in names}:
            own = [name for name in names if _wide(self._parameters[name]) == dtype]
            numels = [self._layers[name].numel for name in own]
            flat_N = torch.empty(sum(numels), dtype=dtype, device=self._engine.device)
            for name, change in zip(own, flat_N.split(numels), strict=True):
                parameter = self._parameters[name]
                start = self._anchor[name].to(parameter.dtype)
                changes[name] = change.view(parameter.shape).copy_(parameter).sub_(start)
        return changes

    def _apply(self, means: Mapping[str, Tensor]) -> None:
        """Give the parameters the mean change in place of their own."""
        for name, mean in means.items():
            self._parameters[name].copy_(self._anchor[name].add_(mean))

    def _statistics(self) -> Iterator[Tensor]:
        """Return the running means and variances of norms."""
        model = self._model()
        for module in model.modules() if model is not None else ():
            if isinstance(module, _NormBase) and module.track_running_stats:
                yield from (one for one in (module.running_mean, module.running_var) if one is not None)

    def state(self) -> dict[str, Any]:
        """Return the round under way and rho, for a checkpoint. At a round's end there are no tensors in it."""
        self._is_saved = True
        moments_rho = self._optimizers.moments_rho if self._optimizers is not None else self._moments_rho
        rho = {"rho": self._rho.state(), "num_replicas": self._rho.num_replicas}
        # In the order of layers: wrappers have changed their names when it is loaded.
        in_order = [moments_rho[name] for name in self._layers] if moments_rho is not None else None
        own = {"moments_rho": in_order, "has_own_states": self._has_own_states, "may_differ": self._may_differ}
        state: dict[str, Any] = {**NO_ROUND, **rho, **own}
        has_more_bits = any(anchor.dtype != self._parameters[name].dtype for name, anchor in self._anchor.items())
        if self._folds or self._late_folds or has_more_bits:
            state["anchor"] = {name: anchor.to("cpu", copy=True) for name, anchor in self._anchor.items()}
            state["folds"] = [fold.cpu() for fold in self._folds or self._late_folds]
        return state

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint. Call it when the parameters have been loaded.

        Raises StateError if the round is one of another model. Nothing has changed then.
        """
        anchor: Mapping[str, Tensor] = state["anchor"]
        numels = {name: value.numel() for name, value in anchor.items()}
        if anchor and numels != {name: layer.numel for name, layer in self._layers.items()}:
            raise StateError("the state has a round of another model; start from a checkpoint of this one")
        moments_rho = self._by_layer(state["moments_rho"])
        numbers = [torch.tensor(state["rho"] or 0.0, dtype=torch.float64, device="cpu"), *anchor.values()]
        # Folds may have NaN: those of steps that a GradScaler has skipped.
        if not all(map(is_finite, numbers)):
            raise StateError("the state has a round with NaN or Inf; start from another checkpoint")
        self._leave(keeps_moments=True)
        self._rho.load(state["rho"], state.get("num_replicas", self._world_size))
        self._moments_rho, self._may_differ = moments_rho, state.get("may_differ", False)
        self._has_own_states = state.get("has_own_states", moments_rho is not None)
        if anchor:
            self._enter()
            assert self._gradients is not None
            # Those of the run that this state replaces.
            self._gradients.forget_residuals()
            for name, value in anchor.items():
                self._anchor[name].copy_(value.view_as(self._anchor[name]))
            # Those of earlier versions say nothing of a layer.
            shape = len(self._layers), num_sums(len(self._layers))
            folds = [
                fold if fold.shape == shape else torch.zeros(shape, dtype=torch.float32, device="cpu")
                for fold in state["folds"]
            ]
            self._folds = [fold.to(self._engine.device) for fold in folds]
            self._begun_before = True
        elif self._engine.plan.period == 1:
            self._take_states_of_checkpoint()

    def _by_layer(self, moments_rho: Sequence[float] | float | None) -> dict[str, float] | None:
        """Return what a checkpoint has, in the order of layers; in those of earlier versions one for all. None: 1."""
        if isinstance(moments_rho, float):
            moments_rho = None if moments_rho == 1 else [moments_rho] * len(self._layers)
        if moments_rho is None or len(moments_rho) != len(self._layers):
            return None
        return dict(zip(self._layers, moments_rho, strict=True))


def _wide(parameter: Tensor) -> torch.dtype:
    """Return the type in which changes of `parameter` are averaged."""
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32
