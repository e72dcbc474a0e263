"""Ray Train's side: the config for a TorchTrainer, its backend, and `add_state` for checkpoints."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import ray
import ray.train
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cgx_ray.control.controller import ACTOR_OPTIONS, Controller
from cgx_ray.control.history import History, Snapshot
from cgx_ray.control.live_state import NAMESPACE, new_actor_name
from cgx_ray.control.policies.named_policies import OWN
from cgx_ray.errors import ConfigError, StateError, names_arguments
from cgx_ray.plan import known_codecs
from cgx_ray.ray_train.agent_watch import MAX_RESTARTS, AgentWatch, node_addresses, start_agents
from cgx_ray.ray_train.compat import RunFacts, TorchBackend, TorchConfig, run_facts
from cgx_ray.ray_train.worker import close_ray_session, open_ray_session
from cgx_ray.session.attachment import process
from cgx_ray.session.own_folder import OwnFolder
from cgx_ray.session.settings import POLICY_ARGUMENTS, Off, Settings, make_policy
from cgx_ray.session.state_files import write_state

logger = logging.getLogger(__name__)

# Longest wait for workers to learn that the controller ends; a dead worker never answers.
CLOSE_TIMEOUT_S = 5.0
# Longest wait for the controller's history, in seconds. It takes milliseconds. A controller that stands still must not
# hold up the end of the training, and its last snapshot is a minute old at most.
HISTORY_TIMEOUT_S = 4.0


@names_arguments
@dataclass
class CGXConfig(Settings, TorchConfig):
    """TorchConfig whose workers compress their gradients, once the training function calls `cgx_ray.attach`.

    Its fields are those of TorchConfig and of `Settings`. Raises ConfigError on a value that is not allowed.
    """

    elsewhere: ClassVar[Mapping[str, str]] = {
        "folder": "the journal is in the run's folder, that of RunConfig(storage_path=, name=)"
    }
    # Settings and TorchConfig both have timeout_s. Keep TorchConfig's default.
    timeout_s: int = TorchConfig.timeout_s

    def __post_init__(self, *arguments: Any) -> None:
        # The first argument without a name, of TorchConfig.
        for what, names in (("codec", known_codecs()), ("policy", OWN)):
            if isinstance(self.backend, str) and self.backend.partition(":")[0] in names:
                raise ConfigError(f"backend {self.backend!r} is a {what}; give it by name, as {what}={self.backend!r}")
        super().__post_init__(*arguments)

    @property
    def backend_cls(self) -> type[CGXBackend]:
        return CGXBackend

    def settings(self) -> Settings:
        """Return the settings alone, checked again: a config may have changed since it was made."""
        names = [*(field.name for field in fields(Settings)), *POLICY_ARGUMENTS]
        return Settings(**{name: getattr(self, name) for name in names})


class CGXBackend(TorchBackend):
    """Starts one controller per worker group and one agent per node. Lives in Ray's train controller.

    A backend does not learn that the run is over, and Ray's train controller may live as long as the driver. So our
    controller ends with its workers and hands its history to the next one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._controller: Any = None
        self._history: History | None = None
        self._folder: OwnFolder | None = None
        self._watch: AgentWatch | None = None

    def on_start(self, worker_group: Any, backend_config: CGXConfig) -> None:
        """Set up torch.distributed as Ray does, then start controller and agents and give them to every worker.

        With CGX_POLICY=off there are none.
        """
        super().on_start(worker_group, backend_config)
        facts = run_facts(worker_group)
        settings = backend_config.settings()
        if isinstance(settings.policy, Off):
            worker_group.execute(open_ray_session, settings, None, {}, facts.folder)
            return
        self._folder = OwnFolder()
        self._controller = _start_controller(settings, facts, self._snapshot, self._history)
        self._watch = start_agents(facts, self._controller, probes=settings.simulated_link is None)
        worker_group.execute(open_ray_session, settings, self._controller, self._watch.agents, facts.folder)

    def on_shutdown(self, worker_group: Any, backend_config: CGXConfig) -> None:
        """End controller and agents: the next worker group may live on other nodes."""
        if self._controller is None:
            # There is none, or on_start failed before it started it. Another error here would hide its error.
            super().on_shutdown(worker_group, backend_config)
            return
        try:
            self._end_control(worker_group)
        finally:
            super().on_shutdown(worker_group, backend_config)

    def _end_control(self, worker_group: Any) -> None:
        """Keep the controller's history, then kill controller and agents, whatever fails before."""
        agents = self._watch.agents if self._watch is not None else {}
        actors = (self._controller, *agents.values())
        try:
            if self._watch is not None:
                self._watch.end()
            with _warning("the workers may not know that the controller ends"):
                # Wait without reading the results: a worker that has died cannot answer.
                calls = worker_group.execute_async(close_ray_session)
                ray.wait(calls, num_returns=len(calls), timeout=CLOSE_TIMEOUT_S)
            with _warning("the controller's snapshot could not be read"):
                if self._folder is not None:
                    self._history = self._snapshot.read() or self._history
            with _warning("the controller did not hand over its history: the next one starts with its last snapshot"):
                self._history = ray.get(self._controller.end.remote(), timeout=HISTORY_TIMEOUT_S)
        finally:
            self._controller, self._watch = None, None
            for actor in actors:
                with _warning("an actor of cgx_ray may not have ended"):
                    ray.kill(actor)
            if self._folder is not None:
                self._folder.remove()

    @property
    def _snapshot(self) -> Snapshot:
        """The file of the controller's history."""
        assert self._folder is not None
        return Snapshot(self._folder.path / "controller")


