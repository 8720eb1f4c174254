"""Fixtures of the command line's tests."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from dualmap.cli import figures
from dualmap.cli.fetch import HttpReply
from tests.cli.scripted_replica import Replica


@pytest.fixture
def metrics_pages(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Metrics pages by base URL, served without a network; other URLs do not answer."""
    pages: dict[str, str] = {}

    def fetch(url: str, *, timeout_s: float) -> HttpReply:
        page = pages.get(url.removesuffix("/metrics"))
        return HttpReply(200, page.encode()) if page is not None else HttpReply(0, b"refused")

    monkeypatch.setattr(figures, "fetch", fetch)
    return pages


@pytest.fixture
def replica() -> Iterator[Replica]:
    with Replica() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()
