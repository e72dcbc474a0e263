"""`cgx-ray top`: the live view of a running training, from its controller or from its folder."""

from __future__ import annotations

import io
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click
import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError
from rich.console import Console

from cgx_ray.commands.cluster import NoClusterError, address_option, cluster_address, connect, is_up
from cgx_ray.commands.options import FILE, RunFolder, console_for
from cgx_ray.control.live_state import NAMESPACE, run_of_actor
from cgx_ray.errors import ConfigError
from cgx_ray.report.live_screen import draw_view, make_screen
from cgx_ray.report.live_view import LiveView, broken_note, view_of_controller, view_of_record
from cgx_ray.report.record import RunRecord
from cgx_ray.report.show import print_line, whole_file

# Agents report every second.
POLL_S = 1.0
# Seconds for which a controller may be missing before the run counts as ended: Ray Train restarts failed workers.
RESTART_S = 15.0
# Longest wait for the controller's answer. It takes milliseconds unless the machine is overloaded.
ANSWER_S = 10.0
# Columns of the picture.
_PICTURE_COLUMNS = 80


@click.command()
@click.argument("run", required=False, type=RunFolder(readable=False))
@address_option
@click.option("--once", is_flag=True, help="Show the training once and end.")
@click.option("--svg", type=FILE, metavar="FILE", help="Write the last view as a picture.")
def top(run: str | None, address: str, once: bool, svg: Path | None) -> None:
    """Watch a running training: ranks, links, plan and decisions, until it ends.

    RUN is the name of a run on the cluster, which may be left out if there is only one, or the folder <storage
    path>/<run name>, which needs no cluster. Waits for a run or folder that is not there yet, and for Ray to start.
    """
    console = console_for(None)
    folder = _folder_of(run, address, waits=not once) if run is not None else None
    record = RunRecord(folder.resolve()) if folder is not None else None
    views = _views_of_record(record) if record is not None else _views_of_cluster(address, run, waits=not once)
    last: LiveView | None = None
    # Newest step that was seen: once the workers have gone, a view has none.
    step: int | None = None
    with make_screen(console) as screen:
        for view in views:
            last = view if view is not None else last
            step = last.step if last is not None and last.step is not None else step
            has_begun = last is not None and (last.step is not None or not last.is_running)
            is_over = once and record is not None
            status = "" if has_begun or is_over else f"waiting for {_awaited(run, folder, address)}; Ctrl-C ends"
            screen.update([last] if last is not None else [], status)
            if once and last is not None:
                break
            if once and record is not None:
                skipped = "".join(f"; {note}" for note in broken_note(record.broken))
                raise ConfigError(
                    f"there is no run in {run} yet, as it has no decisions.jsonl with a plan; give <storage path>/<run "
                    f"name>{skipped}"
                )
            time.sleep(POLL_S)
    if last is not None and not once:
        print_line(console, f"{last.name} has ended{f' after step {step}' if step is not None else ''}")
    elif record is None and not once:
        print_line(console, f"the Ray cluster at {address!r} has ended before {run or 'a run'} began")
    if svg is not None and last is not None:
        picture = Console(record=True, width=_PICTURE_COLUMNS, file=io.StringIO())
        picture.print(draw_view(last))
        drawn = picture.export_svg(title="cgx-ray top")
        # Rich names fonts on the web; the picture loads nothing.
        with whole_file(svg) as new:
            new.write_text(re.sub(r"@font-face \{[^}]*\}\s*", "", drawn))
    if ray.is_initialized() and not is_up():
        # As the script that had started Ray has ended. Ray's own end would wait for it.
        sys.stdout.flush()
        os._exit(0 if last is not None else 1)


def _awaited(run: str | None, folder: Path | None, address: str) -> str:
    """Return in words what has to begin before there is something to show."""
    begins = f"{run or 'a run'} to begin"
    if folder is not None:
        return begins if folder.is_dir() else f"{begins}, a folder that does not exist yet"
    if not ray.is_initialized():
        return f"a Ray cluster at {address!r}{f', as there is no folder {run}' if run else ''}"
    return f"{begins} on the Ray cluster at {cluster_address()}; --address gives another"


