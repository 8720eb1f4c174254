"""The table of the leader's jobs names all of them."""

from __future__ import annotations

import re

from scripts.documents.leader_jobs import EVERY_WORKERS, WORKERS, jobs, table


def test_every_class_that_has_rounds_is_named_and_described() -> None:
    rounds = sum(
        len(re.findall(r"^    async def tick\(", path.read_text("utf-8"), re.M)) for path in WORKERS.rglob("*.py")
    )
    described = dict(jobs())

    assert len(described) == rounds - 1, "all but the protocol of a job"
    assert all(described.values())
    assert described.keys() > EVERY_WORKERS


def test_jobs_of_every_worker_are_not_the_leaders() -> None:
    assert "| sweeper | Plans every queue" in table()
    assert "registrar" not in table()
