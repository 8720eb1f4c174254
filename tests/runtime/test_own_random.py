"""Ids of processes that are forks of one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

from dualmap.router.http.admission import mint_request_id
from dualmap.router.telemetry.trace_context import TraceContexts
from tests.support.fork_servers import executed_fork_server


def mint(_: Sequence[str]) -> int:
    """In a fork: print the ids of a request and of its trace."""
    print(json.dumps([mint_request_id(), TraceContexts(1.0).begin(None).trace_id]))
    return 0


async def test_forks_of_one_process_mint_other_ids(tmp_path: Path) -> None:
    logs = [tmp_path / f"{number}.log" for number in range(3)]
    with executed_fork_server(f"{__name__}:mint") as server:
        processes = [await server.start(("router",), log) for log in logs]
        codes = await asyncio.gather(*(process.wait() for process in processes))
        server.close()

    minted = [minted for log in logs for minted in json.loads(log.read_text())]
    assert codes == [0, 0, 0]
    assert len(set(minted)) == 6
