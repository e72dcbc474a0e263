"""Decisions without Ray: rank 0 runs the control loop, real ranks on loopback train with what it decides."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from support.branches import weights_hash
from support.endings import loops_below
from support.ranks import log_lines, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import cgx_ray
from cgx_ray.cli import main
from cgx_ray.collectives.transport.simulated_link import SimulatedLink
from cgx_ray.control.journal.lines import Journal, report_hint
from cgx_ray.errors import ConfigError
from cgx_ray.plan import NONE
from cgx_ray.report.journal_schema import journal_problem
from cgx_ray.session import local_control
from cgx_ray.session.attachment import Attachment
from cgx_ray.session.local_control import REPORT_S

# Longest time for a first decision, in seconds: some steps and some reports, each half a second, on a busy machine.
DECIDED_S = 60.0


class Trained:
    """Steps of a rank: version of the plan in each, and the weights after it."""

    def __init__(self, rank: int) -> None:
        torch.manual_seed(0)
        self.model = DistributedDataParallel(nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)))
        self.rank = rank
        self.versions: list[int] = []
        self.hashes: list[str] = []

    def train_until(self, attachment: Attachment, is_enough: Callable[[], bool]) -> None:
        """Train until `is_enough` on rank 0, on all ranks to the same step."""
        end_s = time.monotonic() + DECIDED_S
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        more = torch.ones(1)
        while more.item():
            x_BD = torch.randn(8, 256, generator=torch.Generator().manual_seed(len(self.versions) + 1000 * self.rank))
            optimizer.zero_grad()
            (self.model(x_BD) - x_BD).square().mean().backward()
            optimizer.step()
            assert attachment.plan is not None
            self.versions.append(attachment.plan.version)
            self.hashes.append(weights_hash(self.model))
            more.fill_(float(not is_enough() and time.monotonic() < end_s))
            dist.broadcast(more, 0)


def adapt(rank: int, folder: str, policy: str, hosts: tuple[str, ...] = ()) -> tuple[list[int], list[str]]:
    """Train until a plan was decided, and a while longer. `hosts`: names of the ranks' hosts, for several nodes."""
    if hosts:
        socket.gethostname = lambda: hosts[rank]
    trained = Trained(rank)
    attachment = cgx_ray.attach(trained.model, policy=policy, folder=folder)
    trained.train_until(attachment, lambda: trained.versions[-1] > trained.versions[0])
    end_s = time.monotonic() + 3 * REPORT_S
    trained.train_until(attachment, lambda: time.monotonic() > end_s)
    attachment.close()
    return trained.versions, trained.hashes


def lines_of(folder: Path, event: str | None = None) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "decisions.jsonl").read_text().splitlines()]
    return [line for line in lines if event in (None, line["event"])]


def check_alike(outcomes: list[tuple[list[int], list[str]]]) -> list[int]:
    """Check that all ranks had the same plan and the same weights in each step; return the plans' versions."""
    versions, hashes = outcomes[0]
    assert all(outcome == (versions, hashes) for outcome in outcomes)
    assert versions == sorted(versions)
    return versions


def test_rank_0_decides_all_ranks_switch_at_one_step_and_commands_read_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "my-run"
    versions = check_alike(run_ranks(2, adapt, str(folder), "cgx"))
    assert versions[0] == 0
    lines = lines_of(folder)
    assert [problem for line in lines if (problem := journal_problem(line))] == []
    assert (lines[0]["event"], lines[-1]["event"]) == ("start", "end")
    assert lines[0]["world_size"] == 2
    decided = lines_of(folder, "decision")[0]
    assert decided["kind"] == "replace"
    assert decided["new"]["version"] in versions
    report = ["report", str(folder), "--html", str(tmp_path / "r.html"), "--plot", str(tmp_path / "r.png")]
    for command in (report, ["top", "--once", str(folder)]):
        shown = CliRunner().invoke(main, command)
        assert shown.exit_code == 0, (command, shown.output)


