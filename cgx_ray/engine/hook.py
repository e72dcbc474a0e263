"""DDP's communication hook, and hooks on parameters. They hand gradients to the engine; nothing waits in them."""

# No `from __future__ import annotations`: DDP compares the hook's annotations with the classes themselves.

import logging
import weakref
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from cgx_ray.collectives.transport.transport_like import VendorCall
from cgx_ray.engine.engine import Engine
from cgx_ray.engine.forward_hook import ForwardHook
from cgx_ray.engine.layers import averaged_parameters
from cgx_ray.engine.loss_scale import LossScale, Scales
from cgx_ray.engine.period.local_gradients import LocalBucket
from cgx_ray.engine.period.rounds import Rounds
from cgx_ray.engine.step import EarlyGradient, PendingBucket
from cgx_ray.engine.unused import UsedLayers
from cgx_ray.engine.weight_check import NOT_HASHED, WeightCheck, WeightHash
from cgx_ray.errors import ConfigError
from cgx_ray.runtime_ext.streams import Mark, Stream
from cgx_ray.torch_compat import allows_uneven_inputs, divides_by_fewer_ranks, has_rebuilt_buckets

logger = logging.getLogger(__name__)


class DdpBuckets:
    """Names the gradients in DDP's buckets by layer and submits the buckets to an engine.

    A bucket of DDP holds 25 MB, so most of its gradients are ready long before it is. Each is submitted when DDP has
    put it into its bucket: DDP does that right after the hooks on the parameter, so the next parameter's hook does it.
    It needs the places in the buckets, so not before DDP has rebuilt them, which it does after the first step. Not with
    `static_graph`, where a parameter may get several gradients in one backward pass.

    Steps may be handed over to DDP's own all-reduce, see `Engine.begin_step`. It is called here, on the thread of
    backward, so that all its collectives start in the order in which DDP alone would start them.

    Each parameter may have a stream of its own, on which its hooks are called and DDP copies its gradient.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        engine: Engine,
        loss_scale: LossScale | None = None,
        *,
        weight_check_steps: int = 0,
        average_weights: bool = False,
        hands_over: bool = False,
    ) -> None:
        """
        loss_scale          by default finds the GradScaler that scales the losses
        weight_check_steps  steps between two comparisons of the ranks' weights, 0 for none
        average_weights     make them the same again if they differ by rounding
        hands_over          let DDP's own all-reduce average the steps of a plan that is dense as a whole
        """
        self._engine = engine
        self._streams = engine.streams
        # DDP's C++ part holds this object, out of the garbage collector's sight.
        self._model = weakref.ref(model)
        self._loss_scale = loss_scale or LossScale(averaged_parameters(model))
        self._weights = WeightCheck(averaged_parameters(model), weight_check_steps)
        engine.agreement.weight_check = self._weights
        self._rounds = Rounds(model, engine, self._weights)
        self._averaged_step = -1
        self._hands_over, self._process_group = hands_over, model.process_group
        # Of the step under way, once it is known.
        self._is_handed_over: bool | None = None
        self._used = UsedLayers(model)
        self._names = {id(parameter): name for name, parameter in model.module.named_parameters()}
        self._has_warned = False
        # From a forward pass to the last bucket: gradients that are computed now will come in a bucket.
        self._expects_bucket = False
        # From the first gradient of a step to its last bucket.
        self._has_begun = False
        # From the first gradient of a step on which the rounds were asked to its last bucket.
        self._is_open = False
        # True if DDP will not change its buckets any more.
        self._keeps_buckets = False
        # By layer, its place in the buckets of the last step.
        self._places: dict[str, Tensor] = {}
        self._newest: _Newest | None = None
        # Streams on which DDP has copied gradients since the last bucket.
        self._used_streams: set[Stream] = set()
        hooked = [] if model.static_graph else [p for p in model.module.parameters() if p.requires_grad]
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._submit_early) for parameter in hooked]
        self._hooks.append(model.register_forward_hook(ForwardHook(self._expect)))
        if average_weights:
            # Dynamo, which a compiled model would have look into it, cannot.
            untraced = torch.compiler.disable(self._average_weights)
            self._hooks.append(model.register_forward_pre_hook(ForwardHook(untraced)))

    def submit(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        self._refuse_capture()
        names = [self._names[id(parameter)] for parameter in bucket.parameters()]
        buffer = bucket.buffer()
        future = self._streams.future()
        self._begin_step()
        is_handed_over = not self._rounds.is_alone and self._ask_engine()
        if bucket.is_last():
            self._is_handed_over = None
        self._is_open = not bucket.is_last()
        self._expects_bucket = self._has_begun = not bucket.is_last()
        self._newest = None
        unused = self._used.take_unused(bucket, names)
        # A parameter without elements is no layer, see `layers_of`.
        gradients = {name: one for name, one in zip(names, bucket.gradients(), strict=True) if one.numel() > 0}
        scales = self._loss_scale.now() if gradients else ()
        if self._allows_uneven_inputs():
            self._engine.may_train_alone = False
        if self._rounds.is_alone:
            # On the stream that runs backward, after those that have made the gradients.
            self._end_of_bucket()
            if not bucket.is_last() and (stream := self._streams.current()) is not None:
                # Of the last bucket, on which all are corrected.
                self._used_streams.add(stream)
            self._rounds.take(LocalBucket(buffer, gradients, future, scales, unused or frozenset()))
            if bucket.is_last():
                self._rounds.end_step()
            return future
        if not gradients:
            future.set_result(buffer)
            return future
        # A rank without inputs gets buckets of zeros inside `join`, which lie elsewhere.
        if self._keeps_buckets and not self._allows_uneven_inputs():
            self._places.update(gradients)
        pending = PendingBucket(
            gradients=gradients,
            buffer=buffer,
            future=future,
            scales=scales,
            unused=unused,
            # After `now`, so that it also covers the device's copies of the scales.
            computed=self._end_of_bucket(),
            weights=self._weights_hash(),
        )
        if is_handed_over:
            pending.summed = self._begin_sum(buffer)
        self._engine.submit(pending)
        return future.then(_value)

    def _begin_step(self) -> None:
        if not self._is_open:
            self._is_open = True
            self._rounds.begin_step()

    def _ask_engine(self) -> bool:
        """Return whether DDP's own all-reduce averages this step. All ranks get the same answer."""
        if self._hands_over and self._is_handed_over is None:
            self._is_handed_over = self._engine.begin_step()
        return bool(self._is_handed_over)

    def _begin_sum(self, buffer: Tensor) -> VendorCall:
        """Begin to average a bucket as DDP does, which divides first."""
        buffer.div_(dist.get_world_size(self._process_group))
        work = dist.all_reduce(buffer, group=self._process_group, async_op=True)
        assert work is not None
        return self._engine.watched(work)

    def close(self) -> None:
        """Remove the hooks from the parameters. DDP keeps its communication hook as long as it lives."""
        for hook in self._hooks:
            hook.remove()
        self._used.close()
        self._rounds.close()

    def _average_weights(self, model: DistributedDataParallel, given: object) -> None:
        """Average the weights in the first forward pass after a comparison that has found rounding."""
        step = self._engine.step
        # The weights of a step are compared in the one after it.
        is_due = torch.is_grad_enabled() and step != self._averaged_step and not allows_uneven_inputs(model)
        if is_due and not self._rounds.is_alone and self._engine.agreement.drift_at(step - 2):
            self._averaged_step = step
            self._weights.average(model.process_group)

    def _expect(self, model: DistributedDataParallel, given: object, output: object) -> None:
        # A later pass without synchronisation does not change what DDP does with the gradients of this one.
        self._expects_bucket |= model.require_forward_param_sync
        self._keeps_buckets = model.find_unused_parameters or has_rebuilt_buckets(model)
        if divides_by_fewer_ranks(model) and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "join(divide_by_initial_world_size=False) is ignored: gradients are divided by all %d ranks, also if "
                "some have no inputs left",
                dist.get_world_size(),
            )

    def _submit_early(self, parameter: Tensor) -> None:
        if not self._expects_bucket:
            return
        self._refuse_capture()
        stream = self._streams.current()
        if stream is not None:
            self._used_streams.add(stream)
        self._begin_step()
        if self._rounds.is_alone or self._ask_engine():
            # These go by bucket.
            return
        newest, self._newest = self._newest, None
        if newest is not None:
            self._has_begun = True
            early = EarlyGradient(
                name=newest.name,
                gradient=self._places[newest.name],
                scales=newest.scales,
                computed=self._streams.mark(newest.stream),
                weights=self._weights_hash(),
            )
            self._engine.submit(early)
        name = self._names.get(id(parameter))
        if name is not None and name in self._places:
            # Only a step's first gradients say its loss scale: on a CUDA device, that is a copy.
            scales = () if self._has_begun else self._loss_scale.now()
            self._newest = _Newest(name, stream, scales)

    def _end_of_bucket(self) -> Mark:
        """Return the mark after which all gradients of a bucket are in it."""
        self._streams.join(self._used_streams)
        self._used_streams.clear()
        return self._streams.mark()

    def _refuse_capture(self) -> None:
        if self._streams.is_capturing():
            raise ConfigError(
                "a CUDA graph cannot contain the exchange of gradients, in which the host takes part; capture less "
                "than the backward pass of DistributedDataParallel, by torch.cuda.make_graphed_callables on modules "
                "inside it"
            )

    def _weights_hash(self) -> WeightHash:
        """Return the hash of the weights if they are compared now. No optimizer has changed them in this step yet."""
        # A rank without inputs keeps its weights until `join` ends, and gets those of the others then.
        return NOT_HASHED if self._allows_uneven_inputs() else self._weights.hash_at(self._engine.step)

    def _allows_uneven_inputs(self) -> bool:
        model = self._model()
        return model is not None and allows_uneven_inputs(model)


class _Newest(NamedTuple):
    """The layer whose hook was called last, its stream, and the loss scales if they are the first of a step."""

    name: str
    stream: Stream | None
    scales: Scales


def _value(done: torch.futures.Future[Tensor]) -> Tensor:
    """Return the bucket, or raise its error.

    DDP's C++ code understands an error that is raised here, but takes the one of `set_exception` for a tensor.
    """
    return done.value()


def cgx_hook(state: DdpBuckets, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Submit `bucket` to the engine's thread. The returned future gets the bucket averaged over ranks."""
    return state.submit(bucket)
