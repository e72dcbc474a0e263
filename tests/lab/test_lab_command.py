"""`cgx-ray lab` as a user types it, in separate processes; schedules."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from support.emulated import needs_lab

from cgx_ray.cli import main
from cgx_ray.commands.lab import lab
from cgx_ray.errors import LabError
from cgx_ray.lab.handle import LabHandle
from cgx_ray.lab.namespaces import Lab, remove_leftovers
from cgx_ray.lab.schedule import Schedule, parse_schedule, play, report_step
from cgx_ray.report.links import _lines, plot_schedule

NEEDS_LAB = needs_lab(rates_only=False)
# Processes started in the background by a shell ignore SIGINT, and their children inherit it.
CGX_RAY = ["env", "--default-signal=INT", sys.executable, "-m", "cgx_ray.cli", "lab"]


def lab_command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*CGX_RAY, *words], capture_output=True, text=True, check=False, timeout=250)


def call(*words: str) -> Result:
    """Run the command in this process, which starts faster."""
    return CliRunner().invoke(lab, words)


def pids_in(up: str, host: int) -> set[str]:
    name = f"cgx{up.partition('=')[2]}-{host}"
    return set(subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=True).stdout.split())


@pytest.fixture(scope="module")
def up():
    """Start a lab of two hosts in a separate process; yield the option that names it."""
    process = subprocess.Popen(
        [*CGX_RAY, "up", "--hosts", "2", "--rate", "500mbit", "--latency", "1ms"], stdout=subprocess.PIPE, text=True
    )
    lines = [process.stdout.readline() for _ in range(2)]
    assert f"lab {process.pid} is up: 2 hosts, back end" in lines[0]
    yield f"--lab={process.pid}"
    down = lab_command("down", f"--lab={process.pid}")
    assert down.stdout == f"lab {process.pid} is down\n", down.stderr
    assert f"lab {process.pid} ends" in process.stdout.read()
    process.stdout.close()
    assert process.wait() == 0
    assert traces(process.pid) == []


def traces(pid: int) -> list[str]:
    return [path.name for folder in ("/run/netns", "/run") for path in Path(folder).glob(f"cgx{pid}-*")]


def state(up: str) -> dict:
    return json.loads(call("status", "--json", up).output)


@NEEDS_LAB
def test_set_cut_and_reconnect_change_a_running_lab(up):
    assert call("set", up, "--host", "1", "--direction", "up", "--rate", "20mbit", "--loss", "1%").exit_code == 0
    assert call("set", up, "--latency", "2ms").exit_code == 0
    assert call("cut", up, "0").exit_code == 0
    changed = state(up)
    assert changed["links"][1]["up"]["rate_bit_per_s"] == 20e6
    assert changed["links"][1]["up"]["loss"] == 0.01
    assert changed["links"][1]["down"]["rate_bit_per_s"] == 500e6
    assert {link["latency_s"] for both in changed["links"] for link in both.values()} == {0.002}
    assert changed["connected"] == [False, True]
    assert "CUT OFF" in call("status", up).output
    assert call("reconnect", up, "0").exit_code == 0
    assert call("set", up, "--host", "1", "--rate", "500mbit", "--loss", "0").exit_code == 0
    assert state(up)["connected"] == [True, True]


@NEEDS_LAB
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("set",), "nothing to set"),
        (("set", "--host", "7", "--rate", "1gbit"), "host 7 is not in the lab; it has 0 to 1"),
        (("cut", "2"), "host 2 is not in the lab"),
        (("run", "--schedule", "c1", "true"), "say how long one is"),
        (("run", "--host", "2", "true"), "host 2 is not in the lab"),
    ],
)
def test_bad_requests_are_one_clear_error(up, words, message):
    done = call(words[0], up, *words[1:])
    assert isinstance(done.exception, LabError)
    assert message in str(done.exception)


@NEEDS_LAB
@pytest.mark.parametrize("words", ["schedule nofile", "schedule c1 --slower 0.5", "up --hosts 0", "up --rate 0bit"])
def test_a_value_that_is_not_allowed_ends_with_status_2(words: str) -> None:
    done = CliRunner().invoke(main, ["lab", *words.split()])
    assert done.exit_code == 2, done.output
    assert done.output.startswith("Error: ")


@NEEDS_LAB
def test_down_ends_no_lab_of_another_command_that_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with Lab(2, rate_bit_per_s=1e9) as own:
        monkeypatch.setattr(LabHandle, "running", staticmethod(lambda: [own.pid]))
        done = CliRunner().invoke(main, ["lab", "down"])
        assert done.exit_code == 1
        assert re.search(rf"lab {own.pid} is that of `.*`; to end it give --lab {own.pid}", done.output)
        assert own.is_connected(0)


def test_an_error_is_one_line_and_no_traceback():
    done = lab_command("status", "--lab", "1")
    assert (done.returncode, done.stderr) == (1, "Error: no lab is up in process 1; start one: cgx-ray lab up\n")


@NEEDS_LAB
def test_run_starts_a_rank_in_every_host_and_has_its_status(up):
    script = 'echo "$(cat /proc/sys/kernel/hostname) $CGX_LAB_RANK/$WORLD_SIZE $PET_NODE_RANK $MASTER_ADDR"'
    done = call("run", up, "sh", "-c", script)
    assert sorted(done.output.splitlines()) == [
        "[0] cgx-host-0 0/2 0 10.77.0.1",
        "[1] cgx-host-1 1/2 1 10.77.0.1",
    ]
    assert done.exit_code == 0
    assert call("run", up, "--host", "1", "--", "sh", "-c", "exit 5").exit_code == 5


@NEEDS_LAB
def test_when_one_rank_fails_the_others_are_ended_with_all_they_started(up):
    before = pids_in(up, 0)
    # The process that hangs has left its parent: it has its own session.
    done = call("run", up, "sh", "-c", "if [ $RANK = 0 ]; then setsid sleep 1000 & wait; else sleep 0.5; exit 3; fi")
    assert done.exit_code == 3, done.output
    assert_ends(up, 0, before)


def assert_ends(up: str, host: int, before: set[str]) -> None:
    """The kernel ends the rest of a process tree when its first process ends, but not within the same instant."""
    deadline = time.monotonic() + 20
    while (left := pids_in(up, host)) != before:
        assert time.monotonic() < deadline, f"{left - before} are left"
        time.sleep(0.05)


@NEEDS_LAB
def test_torchrun_needs_no_options(up, tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, socket\n"
        "rank, size, master, port = (os.environ[f] for f in ('RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT'))\n"
        "socket.create_connection((master, int(port)), timeout=60).close()\n"
        "print(f'rank {rank} of {size} reaches {master}', flush=True)\n"
    )
    done = call("run", up, sys.executable, "-m", "torch.distributed.run", str(script))
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    # Both torchruns have met, so ranks differ, and the store of rank 0's host answers to both. Importing torch in ranks
    # would show no more.
    assert {line.partition("] ")[2] for line in lines} >= {f"rank {rank} of 2 reaches 10.77.0.1" for rank in (0, 1)}


@pytest.mark.slow  # `make demo` trains on such nodes, and its Ctrl-C test ends them
@NEEDS_LAB
def test_a_ray_job_sees_a_node_in_every_host_and_all_of_it_ends(up):
    before = [pids_in(up, host) for host in (0, 1)]
    code = "import ray; ray.init(); print('nodes', sorted(n['NodeManagerAddress'] for n in ray.nodes()))"
    done = lab_command("run", up, "--ray", "python", "-c", code)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nodes ['10.77.0.1', '10.77.0.2']" in done.stdout
    for host in (0, 1):
        assert_ends(up, host, before[host])


@NEEDS_LAB
def test_a_schedule_in_steps_follows_what_the_job_reports(up, tmp_path):
    schedule = tmp_path / "two.txt"
    schedule.write_text("unit step\n0 rate=400mbit\n10 latency=3ms\n20 latency=4ms\n")
    # Ends once the lab has applied the actions up to step 12.
    script = (
        f'echo 12 > "$CGX_LAB_STEPS"; for i in $(seq 200); do grep -q 0.003 /run/cgx{up.partition("=")[2]}-lab/lab.json'
        "&& exit 0; sleep 0.05; done; exit 1"
    )
    events = tmp_path / "events.jsonl"
    events.write_text("of an earlier run\n")
    began = time.time()
    done = call("run", up, "--schedule", str(schedule), "--events", str(events), "--host", "0", "sh", "-c", script)
    assert done.exit_code == 0, done.stderr
    start, *changes = events_of(events, began)
    assert start["event"] == "start"
    assert start["change"].items() > {"rate_bit_per_s": 500e6, "loss": 0.0}.items()
    assert [(line["step"], line["change"]) for line in changes] == [
        (12, {"rate_bit_per_s": 400e6}),
        (12, {"latency_s": 0.003}),
    ]
    played = [line.partition(" ")[2] for line in done.stderr.splitlines()]
    assert played == ["step 0: all hosts: rate 400mbit", "step 10: all hosts: latency 3 ms"]
    assert {link["latency_s"] for both in state(up)["links"] for link in both.values()} == {0.003}


def events_of(path: Path, began: float) -> list[dict]:
    """Return the lines that a run has written, without times, after checking that these ascend from `began` to now."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    times = [began, *(line.pop("time") for line in lines), time.time()]
    assert times == sorted(times)
    return lines