@contextmanager
def _warning(event: str) -> Iterator[None]:
    """Continue after the block if it raises, and log `event` with the error."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - the end of a worker group must not fail because of cgx_ray
        logger.warning("at the end of the worker group %s (%r)", event, error)


def _start_controller(settings: Settings, facts: RunFacts, snapshot: Snapshot, history: History | None) -> Any:
    # Not detached, so Ray's train controller owns it: if that dies, our controller ends too. The snapshot is on this
    # node; with `soft=True` Ray has chosen other nodes.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    addresses = node_addresses()
    # `cgx-ray top` finds the run by the name.
    return (
        ray.remote(**ACTOR_OPTIONS)(Controller)
        .options(
            name=new_actor_name(facts.name),
            namespace=NAMESPACE,
            scheduling_strategy=here,
            max_restarts=MAX_RESTARTS,
        )
        .remote(
            make_policy(settings),
            str(facts.folder / "decisions.jsonl"),
            facts.name,
            facts.run_id,
            str(snapshot.path),
            history,
            [addresses[node_id] for node_id in facts.node_ids],
        )
    )


def _new_folder() -> str:
    """Make a folder for a checkpoint, and remove all but the two newest earlier ones."""
    process.state_folder = process.state_folder or OwnFolder()
    parent = process.state_folder.path
    # A new folder each time: an asynchronous upload may still read the last one, or may have removed it.
    made = [path for path in parent.iterdir() if path.is_dir()]
    for old in sorted(made, key=lambda path: path.stat().st_mtime)[:-2]:
        shutil.rmtree(old, ignore_errors=True)
    return tempfile.mkdtemp(dir=parent)


def add_state(checkpoint: ray.train.Checkpoint | None = None) -> ray.train.Checkpoint | None:
    """Add this rank's residuals to the checkpoint that it reports next; call it on every rank.

    checkpoint  a local one, which gets one more file. None on ranks that make none: the result then holds only the
                residuals, and Ray Train merges the files of all ranks

    Returns `checkpoint` as it is if no model is attached, or at world size 1 without residuals of a larger worker group
    before. Files of another world size, of a checkpoint whose folder is used again, are removed. Warns if only some
    ranks call it: a restart then begins with the mean of their residuals. Raises StateError if `checkpoint` is not
    local, ConfigError if it is no checkpoint.
    """
    if not isinstance(checkpoint, ray.train.Checkpoint | None):
        raise ConfigError(
            f"add_state got {checkpoint!r}; give a ray.train.Checkpoint, such as Checkpoint.from_directory(folder), or "
            "None"
        )
    attachment = process.attachment
    if attachment is None or not attachment.has_state:
        return checkpoint
    if checkpoint is None:
        checkpoint = ray.train.Checkpoint.from_directory(_new_folder())
    folder = Path(checkpoint.path)
    if not folder.is_dir():
        raise StateError(f"checkpoint {checkpoint.path} is not a local folder; call add_state before you upload it")
    write_state(attachment.state_dict(), folder)
    attachment.note_added()
    return checkpoint


__all__: Sequence[str] = ["CGXBackend", "CGXConfig", "add_state"]
