"""Addresses of instances as gateways know them."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from dualmap.router.picker.addresses import KEPT_S, Addresses, UnknownAddressError
from tests.router.tools import spec
from tests.support.manual_clock import ManualClock


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://10.0.0.1:8000", "10.0.0.1:8000"),
        ("http://10.0.0.1", "10.0.0.1:80"),
        ("https://10.0.0.1", "10.0.0.1:443"),
        ("http://[2001:db8::1]:8000/base", "[2001:db8::1]:8000"),
    ],
)
async def test_the_address_of_a_url_is_its_host_and_port(url: str, address: str) -> None:
    assert await Addresses(ManualClock()).of(spec("a", url=url)) == address


async def test_a_name_is_resolved_once_in_a_while_and_keeps_its_address_where_that_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, asked = ManualClock(), []
    answers: list[Any] = ["10.0.0.7", "10.0.0.8", OSError("no name server")]

    async def resolve(host: str, port: int, **_: Any) -> list[Any]:
        asked.append(host)
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        v6 = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", port, 0, 0))
        return [v6, (socket.AF_INET, socket.SOCK_STREAM, 6, "", (answer, port))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve, raising=False)
    addresses, named = Addresses(clock), spec("a", url="http://vllm-0.pods:8000")

    assert [await addresses.of(named) for _ in range(2)] == ["10.0.0.7:8000"] * 2
    clock.jump(KEPT_S + 1)
    assert await addresses.of(named) == "10.0.0.8:8000"
    clock.jump(KEPT_S + 1)
    assert await addresses.of(named) == "10.0.0.8:8000"
    assert len(asked) == 3


async def test_a_name_without_an_address_is_an_error() -> None:
    with pytest.raises(UnknownAddressError, match="nowhere"):
        await Addresses(ManualClock()).of(spec("a", url="http://nowhere.invalid:8000"))


async def test_members_are_found_by_address_or_by_host_and_several_ranks_at_one() -> None:
    members = {
        "r0": spec("r0", url="http://10.0.0.1:8000", data_parallel_rank=0),
        "r1": spec("r1", url="http://10.0.0.1:8000", data_parallel_rank=1),
        "b": spec("b", url="http://10.0.0.2:8000"),
        "lost": spec("lost", url="http://nowhere.invalid:8000"),
    }
    found = await Addresses(ManualClock()).having(members, ["10.0.0.1:8000", "10.0.0.2", "10.9.9.9:1"])
    assert found == {"10.0.0.1:8000": ["r0", "r1"], "10.0.0.2": ["b"], "10.9.9.9:1": []}