@NEEDS_LAB
def test_the_events_of_a_run_are_what_was_set(up, tmp_path):
    schedule, events = tmp_path / "three.txt", tmp_path / "events.jsonl"
    schedule.write_text("unit s\n0 rate=300mbit\n0.1 host=0 cut\n0.2 host=0 reconnect latency=5ms\n60 host=0 cut\n")
    assert call("set", up, "--rate", "500mbit", "--latency", "1ms").exit_code == 0
    assert call("set", up, "--host", "1", "--direction", "down", "--rate", "80mbit").exit_code == 0
    assert call("cut", up, "1").exit_code == 0
    try:
        began = time.time()
        script = f"for i in $(seq 200); do [ $(wc -l < {events}) = 6 ] && exit 0; sleep 0.05; done; exit 1"
        done = call("run", up, "--schedule", str(schedule), "--events", str(events), "--host", "0", "sh", "-c", script)
        assert done.exit_code == 0, done.stderr
        lines = events_of(events, began)
        links = state(up)
    finally:
        assert call("reconnect", up, "1").exit_code == 0
        assert call("set", up, "--rate", "500mbit", "--latency", "1ms").exit_code == 0
    usual = {"jitter_s": 0.0, "loss": 0.0, "queue_bytes": None, "mtu_bytes": 9000, "latency_s": 0.001}
    assert lines == [
        {"event": "start", "num_hosts": 2, "change": {"rate_bit_per_s": 500e6, **usual}},
        {"event": "start", "host": 1, "direction": "down", "change": {"rate_bit_per_s": 80e6, **usual}},
        {"event": "start", "host": 1, "change": {}, "is_connected": False},
        {"event": "change", "change": {"rate_bit_per_s": 300e6}},
        {"event": "change", "host": 0, "change": {}, "is_connected": False},
        {"event": "change", "host": 0, "change": {"latency_s": 0.005}, "is_connected": True},
    ]
    assert links["connected"] == [True, False]
    assert {link["rate_bit_per_s"] for both in links["links"] for link in both.values()} == {300e6}
    assert [both["up"]["latency_s"] for both in links["links"]] == [0.005, 0.001]