def _adapt_to_a_slow_link(rank: int, folder: str, policy: str) -> tuple[str, list[int], list[str]]:
    """Train until a plan compresses, at most for DECIDED_S, and two steps more. Return it in words."""
    trained = Trained(rank)
    link = SimulatedLink(latency_s=1e-4, schedule=((0, 2e7),))
    attachment = cgx_ray.attach(trained.model, policy=policy, folder=folder, simulated_link=link)

    def compresses() -> bool:
        assert attachment.plan is not None
        return any(group.option.codec != NONE for group in attachment.plan.groups)

    trained.train_until(attachment, compresses)
    seen = len(trained.versions)
    trained.train_until(attachment, lambda: len(trained.versions) > seen + 1)
    found = str(attachment.plan)
    attachment.close()
    return found, trained.versions, trained.hashes


@pytest.mark.parametrize("policy", ["flexible", "cgx", "cupcake", "bytecomp"])
def test_policies_of_the_papers_compress_where_the_link_is_slow(policy: str, tmp_path: Path) -> None:
    (plan, *outcome), other = run_ranks(2, _adapt_to_a_slow_link, str(tmp_path), policy)
    assert (plan, *outcome) == other
    assert re.search(r"topk|qsgd|artopk|dgc|terngrad|sign", plan), plan
    assert outcome[0][-1] > outcome[0][0]
    assert lines_of(tmp_path, "decision")


def test_ranks_of_another_node_report_and_get_plans_through_the_first_of_them(tmp_path: Path) -> None:
    versions = check_alike(run_ranks(3, adapt, str(tmp_path), "cgx", ("a", "b", "b")))
    (end,) = lines_of(tmp_path, "end")
    assert end["step"] == end["newest_step"] == len(versions) - 1, "all steps count, also the last ones of other ranks"
    outcomes = lines_of(tmp_path, "outcome")
    # Steps count once all ranks have reported them.
    assert outcomes
    assert lines_of(tmp_path, "silence") == []


@pytest.mark.fault("torchrun starts all ranks again", "the loop goes on with what it knew")
def test_ranks_that_torchrun_starts_again_begin_with_the_plan_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = check_alike(run_ranks(2, adapt, str(tmp_path), "cgx"))
    text = lines_of(tmp_path, "decision")[0]["new"]
    again = run_ranks(2, first_plan_after_restart, str(tmp_path))
    assert again[0] == again[1]
    assert again[0][0] >= versions[-1]
    assert "qsgd" in again[0][1], text
    assert len(lines_of(tmp_path, "start")) == 2
    # A run that a person starts again has no history.
    assert run_ranks(2, first_plan, str(tmp_path))[0][0] == 0


def first_plan_after_restart(rank: int, folder: str) -> tuple[int, str]:
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
    return first_plan(rank, folder)


def first_plan(rank: int, folder: str) -> tuple[int, str]:
    trained = Trained(rank)
    attachment = cgx_ray.attach(trained.model, policy="cgx", folder=folder)
    assert attachment.plan is not None
    found = attachment.plan.version, attachment.plan.describe()
    trained.train_until(attachment, lambda: len(trained.versions) > 3)
    time.sleep(2 * REPORT_S)
    attachment.close()
    return found


def lose_loop(rank: int, folder: str) -> tuple[list[int], list[str], list[str]]:
    said = log_lines()
    trained = Trained(rank)
    attachment = cgx_ray.attach(trained.model, policy="cgx", folder=folder)
    trained.train_until(attachment, lambda: trained.versions[-1] > 0)
    for pid in loops_below(os.getpid()):
        os.kill(pid, signal.SIGKILL)
    end_s = time.monotonic() + 4 * REPORT_S
    trained.train_until(attachment, lambda: time.monotonic() > end_s)
    attachment.close()
    return trained.versions, trained.hashes, said


