from __future__ import annotations

from dualmap.router.requests.metaserver import Metaserver


async def test_a_decoder_finds_its_leg_by_the_token_in_the_url_alone() -> None:
    metaserver = Metaserver()
    metaserver.base_url = "http://replica:9000"
    call = metaserver.expect()

    assert call.url == f"http://replica:9000/kv/metaserver/{call.token}"
    assert metaserver.requested(call.token, {"request_id": "anything", "remote_port": 7})
    assert (await call.params)["remote_port"] == 7


async def test_a_request_id_leads_to_no_leg() -> None:
    metaserver = Metaserver()
    call = metaserver.expect()

    for guess in ("r-1", "", "chatcmpl-r-1", call.token[:-1], call.token + "A", call.token.swapcase()):
        assert not metaserver.requested(guess, {"request_id": "r-1", "remote_host": "evil"})
    assert not call.params.done()


async def test_each_leg_has_a_token_of_its_own_that_cannot_be_guessed() -> None:
    metaserver = Metaserver()
    tokens = {metaserver.expect().token for _ in range(100)}

    assert len(tokens) == 100
    assert min(map(len, tokens)) >= 22  # 128 bits


async def test_a_token_is_of_no_use_once_its_leg_has_ended() -> None:
    metaserver = Metaserver()
    call = metaserver.expect()
    metaserver.forget(call)

    assert not metaserver.requested(call.token, {"remote_port": 1})
    assert len(metaserver) == 0


async def test_the_first_post_counts_and_another_one_is_refused() -> None:
    metaserver = Metaserver()
    call = metaserver.expect()

    assert metaserver.requested(call.token, {"remote_port": 1})
    assert not metaserver.requested(call.token, {"remote_port": 2})
    assert (await call.params)["remote_port"] == 1


async def test_a_decoder_that_lost_the_answer_may_repeat_its_post() -> None:
    metaserver = Metaserver()
    call = metaserver.expect()

    assert metaserver.requested(call.token, {"remote_port": 1})
    assert metaserver.requested(call.token, {"remote_port": 1})