@NEEDS_LAB
def test_a_detached_lab_runs_on_until_down():
    started = lab_command("up", "--hosts", "1", "--detach")
    pid = int(started.stdout.split()[1])
    assert pid in LabHandle.running(), started.stderr
    assert lab_command("down", f"--lab={pid}").returncode == 0
    assert traces(pid) == []


@NEEDS_LAB
def test_a_lab_that_cannot_start_detached_says_why():
    failed = lab_command("up", "--hosts", "99", "--detach")
    assert failed.returncode == 2
    assert failed.stderr == "Error: num_hosts 99 is not allowed; give 1 to 64\n"


@NEEDS_LAB
def test_ctrl_c_and_a_dead_switch_leave_nothing():
    for end in ("interrupt", "switch"):
        with subprocess.Popen(
            [*CGX_RAY, "up", "--hosts", "1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as owner:
            assert "is up" in owner.stdout.readline()
            owner.stdout.readline()
            if end == "interrupt":
                owner.send_signal(signal.SIGINT)
                assert owner.wait() == 0
            else:
                name = ["ip", "netns", "pids", f"cgx{owner.pid}-sw"]
                os.kill(int(subprocess.run(name, capture_output=True, text=True, check=True).stdout), signal.SIGKILL)
                assert owner.wait() == 1
                assert "the lab fell apart" in owner.stderr.read()
        assert traces(owner.pid) == []


@NEEDS_LAB
def test_after_kill_9_the_next_start_removes_that_lab_and_nothing_else():
    others = [Path("/run/cgx-lab"), Path("/run/cgx1x-lab"), Path("/run/cgxray-lab")]
    # Process 1 lives, but it is not the one that made this lab.
    reused = Path("/run/cgx1-lab")
    with subprocess.Popen([*CGX_RAY, "up", "--hosts", "1"], stdout=subprocess.PIPE, text=True) as owner:
        owner.stdout.readline()
        owner.stdout.readline()
        owner.kill()
    assert traces(owner.pid) != [], "names outlive a killed owner: this test would prove nothing"
    for folder in (*others, reused):
        folder.mkdir()
    (reused / "owner").write_text("not its start time")
    try:
        remove_leftovers()
        assert traces(owner.pid) == []
        assert not reused.exists()
        assert all(folder.exists() for folder in others)
    finally:
        for folder in others:
            folder.rmdir()


def test_the_papers_schedules_come_with_the_package():
    c1, c2 = Schedule.read("c1"), Schedule.read("c2")
    assert (c1.unit, c1.end, c2.end) == ("epoch", 50, 50)
    assert [event.at for event in c1.events] == [0, 12, 24, 36]
    assert [event.at for event in c2.events] == [0, 12, 20, 28, 36]
    slow = c1.with_epoch(20, "s").slower(10)
    assert slow.events[1].at == 240
    assert slow.events[1].change == {"rate_bit_per_s": 1e8}
    assert slow.events[2].change == {"latency_s": 0.5}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0 rate=1gbit", "line 1: the first line must name the unit"),
        ("unit s\n0 rate=1", "line 2: rate '1' is not allowed; give a number and kbit"),
        ("unit s\n\n5 cut\n1 cut", "line 4: 1 comes after 5"),
        ("unit s\nsoon cut", "'soon' is not a time"),
        ("unit s\n0 host=1", "nothing changes"),
        ("unit s\n0 host=one cut", "write host=2"),
        ("unit s", "is empty"),
    ],
)
def test_a_schedule_that_is_not_understood_names_the_line(text, message):
    with pytest.raises(LabError, match=message):
        parse_schedule("mine", text)


