"""Decisions without Ray: a process beside rank 0 runs the control loop, and the monitors of all nodes report to it.

```
rank -> first rank of its node -> rank 0 -> process of the control loop    steps, loads, latencies: twice a second
rank <- first rank of its node <- rank 0 <- process of the control loop    plans, at once
```

The first rank of each node runs the node's monitor. Ranks connect when they attach, at addresses and with tokens that
travel through torch.distributed (`monitors.messages`). Threads carry everything, so training never waits. If a
connection or the loop's process ends, ranks keep their plan, or return from a trial, and training goes on.

The run's folder has the journal and, for workers that torchrun starts again, the loop's history. Imports no Ray.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import logging
import os
import pickle
import shutil
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist
from torch import nn

from cgx_ray.codecs.codec import HOST
from cgx_ray.collectives.transport.gathered import Gather
from cgx_ray.collectives.transport.tcp import node_address
from cgx_ray.control.history import History, Snapshot
from cgx_ray.control.loop import ControlLoop
from cgx_ray.control.loop_process import LoopProcess, LoopStart, News
from cgx_ray.errors import CGXError, ConfigError, PlanError
from cgx_ray.monitors.controller_metrics import ControllerMetrics
from cgx_ray.monitors.export import Sink
from cgx_ray.monitors.guarded_server import MAX_CONNECTIONS, MAX_PER_PEER, Address
from cgx_ray.monitors.messages import MessageClient, MessageServer, Reply
from cgx_ray.monitors.node_metrics import NodeMetrics
from cgx_ray.monitors.node_monitor import NodeMonitor
from cgx_ray.monitors.sample import Fault, NodeSample, StepSample, node_steps
from cgx_ray.plan import Layer, Plan, is_known_everywhere
from cgx_ray.planner.candidates import CodecCosts
from cgx_ray.session.calibrate import calibrate
from cgx_ray.session.settings import Settings, make_policy

if TYPE_CHECKING:
    from cgx_ray.session.attachment import Attachment

logger = logging.getLogger(__name__)

# Folder of the loop's history, in the run's.
_HISTORY = "controller"
REPORT_S = 0.5
# Longest waits for the loop, in seconds: for its first plan, to write an error down before it is raised, at the end.
REGISTER_S, FAULT_S, END_S = 60.0, 5.0, 5.0
# Longest wait at the end for the last steps of other ranks, seconds.
LAST_STEPS_S = 1.0
# Reports without an answer from the loop, beyond which further ones are dropped: steps count without them.
MAX_WAITING_REPORTS = 2048
# Nodes that rank 0's server has room for, beside the ranks of its own node.
MAX_NODES = MAX_CONNECTIONS - MAX_PER_PEER


class _Place(NamedTuple):
    """Node of a rank, and the address at which others reach it."""

    node_id: str
    address: str


class _Contact(NamedTuple):
    """Servers of a node: for messages, for round trips, for probes of bandwidth."""

    messages: Address
    echo: Address
    bulk: Address


class _Monitor(NodeMonitor):
    """The monitor of a node, in the process of its first rank."""

    def __init__(self, place: _Place, send: Callable[[NodeSample], None], interval_s: float) -> None:
        """`send` gets all that was measured, at least every `interval_s`."""
        super().__init__(place.node_id, place.address, interval_s=interval_s)
        self._send = send

    def _deliver(self, steps: tuple[StepSample, ...], rest: NodeSample) -> None:
        self._send(replace(rest, steps=node_steps(steps)))

    def stop(self) -> None:
        super().stop()
        # With the last step, which is reported once the engine's thread has ended.
        self._publish()


class LocalControl:
    """The `Session` of an attachment whose plans are decided without Ray. All ranks make one, and `start` it."""

    def __init__(
        self,
        settings: Settings,
        folder: str | os.PathLike[str] | None,
        model: nn.Module,
        gather: Gather,
        *,
        loop_type: type[ControlLoop] = ControlLoop,
        report_s: float = REPORT_S,
    ) -> None:
        """A collective call.

        folder     of the run; None: `cgx-ray-runs/<time>` in the working folder of rank 0
        loop_type  as in `LoopStart`
        report_s   shortest time between two reports of a rank, and of a node, in seconds

        `journal` is the path of rank 0's, `journal_problem` why that cannot be written, "" if it can.

        Raises ConfigError on all ranks if there are too many nodes, or too many ranks on one, or if the loop's process
        would not know a codec.
        """
        for codec in settings.timed_codecs():
            if not is_known_everywhere(codec.name):
                raise ConfigError(
                    f"codec {codec.name!r} was registered in this process only, and another one writes the journal; "
                    "bring the codec by an entry point 'cgx_ray.codecs' of a package, or leave folder and policy out"
                )
        self.settings = settings
        self._loop_type, self._report_s = loop_type, report_s
        self._device = next((parameter.device for parameter in model.parameters()), HOST)
        self._rank = dist.get_rank()
        self._folder = Path(
            folder or Path("cgx-ray-runs", f"{time.strftime('%Y-%m-%d_%H-%M-%S')}-{os.getpid()}")
        ).absolute()
        self.journal = self._folder / "decisions.jsonl"
        self.journal_problem = ""
        self._places: list[_Place] = gather(_Place(f"{socket.gethostname()} {node_address()}", node_address()))
        self._node_ids = [place.node_id for place in self._places]
        # The first rank of this one's node.
        self._leader = self._node_ids.index(self._node_ids[self._rank])
        num_ranks = Counter(self._node_ids)
        if len(num_ranks) > MAX_NODES or max(num_ranks.values()) > MAX_PER_PEER:
            raise ConfigError(
                f"{len(num_ranks)} nodes with up to {max(num_ranks.values())} ranks are too many for decisions without "
                f"Ray; take at most {MAX_NODES} with {MAX_PER_PEER} each, use Ray Train, or give attach a codec"
            )
        self._attachment: Attachment | None = None
        # Version of the newest plan that this rank was given.
        self._version = -1
        self._loop: LoopProcess | None = None
        self._server: MessageServer | None = None
        self._client: MessageClient | None = None
        self._monitor: _Monitor | None = None
        self._metrics: tuple[NodeMetrics, ControllerMetrics] | None = None
        # Samples that were not taken, or the end.
        self._has_news = threading.Event()
        self._ending = threading.Event()
        self._carrier = threading.Thread(target=self._carry, name="cgx-ray-carrier", daemon=True)

    def first_plan(self, layers: Sequence[Layer], world_size: int, bucket_bytes: int, costs: CodecCosts | None) -> Plan:
        """Start the loop's process; return the plan to start with. Called on rank 0 only."""
        fresh = self.settings.first_plan(layers, world_size, bucket_bytes)
        registration = calibrate(self.settings, layers, fresh, self._device, costs)
        self.journal_problem = _problem_of(self.journal)
        # It has times of the monotonic clock, which begins at 0 with each start of a machine.
        snapshot = self._folder / _HISTORY / Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        start = LoopStart(
            policy=make_policy(self.settings),
            journal_path=self.journal,
            snapshot_path=snapshot,
            run_name=self._folder.name,
            history=_earlier_history(snapshot),
            nodes=[place.address for place in self._places],
            warns=not self.journal_problem,
            loop_type=self._loop_type,
        )
        after = "training goes on with its plan, and no other one is decided"
        self._loop = LoopProcess(start, self._take_news, lambda: None, after)
        call = self._loop.ask("register", registration, time.monotonic(), time.time())
        try:
            plan: Plan = call.result(REGISTER_S)
        except TimeoutError:
            raise CGXError(
                f"the control loop had no plan after {REGISTER_S:g} s: its process has ended or stands still; see the "
                "log, or give attach a codec instead of a policy"
            ) from None
        return plan

    def start(self, attachment: Attachment, gather: Gather) -> None:
        """Connect all ranks, then carry plans in and samples out until `close`. A collective call."""
        assert attachment.plan is not None
        self._attachment, self._version = attachment, attachment.plan.version
        contact = None
        if self._rank == self._leader:
            place = self._places[self._rank]
            self._server = MessageServer(place.address, self._take)
            self._monitor = _Monitor(place, self._send_report, self._report_s)
            contact = _Contact(self._server.address, self._monitor.address(), self._monitor.bulk_address())
        contacts: list[_Contact | None] = gather(contact)
        if self._rank != 0:
            reached = contacts[self._leader if self._monitor is None else 0]
            assert reached is not None
            self._client = MessageClient(reached.messages, self._obey, self._lose)
        # No report is sent before all ranks can get the plans that follow from it.
        gather(None)
        if self._monitor is not None:
            known = {node_id: one for node_id, one in zip(self._node_ids, contacts, strict=True) if one is not None}
            is_probed = self.settings.simulated_link is None
            bulk = {node_id: one.bulk for node_id, one in known.items() if is_probed}
            self._monitor.start_measuring({node_id: one.echo for node_id, one in known.items()}, bulk)
        attachment.call_on_sample(self._has_news.set)
        self._carrier.start()
        attachment.call_on_fault(self._report_fault)
        atexit.register(self.close)

    def export_to(self, sink: Sink, run_name: str) -> None:
        """Set the metrics of this rank from now on; on rank 0 those of the run too, and those of nodes where known."""
        self._metrics = NodeMetrics(sink, run_name), ControllerMetrics(sink, run_name, journal=str(self.journal))

    def ask(self, method: str) -> Any:
        """Return the result of a method of the loop. For rank 0 only."""
        assert self._loop is not None
        return self._loop.ask(method).result()

    def close(self) -> None:
        """Report the last step, end the loop and the connections. May be called again."""
        if self._ending.is_set():
            return
        self._ending.set()
        self._has_news.set()
        atexit.unregister(self.close)
        if self._server is not None:
            # Ranks end at about the same time, and their last steps count too.
            self._server.wait_for_clients_to_leave(LAST_STEPS_S)
        if self._carrier.ident is not None:
            self._carrier.join()
        if self._monitor is not None:
            self._monitor.stop()
        if self._loop is not None:
            self._wait_for(self._loop.ask("end", time.time()), END_S)
            self._loop.close()
            if not _may_restart():
                shutil.rmtree(self._folder / _HISTORY, ignore_errors=True)
        if self._server is not None:
            self._server.end(("end", None))
        if self._client is not None:
            self._client.close()

    # Towards the loop.

    def _take_samples(self) -> list[StepSample]:
        assert self._attachment is not None
        samples = self._attachment.take_samples()
        if self._metrics is not None:
            self._metrics[0].export_steps(samples)
        return samples

    def _carry(self) -> None:
        """Report this rank's samples to the monitor, which the first rank of its node has."""
        while not self._ending.is_set():
            self._has_news.wait()
            self._has_news.clear()
            self._report(self._take_samples())
            self._ending.wait(self._report_s)
        self._report(self._take_samples())

    def _report(self, samples: list[StepSample]) -> None:
        if self._monitor is not None:
            self._monitor.report(samples)
        elif samples:
            self._send(("steps", samples))

    def _send_report(self, sample: NodeSample) -> None:
        if self._metrics is not None:
            self._metrics[0].export((), sample.latency_s, sample.host)
        # Pickled here, since the process that it is for is behind rank 0's.
        self._send(("report", (sample.node_id, pickle.dumps(sample, pickle.HIGHEST_PROTOCOL))))

    def _report_fault(self, fault: Fault) -> None:
        """Have an error written down before it is raised: it may end the training."""
        self._send(("fault", fault))

    def _send(self, message: tuple[str, Any]) -> None:
        """Send a message of this rank to the next one on the way to the loop."""
        if self._client is not None:
            self._client.send(message)
        elif self._loop is not None:
            self._take(message, self._obey)

    def _take(self, message: tuple[str, Any], reply: Reply) -> None:
        """Take a message of another rank, or on rank 0 of its own; `reply` sends to the rank that it is from."""
        kind, content = message
        if kind == "steps":
            assert self._monitor is not None
            self._monitor.report(content)
        elif self._loop is None:
            self._send(message)
        elif kind == "fault":
            self._wait_for(self._loop.ask("add_fault", content, time.time()), FAULT_S)
        elif self._loop.is_alive and self._loop.num_waiting < MAX_WAITING_REPORTS:
            call = self._loop.ask("add_report", *content, time.monotonic())
            call.add_done_callback(partial(_order_probe, reply))

    def _wait_for(self, call: Future[Any], timeout_s: float) -> None:
        """Wait for the loop to have done something. If its process has ended, it has said so."""
        assert self._loop is not None
        if self._loop.is_alive:
            concurrent.futures.wait([call], timeout_s)

    # From the loop.

    def _take_news(self, news: News) -> None:
        """Hand on new plans, and set the metrics of the run."""
        # Until ranks are connected there is no other plan than the first.
        if news.plans is not None and self._attachment is not None:
            self._obey(("plans", [plan for plan in news.plans if plan.version > self._version]))
        if news.facts is not None and self._metrics is not None:
            self._metrics[1].export(*news.facts)

    def _obey(self, message: tuple[str, Any]) -> None:
        """Take a message of the loop, and hand plans on to the ranks that are connected to this one."""
        kind, content = message
        if kind == "probe":
            assert self._monitor is not None
            self._monitor.orders.append(content)
        elif kind == "end":
            assert self._client is not None
            self._client.close()
        elif content:
            self._hold(content)
            if self._server is not None:
                self._server.send(message)

    def _hold(self, plans: Sequence[Plan]) -> None:
        assert self._attachment is not None
        if self._attachment.is_closed:
            return
        try:
            for plan in plans:
                self._version = plan.version
                self._attachment.take(plan)
        except PlanError as error:
            logger.error("a plan of the control loop was rejected; the plan in force stays: %s", error)

    def _lose(self) -> None:
        assert self._attachment is not None
        assert self._attachment.plan is not None
        plan = self._attachment.plan
        logger.warning(
            "rank %d has lost the control loop of rank 0: training goes on with plan %d, %s, and no other one is "
            "decided",
            self._rank,
            plan.version,
            plan.describe(),
        )


def _order_probe(reply: Reply, call: Future[str | None]) -> None:
    """Order a probe if the loop has asked for one. The loop has logged an error of its own."""
    if call.exception() is None and (target := call.result()) is not None:
        reply(("probe", target))


def _problem_of(journal: Path) -> str:
    """Return why `journal` cannot be written; "" if it can."""
    try:
        journal.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return str(error)
    try:
        # An empty journal would be taken for that of an earlier run.
        with journal.open("ab") if journal.exists() else TemporaryFile(dir=journal.parent):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def _may_restart() -> bool:
    """Return whether the ranks may be started again, and need the history: torchrun says so, others may not."""
    most = os.environ.get("TORCHELASTIC_MAX_RESTARTS")
    return most is None or _num_restarts() < int(most)


def _num_restarts() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _earlier_history(snapshot: Path) -> History | None:
    """Return the history of the ranks that torchrun has started again, and remove it. None for a first start."""
    found = None
    if _num_restarts() > 0:
        found = Snapshot(snapshot).read()
    # The loop would take it for that of a crash of its own process. Where nothing can be written, there is none.
    with suppress(OSError):
        snapshot.unlink(missing_ok=True)
    return found
