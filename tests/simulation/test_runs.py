import os
import signal
import subprocess
import sys
import time
from pathlib import Path

SCRIPT = """
import os, sys, time
from pathlib import Path
from simulation.runs import map_jobs

def work(folder):
    Path(folder, str(os.getpid())).touch()
    time.sleep(120)

if __name__ == "__main__":
    list(map_jobs(work, [sys.argv[1]] * 2, workers=2))
"""


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")
    return not state.exists() or state.read_text().rpartition(")")[2].split()[0] != "Z"


def test_the_processes_end_with_a_killed_parent(tmp_path: Path) -> None:
    # Given a parent with two processes at work
    script, folder = tmp_path / "script.py", tmp_path / "pids"
    script.write_text(SCRIPT)
    folder.mkdir()
    parent = subprocess.Popen(
        [sys.executable, str(script), str(folder)], env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    )
    deadline_s = time.monotonic() + 30
    while len(list(folder.iterdir())) < 2:
        assert time.monotonic() < deadline_s, "the processes never started"
        time.sleep(0.02)

    parent.send_signal(signal.SIGKILL)
    parent.wait()

    pids = [int(path.name) for path in folder.iterdir()]
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline_s, "they outlive their parent"
        time.sleep(0.02)
