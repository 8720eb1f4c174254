from __future__ import annotations

import pytest

from dualmap.router.requests.metaserver import Metaserver


@pytest.mark.parametrize("asked_for", ["r-1", "chatcmpl-r-1", "cmpl-r-1-0"])
async def test_a_decoder_finds_its_request_by_the_id_that_vllm_gives_it(asked_for: str) -> None:
    metaserver = Metaserver()
    expected = metaserver.expect("r-1")

    assert metaserver.requested({"request_id": asked_for, "remote_port": 7})
    assert (await expected)["remote_port"] == 7


async def test_what_nobody_waits_for_is_told_so() -> None:
    metaserver = Metaserver()
    metaserver.expect("gone")
    metaserver.forget("gone")

    assert not metaserver.requested({"request_id": "gone"})
    assert not metaserver.requested({})
    assert len(metaserver) == 0


async def test_a_decoder_may_ask_twice() -> None:
    metaserver = Metaserver()
    expected = metaserver.expect("r")

    assert metaserver.requested({"request_id": "r", "remote_port": 1})
    assert metaserver.requested({"request_id": "r", "remote_port": 2})
    assert (await expected)["remote_port"] == 1