def _folder_of(run: str, address: str, *, waits: bool) -> Path | None:
    """Return the folder that `run` is; None for the name of a run.

    waits  for a folder that does not exist yet; else that is a ConfigError
    """
    try:
        folder = Path(run).expanduser()
    except RuntimeError as error:  # of ~somebody
        raise ConfigError(f"{run}: {error}") from error
    if folder.is_dir():
        return folder
    if not (os.sep in run or run.startswith((".", "~"))) or _is_running(run, address):
        return None
    if waits:
        return folder
    missing = next(path for path in (*reversed(folder.parents), folder) if not path.is_dir())
    why = f", as there is no {missing}" if missing != folder else ""
    raise ConfigError(
        f"no such folder: {folder}{why}; give <storage path>/<run name>, or the name of a run on the cluster"
    )


def _is_running(name: str, address: str) -> bool:
    """Return whether the cluster at `address` has a run of this name: it may have slashes too, but starts with none."""
    if name.startswith((os.sep, ".", "~")):
        return False
    try:
        connect(address)
    except ConfigError:
        return False
    return name in _running()


def _views_of_record(record: RunRecord) -> Iterator[LiveView | None]:
    """Yield views of a run's files until the run ends; None before the first line."""
    ended_s: float | None = None
    while True:
        record.poll()
        view = view_of_record(record)
        yield view if view.plan is not None else None
        if record.end is not None:
            return
        # Workers that were restarted begin a new part of the journal.
        ended_s = (ended_s or time.monotonic()) if record.is_ended else None
        if ended_s is not None and time.monotonic() - ended_s > RESTART_S:
            return


def _views_of_cluster(address: str, name: str | None, *, waits: bool) -> Iterator[LiveView | None]:
    """Yield views as `_views_of_run` does, of the cluster at `address`; None while there is none and it `waits`."""
    while True:
        try:
            connect(address)
            break
        except NoClusterError as error:
            if not waits:
                if name is None:
                    raise
                raise NoClusterError(f"there is no folder {name}, and {error}") from error
            yield None
    yield from _views_of_run(name, waits=waits)


def _views_of_run(name: str | None, *, waits: bool) -> Iterator[LiveView | None]:
    """Yield what the run's controllers answer until the run ends; None before its workers have registered.

    waits  for a run that is not on the cluster yet; else that is a ConfigError
    """
    actor_name: str | None
    while waits and (name not in _running() if name is not None else not _running()):
        if not is_up():
            return
        yield None
    name, actor_name = _find(name)
    missing_s: float | None = None
    while True:
        try:
            # A controller that has just ended may still be listed.
            actor_name = actor_name if is_up() else None
            actor = ray.get_actor(actor_name, namespace=NAMESPACE) if actor_name is not None else None
            found = ray.get(actor.look.remote(), timeout=ANSWER_S) if actor is not None else None
        except (ActorUnavailableError, GetTimeoutError):
            found = None
        except (RayActorError, ValueError):
            actor_name, found = None, None
        yield view_of_controller(found) if found is not None else None
        if actor_name is None:
            missing_s = missing_s or time.monotonic()
            actor_name = _running().get(name)
            if actor_name is None and time.monotonic() - missing_s > RESTART_S:
                return
        else:
            missing_s = None


def _running() -> dict[str, str]:
    """Return the name of the controller's actor for each run on the cluster; none if the cluster is gone."""
    if not is_up():
        return {}
    actors = ray.util.list_named_actors(all_namespaces=True)
    return {run_of_actor(one["name"]): one["name"] for one in actors if one["namespace"] == NAMESPACE}


def _find(name: str | None) -> tuple[str, str]:
    """Return the run and its controller's actor. Raises ConfigError if it does not run, or if several do."""
    running = _running()
    if name in running:
        return name, running[name]
    if name is None and len(running) == 1:
        return next(iter(running.items()))
    if name is None and not running:
        raise ConfigError(
            f"no run with CGXConfig has begun on the Ray cluster at {cluster_address()}; wait for one, give a run's "
            "folder, or the --address of another cluster"
        )
    known = ", ".join(sorted(running)) or "none"
    asked = f"no run {name!r}, and no such folder" if name is not None else "several runs"
    raise ConfigError(
        f"{asked}; runs with CGXConfig on the Ray cluster at {cluster_address()}: {known}; give one of them, a run's "
        "folder, or the --address of another cluster"
    )
