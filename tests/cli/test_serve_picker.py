"""``dualmap picker`` without the packages that it needs."""

from __future__ import annotations

import subprocess
import sys

import pytest

_WITHOUT_HPACK = (
    "import sys; sys.modules['hpack'] = None; from dualmap.cli.main import main; sys.exit(main(['picker']))"
)


def test_the_extra_that_is_missing_is_named() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_HPACK], capture_output=True, text=True, timeout=60, check=False
    )

    assert done.returncode == 2
    assert "hpack" in done.stderr
    assert "picker" in done.stderr


@pytest.mark.parametrize("module", ["dualmap.router.serving.serve", "dualmap.cli.settings", "dualmap.cli.serve_router"])
def test_nothing_else_needs_it(module: str) -> None:
    code = f"import sys; import {module}; assert not {{'hpack', 'google.protobuf', 'grpc'}} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)


def test_the_picker_needs_no_grpc() -> None:
    code = "import sys; import dualmap.router.serving.picker_door; assert 'grpc' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)
