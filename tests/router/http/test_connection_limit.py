"""Connections are counted by the port they came to."""

from __future__ import annotations

from typing import Any

import pytest

from dualmap.router.http.connection_limit import MAX_OPS_CONNECTIONS, connection_limit_finder


class Transport:
    def __init__(self, sockname: Any) -> None:
        self._sockname = sockname

    def get_extra_info(self, _: str) -> Any:
        return self._sockname


@pytest.mark.parametrize(
    ("ops_port", "sockname", "limit"),
    [
        (None, ("10.0.0.1", 8000), 7),
        (9000, ("10.0.0.1", 8000), 7),
        (9000, ("10.0.0.1", 9000), MAX_OPS_CONNECTIONS),
        (9000, ("::1", 9000, 0, 0), MAX_OPS_CONNECTIONS),
        (9000, None, 7),
    ],
)
def test_a_connection_counts_where_it_came_in(ops_port: int | None, sockname: Any, limit: int) -> None:
    find = connection_limit_finder(7, ops_port)

    found = find(Transport(sockname))

    assert found.max_connections == limit
    assert find(Transport(sockname)) is found, "one count for all connections"