@pytest.mark.fault("SIGKILL of the control loop's process, without Ray", "one line; ranks keep their plan and go on")
def test_training_goes_on_without_the_process_of_the_loop(tmp_path: Path) -> None:
    *outcomes, said = zip(*run_ranks(2, lose_loop, str(tmp_path)), strict=True)
    check_alike(list(zip(*outcomes, strict=True)))
    ended = "the process of the control loop has ended (exit status -9): training goes on"
    assert [line.startswith(ended) for line in said[0]] == [True], said[0]
    assert said[1] == []
    assert lines_of(tmp_path, "end") == []


@pytest.mark.fault("a rank loses its connection to rank 0's loop, without Ray", "it logs that once; training goes on")
def test_a_rank_that_loses_its_connection_to_the_loop_says_so_once(tmp_path: Path) -> None:
    said = run_ranks(2, lose_connection, str(tmp_path))
    assert len(said[1]) == 1, said
    assert "rank 1 has lost the control loop of rank 0: training goes on with plan" in said[1][0]


def lose_connection(rank: int, folder: str) -> list[str]:
    said = log_lines()
    trained = Trained(rank)
    attachment = cgx_ray.attach(trained.model, policy="adaptive", folder=folder)
    if rank == 0:
        attachment.control._server.close()
    end_s = time.monotonic() + 2 * REPORT_S
    trained.train_until(attachment, lambda: time.monotonic() > end_s)
    attachment.close()
    return said


def serve(rank: int, folder: str) -> str:
    trained = Trained(rank)
    attachment = cgx_ray.attach(trained.model, codec="qsgd:bits=4", folder=folder)
    address = attachment.serve_metrics("run", host="127.0.0.1")
    assert address is not None
    end_s = time.monotonic() + 6 * REPORT_S
    trained.train_until(attachment, lambda: time.monotonic() > end_s)
    with urllib.request.urlopen("http://{}:{}/metrics".format(*address), timeout=10) as answer:
        text: str = answer.read().decode()
    dist.barrier()
    attachment.close()
    return text


def test_a_static_run_with_a_folder_has_a_journal_and_each_rank_serves_its_metrics(tmp_path: Path) -> None:
    texts = run_ranks(2, serve, str(tmp_path))
    assert {line["event"] for line in lines_of(tmp_path)} >= {"start", "end"}
    assert lines_of(tmp_path, "decision") == []
    for rank, text in enumerate(texts):
        ranks = set(re.findall(r'ray_cgx_ray_steps_total{.*worker_world_rank="(\d+)"', text))
        assert ranks == {str(rank)}, text
    # The monitor of the node, and what the loop knows, are rank 0's.
    for name in ("ray_cgx_ray_nic_speed_bits_per_second", "ray_cgx_ray_newest_plan_version"):
        assert [f"{name}{{" in text for text in texts] == [True, False], name
    (journal,) = re.findall(r'ray_cgx_ray_journal_info{.*journal="([^"]*)"', texts[0])
    assert journal == str(tmp_path / "decisions.jsonl")


def sum_inside(rank: int, folder: str) -> list[str]:
    """Train with a plan that compresses between nodes; return what is logged, and what `top` shows."""
    said = log_lines()
    logging.getLogger("cgx_ray").setLevel(logging.INFO)
    trained = Trained(rank)
    attachment = cgx_ray.attach(trained.model, codec="qsgd", intra="dense", folder=folder)
    end_s = time.monotonic() + 4 * REPORT_S
    trained.train_until(attachment, lambda: time.monotonic() > end_s)
    if rank == 0:
        assert isinstance(attachment.control, local_control.LocalControl)
        said.append(str(attachment.control.ask("look")["plan"]["text"]))
    attachment.close()
    trained.model = DistributedDataParallel(trained.model.module)
    attachment = cgx_ray.attach(trained.model, codec="qsgd", intra="dense")
    trained.train_until(attachment, lambda: True)
    attachment.close()
    return said