def test_an_unknown_schedule_and_an_epoch_where_there_is_none_are_clear_errors():
    with pytest.raises(LabError, match="neither a file nor one of c1, c2"):
        Schedule.read("c3")
    with pytest.raises(LabError, match="has no epochs"):
        parse_schedule("mine", "unit s\n0 cut").with_epoch(3, "s")


def test_steps_are_reported_by_a_file(tmp_path, monkeypatch):
    schedule = parse_schedule("mine", "unit step\n0 cut\n3 reconnect\n")
    path = tmp_path / "step"
    monkeypatch.setenv("CGX_LAB_STEPS", str(path))
    stop, events = threading.Event(), []

    class Recorder:
        hosts = (None,)

        def cut(self, host):
            report_step(3)

        def reconnect(self, host):
            pass

    report_step(0)
    play(schedule, Recorder(), path, events.append, stop)
    assert [event.at for event in events] == [0, 3]


def test_the_picture_has_a_line_for_each_link_that_differs(tmp_path):
    text = "unit s\n0 rate=1gbit latency=1ms\n2 host=1 direction=up rate=100mbit\n3 host=2 cut\n5 end"
    schedule = parse_schedule("mine", text)
    plot_schedule(schedule, tmp_path / "mine.png")
    assert (tmp_path / "mine.png").read_bytes()[1:4] == b"PNG"
    lines = _lines(schedule, "rate_bit_per_s", 1e-9)
    assert set(lines) == {"the others", "host 1 up", "host 2"}
    assert lines["host 1 up"] == [(0, 1), (2, 0.1), (5, 0.1)]
    assert str(lines["host 2"]) == "[(0.0, 1.0), (3.0, nan), (5.0, nan)]"


def test_the_picture_shows_no_others_where_every_host_is_named():
    text = "unit s\n0 rate=1gbit latency=1ms\n2 host=1 direction=up rate=100mbit\n3 host=0 rate=2gbit\n5 end"
    schedule = parse_schedule("mine", text)
    assert set(_lines(schedule, "rate_bit_per_s", 1, 3)) == {"the others", "host 0", "host 1 up"}
    assert set(_lines(schedule, "rate_bit_per_s", 1, 2)) == {"host 0", "host 1 up", "host 1 down"}
    assert _lines(schedule, "latency_s", 1e3, 2) == {"all links": [(0, 1), (5, 1)]}
