"""``dualmap picker`` without the packages that it needs."""

from __future__ import annotations

import subprocess
import sys

import pytest

_WITHOUT_GRPC = "import sys; sys.modules['grpc'] = None; from dualmap.cli.main import main; sys.exit(main(['picker']))"


def test_the_extra_that_is_missing_is_named() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_GRPC], capture_output=True, text=True, timeout=60, check=False
    )

    assert done.returncode == 2
    assert "grpcio" in done.stderr or "picker" in done.stderr


@pytest.mark.parametrize("module", ["dualmap.router.serving.serve", "dualmap.cli.settings", "dualmap.cli.serve_router"])
def test_nothing_else_needs_it(module: str) -> None:
    code = f"import sys; import {module}; assert not [each for each in sys.modules if each.startswith('grpc')]"
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)