def test_a_plan_that_compresses_between_nodes_is_called_dense_on_one_node(tmp_path: Path) -> None:
    said, _ = run_ranks(2, sum_inside, str(tmp_path / "run"))
    plan = "dense, dense inside nodes"
    (start,) = lines_of(tmp_path / "run", "start")
    assert (start["plan"]["plan"], start["plan"]["expected_loss"]) == (plan, 1.0)
    why = "(qsgd 4-bit over sra, dense inside nodes compresses between nodes only, and all ranks are on one)"
    starts = [line for line in said if f"2 ranks; {plan} {why}; " in line]
    assert len(starts) == 2
    assert plan in said
    assert any(line.startswith(f"1 step under {plan}, ") for line in said)
    shown = CliRunner().invoke(main, ["report", str(tmp_path / "run"), "--json", "-"])
    assert shown.exit_code == 0, shown.output
    assert re.search(rf" under {plan}, .* per step; how fast", shown.output)
    assert '"expected_loss": 1.0,' in shown.output


def write_nowhere(rank: int, folder: str) -> list[str]:
    said = log_lines()
    logging.getLogger("cgx_ray").setLevel(logging.INFO)
    trained = Trained(rank)
    attachment = cgx_ray.attach(trained.model, codec="qsgd", folder=folder)
    end_s = time.monotonic() + 4 * REPORT_S
    trained.train_until(attachment, lambda: time.monotonic() > end_s)
    attachment.close()
    return said


@pytest.mark.fault("a folder that cannot be written", "no journal, and no line promises one")
@pytest.mark.parametrize(("folder", "why"), [("file/run", "[Errno 20] Not a "), ("/proc", "")])
def test_a_folder_that_cannot_be_written_is_promised_by_no_line(tmp_path: Path, folder: str, why: str) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / folder / "decisions.jsonl"
    said, _ = run_ranks(2, write_nowhere, str(path.parent))
    (start,) = (line for line in said if "go through cgx_ray on 2 ranks" in line)
    assert start.endswith("; no journal")
    # No second warning, such as of each file in it.
    (warned,) = (line for line in said if "training goes on" in line or "report and replay have" in line)
    assert warned.startswith(f"{path} cannot be written ({why}")
    assert warned.endswith("; give attach a folder= that rank 0 may write to")
    (end,) = (line for line in said if "There is no journal: " in line)
    assert " per step on average" in end or "how fast dense would be is not known" in end
    assert "cgx-ray report" not in end
    # Also of a run that ends before its first line was tried.
    assert report_hint(Journal(tmp_path / "file" / "decisions.jsonl", warns=False)) == "There is no journal"


def refused(rank: int, folder: str) -> list[str]:
    trained = Trained(rank)
    plan = cgx_ray.make_plan(cgx_ray.layers_of(trained.model), version=0, world_size=2)
    said = []
    for arguments in (
        {"policy": "adaptive", "plan": plan},
        {"folder": folder, "plan": plan},
        {"policy": "adaptive", "codec": "topk:density=0.1"},
        {"policy": "never"},
        {"folder": folder if rank else None},
    ):
        with pytest.raises(ConfigError) as error:
            cgx_ray.attach(trained.model, **arguments)
        said.append(str(error.value))
    local_control.MAX_NODES = 0
    with pytest.raises(ConfigError) as error:
        cgx_ray.attach(trained.model, policy="adaptive", folder=folder)
    said.append(str(error.value))
    local_control.MAX_NODES = 1
    attachment = cgx_ray.attach(trained.model, policy="adaptive", folder=folder)
    with pytest.raises(ConfigError) as error:
        attachment.explore([], lambda step: None)
    attachment.close()
    return [*said, str(error.value)]


def test_arguments_that_do_not_fit_together_are_refused_on_all_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(2, refused, str(tmp_path))
    assert first == second
    for said, expected in zip(
        first,
        (
            "attach got a plan and a policy",
            "attach got a folder for decisions and a plan",
            "not allowed with policy 'adaptive', which takes fidelity, candidates, min_gain",
            "unknown policy 'never'; known: adaptive",
            "ranks were given different settings: rank 1 has folder=",
            "1 nodes with up to 2 ranks are too many for decisions without Ray; take at most 0 with 32 each",
            "policy Adaptive(fidelity='strict'",
        ),
        strict=True,
    ):
        assert expected in said, said
