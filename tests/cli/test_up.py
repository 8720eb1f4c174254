"""A fleet that cannot start; one that does is seen in tests/fleet."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_a_store_that_cannot_be_reached_is_named_and_no_empty_folder_stays_behind(tmp_path: Path) -> None:
    nowhere = f"unix://{tmp_path}/nobody.sock"

    ended = subprocess.run(
        [sys.executable, "-m", "cli.main", "up", "--port", "0", "--store.url", nowhere],
        env={"TMPDIR": str(tmp_path), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert ended.returncode == 1
    assert "cannot connect to the store" in ended.stderr
    assert list(tmp_path.iterdir()) == []
