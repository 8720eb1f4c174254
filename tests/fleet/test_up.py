"""`dualmap up` as a user runs it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from dualmap.research.chaos.fleet_process import STOP_S, alive
from tests.fleet.fleet_process import Fleet, running_fleet, until

SMALL = ("--replicas", "2", "--workers", "1", "--instances", "2", "--status-interval-s", "0.2")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with running_fleet(
        tmp_path_factory.mktemp("small"), (*SMALL, "--worker.health_interval_s", "0.2"), Fleet.start
    ) as fleet:
        yield fleet


def test_it_gets_ready_answers_its_own_curl_line_and_ctrl_c_leaves_no_process(tmp_path: Path) -> None:
    with running_fleet(tmp_path, SMALL, Fleet.start) as fleet:
        pids = fleet.pids()
        assert sorted(pids) == ["instance-1", "instance-2", "router-1", "router-2", "store", "worker-1"]
        line = re.search(r"^ +(curl .*)$", fleet.output, re.MULTILINE)
        assert line is not None
        words = shlex.split(line[1])
        assert b"data: [DONE]" in curl(words)
        until(lambda: "requests 1 " in fleet.output, "the status counts it")

        fleet.process.send_signal(signal.SIGINT)

        assert fleet.process.wait(STOP_S) == 0
        assert [name for name, pid in pids.items() if alive(pid)] == []
        assert not fleet.directory.exists()
        assert fleet.store_url == f"unix://{fleet.directory}/store.sock"


def test_what_it_prints_to_look_into_the_fleet_works_as_written(small: Fleet) -> None:
    here = {**os.environ, "TMPDIR": str(small.directory.parent), "COLUMNS": "200"}
    answer = small.post("/v1/chat/completions", {"model": small.model, "messages": HELLO, "max_tokens": 1})
    lines = re.findall(r"^  (\S*(?:dualmap|python\S* -m dualmap) \w.*?)   ", small.output, re.MULTILINE)
    assert len(lines) == 3
    for line in [*lines, f"{lines[1]} {answer['id']}", f"{lines[1].rsplit(' ', 1)[0]} instances list"]:
        done = subprocess.run(line.split(), capture_output=True, text=True, timeout=60, check=False, env=here)
        assert done.returncode == 0, f"{line}:\n{done.stdout}{done.stderr}"
        assert "instance-" in done.stdout


HELLO = [{"role": "user", "content": "Hello!"}]


def test_another_ctrl_c_kills_processes_that_do_not_end(tmp_path: Path) -> None:
    with running_fleet(tmp_path, SMALL, Fleet.start) as fleet:
        # given children of every stage that cannot hear a request to end, for whom a stop waits 42 s
        pids = fleet.pids()
        deaf = [pids[name] for name in ("router-1", "worker-1", "instance-1")]
        try:
            for pid in deaf:
                os.kill(pid, signal.SIGSTOP)
            fleet.process.send_signal(signal.SIGINT)
            until(lambda: "stopping" in fleet.output, "it stops")

            fleet.process.send_signal(signal.SIGINT)

            assert fleet.process.wait(12) == 0
            assert [name for name, pid in pids.items() if alive(pid)] == []
            assert not fleet.directory.exists()
        finally:
            for pid in filter(alive, deaf):
                os.kill(pid, signal.SIGKILL)


def test_one_instance_is_killed_alone_seen_down_and_comes_back(small: Fleet) -> None:
    pids = small.pids()
    assert f"instance-1  process {pids['instance-1']}" in small.output
    assert "it is started again after 3 s" in small.output

    small.kill("instance-1")

    until(lambda: small.instances()["instance-1"]["state"] == "down", "it is seen to be down")
    assert small.instances()["instance-2"]["state"] == "ready"
    until(lambda: small.instances()["instance-1"]["state"] == "ready", "it is back")
    assert "instance-1 was killed by SIGKILL; starting it again in 3 s" in small.output
    assert f"instance-1 runs again, as process {small.pid('instance-1')}" in small.output
    others = ("instance-2", "router-1", "worker-1", "store")
    assert {name: small.pid(name) for name in others} == {name: pids[name] for name in others}


def curl(words: list[str]) -> bytes:
    """Run the printed line with curl where there is one, else do what it says."""
    if shutil.which("curl"):
        return subprocess.run([*words, "-s"], capture_output=True, timeout=60, check=True).stdout
    url, body = words[2], words[words.index("-d") + 1]
    request = urllib.request.Request(url, body.encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return bytes(answer.read())


def test_killing_it_outright_leaves_no_process_either(tmp_path: Path) -> None:
    with running_fleet(tmp_path, SMALL, Fleet.start) as fleet:
        pids = fleet.pids()
        fleet.process.kill()
        fleet.process.wait()
        until(lambda: not any(map(alive, pids.values())), "all children ended", STOP_S)


def test_without_the_process_that_starts_the_others_it_ends_with_them(tmp_path: Path) -> None:
    with running_fleet(tmp_path, SMALL, Fleet.start) as fleet:
        pids = fleet.pids()
        starter = int(Path(f"/proc/{pids['router-1']}/stat").read_text().rpartition(")")[2].split()[1])
        assert starter != fleet.process.pid

        os.kill(starter, signal.SIGKILL)

        assert fleet.process.wait(STOP_S) == 1
        until(lambda: not any(map(alive, pids.values())), "all children ended", STOP_S)
        printed = (tmp_path / "up.out").read_text()
    assert "the process that starts the fleet's other processes was killed" in printed
    assert "starting it again" not in printed


def test_a_port_in_use_stops_the_start_and_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-m", "dualmap", "up", "--port", str(port)],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "--router.port" in done.stderr


def test_a_wrong_setting_stops_the_start_with_exit_code_2() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dualmap", "up", "--policy", "best"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "scheduling.policy" in done.stderr
