"""Commands that talk to a replica: what they send, and how they fail."""

from __future__ import annotations

import argparse

import pytest

from dualmap.cli.admin_api import AdminApi, endpoint, operation
from dualmap.cli.errors import CommandError
from dualmap.cli.main import main
from dualmap.cli.settings import Settings
from tests.cli.scripted_replica import Replica, error


def test_adding_sends_the_description_and_the_admin_key(replica: Replica) -> None:
    replica.answers = [(201, {"id": "npu-1"})]

    code = main(
        ["instances", "add", "npu-1", "http://npu:8000", "--kv-capacity-tokens", "5", "--url", f"{replica.url}/v1",
         "--router.admin_key", "boss"]
    )  # fmt: skip

    assert code == 0
    assert replica.asked == [
        (
            "POST",
            "/admin/instances",
            "Bearer boss",
            {"id": "npu-1", "url": "http://npu:8000", "role": "mixed", "pool": None, "kv_capacity_tokens": 5},
        )
    ]


def test_an_instance_may_be_added_with_a_queue_of_its_own_and_what_is_hardly_meant_is_told(
    replica: Replica, capsys: pytest.CaptureFixture[str]
) -> None:
    replica.answers = [(201, {"id": "b", "warning": "'a' has the URL already"})]
    words = ["instances", "add", "b", "http://npu:8000", "--max-queued-requests", "7", "--url", replica.url]
    assert main(words) == 0

    assert isinstance(body := replica.asked[0][3], dict)
    assert body["max_queued_requests"] == 7
    assert "warning: 'a' has the URL already" in capsys.readouterr().err


def test_a_refusal_is_shown_in_the_replicas_words(replica: Replica, capsys: pytest.CaptureFixture[str]) -> None:
    replica.answers = [(409, error("instance 'x' is still busy"))]
    assert main(["instances", "drain", "x", "--url", replica.url]) == 1
    assert capsys.readouterr().err == "dualmap instances: instance 'x' is still busy\n"


@pytest.mark.parametrize("status", [400, 422])
def test_a_word_that_the_replica_refuses_is_a_wrong_word(
    status: int, replica: Replica, capsys: pytest.CaptureFixture[str]
) -> None:
    replica.answers = [(status, error("url: must be http://HOST:PORT"))]
    assert main(["instances", "add", "x", "y", "--url", replica.url]) == 2
    assert capsys.readouterr().err == "dualmap instances: url: must be http://HOST:PORT\n"


def test_an_unknown_instance_is_a_wrong_word_and_the_one_that_may_be_meant_is_named(
    replica: Replica, capsys: pytest.CaptureFixture[str]
) -> None:
    known = {"instances": [{"id": "instance-1"}, {"id": "other"}]}
    replica.answers = [(404, error("pool 'default' has no instance 'instnce-1'")), (200, known)]
    assert main(["instances", "drain", "instnce-1", "--url", replica.url]) == 2
    said = capsys.readouterr().err
    assert said == "dualmap instances: pool 'default' has no instance 'instnce-1'; did you mean instance-1?\n"


def test_a_suggestion_that_cannot_be_made_does_not_hide_the_error(
    replica: Replica, capsys: pytest.CaptureFixture[str]
) -> None:
    replica.answers = [(404, error("pool 'default' has no instance 'x'")), (500, error("no"))]
    assert main(["instances", "drain", "x", "--url", replica.url]) == 2
    assert capsys.readouterr().err == "dualmap instances: pool 'default' has no instance 'x'\n"


def test_a_request_that_no_replica_remembers_is_no_wrong_word(
    replica: Replica, capsys: pytest.CaptureFixture[str]
) -> None:
    replica.answers = [(404, error("no replica remembers request 'x'"))]
    assert main(["explain", "x", "--url", replica.url]) == 1
    assert capsys.readouterr().err == "dualmap explain: no replica remembers request 'x'\n"


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "foo", "localhost:8000/v1", "ftp://127.0.0.1:8000"])
@pytest.mark.parametrize("words", [["explain"], ["tenants", "list"], ["usage"], ["settings", "fleet"]])
def test_a_url_without_its_protocol_is_a_wrong_word(
    words: list[str], url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--url", url]) == 2
    assert f"--url needs http:// or https:// in front: http://{url.removeprefix('ftp://')}\n" in capsys.readouterr().err


def test_a_missing_key_says_which_setting_helps(replica: Replica, capsys: pytest.CaptureFixture[str]) -> None:
    replica.answers = [(401, error("send the admin key"))]
    assert main(["instances", "list", "--url", replica.url]) == 1
    said = capsys.readouterr().err
    assert "DUALMAP_ROUTER__ADMIN_KEY" in said
    assert "router.admin_key in --config FILE" in said


def test_removing_asks_again_while_the_instance_is_busy(replica: Replica) -> None:
    replica.answers = [(409, error("still busy")), (409, error("still busy")), (204, None)]
    assert main(["instances", "remove", "a/b", "--pool", "p", "--url", replica.url]) == 0
    assert [asked[:2] for asked in replica.asked] == [("DELETE", "/admin/instances/a%2Fb?pool=p")] * 3


def test_removing_gives_up_in_time_with_the_replicas_reason(
    replica: Replica, capsys: pytest.CaptureFixture[str]
) -> None:
    replica.answers = [(409, error("2 running requests left"))]
    assert main(["instances", "remove", "a", "--timeout-s", "0", "--url", replica.url]) == 1
    assert "2 running requests left" in capsys.readouterr().err


def test_a_router_that_is_not_there_is_named_with_the_way_to_name_another() -> None:
    api = AdminApi(argparse.Namespace(url="http://127.0.0.1:1", pool=None), Settings())
    with pytest.raises(CommandError, match=r"no router answers at http://127\.0\.0\.1:1 .*--url"):
        api.call("GET", "/instances")


def test_a_server_that_is_no_router_is_told_from_one_that_lacks_the_instance(replica: Replica) -> None:
    replica.answers = [(404, {"detail": "Not Found"})]
    with pytest.raises(CommandError, match=r"no router .*--url"):
        AdminApi(argparse.Namespace(url=replica.url, pool=None), Settings()).call("GET", "/instances")


def test_the_endpoint_is_reachable_from_here_wherever_the_router_listens() -> None:
    listening = Settings.model_validate({"router": {"host": "0.0.0.0", "port": 9000}})
    assert endpoint(listening) == "http://127.0.0.1:9000"


def test_an_endpoint_with_tls_is_operated_by_its_own_port() -> None:
    tls = {"tls_certificate": "/c", "tls_key": "/k"}
    alone, own = (Settings(router={"port": 9000, **tls, **more}) for more in ({}, {"ops_port": 9001}))

    assert endpoint(alone) == endpoint(own) == "https://127.0.0.1:9000"
    assert operation(alone) == "https://127.0.0.1:9000" and operation(own) == "http://127.0.0.1:9001"


def test_a_request_that_is_live_elsewhere_is_told_by_its_record(
    replica: Replica, capsys: pytest.CaptureFixture[str]
) -> None:
    replica.answers = [
        (200, {"request_id": "r", "replica_id": "b", "record": {"state": "held"}, "note": "its replica is silent"})
    ]
    assert main(["explain", "r/1", "--url", replica.url]) == 0
    assert replica.asked[0][1] == "/admin/explain/r%2F1"
    told = capsys.readouterr().out
    assert "its replica is silent" in told
    assert "state: held" in told
