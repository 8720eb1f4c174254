"""Calls of one process over one connection."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import pytest
import redis
import uvloop
from redis.asyncio import ConnectionPool

from dualmap.statestore.embedded import EmbeddedValkey
from dualmap.statestore.errors import LeaseLostError, StoreConfigurationError, StoreError, StoreUnavailableError
from dualmap.statestore.keys import PoolKeys
from dualmap.statestore.pool.replies import ForbiddenError, TooLateError
from dualmap.statestore.pool.scripts import LIBRARY_PREFIX, NO_SCRIPTS, load_scripts
from dualmap.statestore.redis.servers import Servers
from dualmap.statestore.redis.wire import MOST_LIBRARIES, OwnClock, Wire, WireCalls
from tests.statestore.samples import SCHEDULING
from tests.statestore.scripted_server import Answer, ScriptedServer, connections_to, scripted_server
from tests.statestore.tls_front import Authority, tls_front

Connect = Callable[..., WireCalls]
SCRIPTS = load_scripts(SCHEDULING)
PING = b"*1\r\n$4\r\nPING\r\n"
TIME = b"*2\r\n$10\r\n1700000000\r\n$1\r\n0\r\n"


def replying(replies: Mapping[bytes, bytes]) -> Answer:
    """Reply to commands by their first word, and OK to all others."""
    return lambda command: replies.get(command[0], b"+OK\r\n")


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """Makes calls to a port of this machine, and closes them in the end."""
    made: list[WireCalls] = []

    def calls(port: int, timeout_s: float = 60.0, *, own_clock: OwnClock | None = lambda: 5, **login: Any) -> WireCalls:
        made.append(WireCalls(connections_to(port, login), SCRIPTS, timeout_s, own_clock))
        return made[-1]

    yield calls
    for one in made:
        await one.close()


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    async with scripted_server() as scripted:
        yield scripted


@pytest.fixture
def port(server_url: str) -> int:
    return urlsplit(server_url).port or 0


async def test_replies_are_as_the_server_sent_them(connect: Connect, port: int) -> None:
    calls = connect(port)
    await calls.command("HSET", b"hash", "field", 1, b"\x00", 1.5)

    assert await calls.command("HGETALL", "hash") == [b"field", b"1", b"\x00", b"1.5"]
    assert await calls.command("GET", "nothing") is None
    assert await calls.command("PING") == b"PONG"


@pytest.mark.parametrize("has_functions", [True, False])
async def test_a_script_runs_though_it_is_flushed_between_loading_and_running(
    connect: Connect, port: int, has_functions: bool
) -> None:
    calls = connect(port)
    with redis.Redis(port=port) as operator:
        if has_functions and int(operator.info("server")["redis_version"].partition(".")[0]) < 7:
            pytest.skip("no functions before Redis 7")
        command = calls.command

        async def forgetful(*arguments: Any) -> Any:
            reply = await command(*arguments)
            if arguments[1] == "LOAD":
                forget()
            return reply

        def forget() -> None:
            operator.script_flush()
            if has_functions:
                operator.function_flush()

        await calls.command("PING")  # connected: a new connection tries functions again
        calls._has_functions = has_functions
        calls.command = forgetful  # type: ignore[assignment]
        forget()

        observed = [await calls.script("observe_instances", b"p:{a}:", b"") for _ in range(2)]

    assert [sequence for _, _, sequence, *_ in observed] == [1, 2]


async def test_old_libraries_are_dropped_where_many_have_gathered(connect: Connect, port: int) -> None:
    with redis.Redis(port=port) as operator:
        if int(operator.info("server")["redis_version"].partition(".")[0]) < 7:
            pytest.skip("no functions before Redis 7")
        operator.function_flush()
        code = "redis.register_function('f{0}', function() return 1 end)"
        operator.function_load("#!lua name=strange\n" + code.format("strange"))
        for number in range(MOST_LIBRARIES + 1):
            operator.function_load(f"#!lua name={LIBRARY_PREFIX}{number}\n" + code.format(number))

        await connect(port).script("observe_instances", b"p:{a}:", b"")

        left = {each[b"library_name"].decode() for each in operator.execute_command("FUNCTION", "LIST")}
    assert left == {"strange", SCRIPTS.library_name}


async def test_a_server_without_functions_gets_scripts(connect: Connect, server: ScriptedServer) -> None:
    refusal = b"-ERR unknown command `FCALL`, with args beginning with: `observe_instances`\r\n"
    server.answer = replying({b"TIME": TIME, b"FCALL": refusal})
    calls = connect(server.port, own_clock=None)

    replies = [await calls.script("observe_instances", b"p:{a}:", b"") for _ in range(2)]

    assert replies == [b"OK", b"OK"]
    assert [command[0] for command in server.commands if command[0] in (b"FCALL", b"EVALSHA")] == [
        b"FCALL",
        b"EVALSHA",
        b"EVALSHA",
    ]


@pytest.mark.parametrize(
    "refused",
    [{b"FUNCTION": b"-NOPERM no permissions to run the 'function|load' command\r\n"}, {b"FCALL": b"-NOPERM no\r\n"}],
)
async def test_a_user_that_may_not_use_functions_gets_scripts(
    connect: Connect, server: ScriptedServer, refused: dict[bytes, bytes]
) -> None:
    server.answer = replying({b"TIME": TIME, b"FCALL": b"-ERR Function not found\r\n", **refused})
    calls = connect(server.port, own_clock=None)

    replies = [await calls.script("observe_instances", b"p:{a}:", b"") for _ in range(2)]

    assert replies == [b"OK", b"OK"]
    assert server.commands[-1][0] == b"EVALSHA"


@pytest.mark.parametrize("hours", [1, -1])
async def test_a_server_whose_clock_was_set_carries_calls_out(
    connect: Connect, server: ScriptedServer, hours: int
) -> None:
    """Set back, it may act for so much longer until its time is read again; set forward, it refuses and tells why."""
    clock_s = [1_700_000_000]

    def answer(command: list[bytes]) -> bytes:
        if command[0] == b"TIME":
            return b"*2\r\n$10\r\n%d\r\n$1\r\n0\r\n" % clock_s[0]
        if command[0] == b"FCALL" and int(command[4]) < clock_s[0] * 1000:
            return b"-LATE %d the caller gave this call up at %b\r\n" % (clock_s[0] * 1000, command[4])
        return b"+OK\r\n"

    server.answer = answer
    calls = connect(server.port, own_clock=None)
    for _ in range(2):
        assert await calls.script("observe_instances", b"p:{a}:", b"") == b"OK"
    clock_s[0] += hours * 3600
    replies = [await calls.script("observe_instances", b"p:{a}:", b"") for _ in range(2)]
    await calls.now_ms()
    await calls.script("observe_instances", b"p:{a}:", b"")

    sent = [command for command in server.commands if command[0] == b"FCALL"]
    assert replies == [b"OK", b"OK"]
    assert len(sent) == (6 if hours > 0 else 5), "refused once, and sent again"
    assert abs(int(sent[-1][4]) - clock_s[0] * 1000 - 60_000) < 30_000


async def test_a_script_that_is_too_late_for_its_caller_is_not_sent_again(
    connect: Connect, server: ScriptedServer
) -> None:
    def answer(command: list[bytes]) -> bytes:
        if command[0] == b"TIME":
            return TIME
        return b"-LATE 1700000900000 the caller gave this call up at %b\r\n" % command[-1]

    server.answer = answer
    with pytest.raises(TooLateError, match="LATE"):
        await connect(server.port, own_clock=None).script("observe_instances", b"p:{a}:", b"")

    assert sum(command[0] == b"FCALL" for command in server.commands) == 2


async def test_a_transaction_gives_all_results_or_the_first_error(connect: Connect, port: int) -> None:
    calls = connect(port)

    assert await calls.together([("SET", "k", "v"), ("GET", "k")]) == [b"OK", b"v"]
    with pytest.raises(StoreError, match="delete nothing"):
        await calls.together([("GET", "k"), ("HGETALL", "k"), ("GET", "k")])
    with pytest.raises(StoreError, match="NONSENSE"):
        await calls.together([("NONSENSE",), ("GET", "k")])
    assert await calls.command("GET", "k") == b"v"


async def test_a_transaction_that_is_given_up_leaves_the_replies_of_others_as_they_are(
    connect: Connect, port: int
) -> None:
    calls, logged = connect(port), list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, about: logged.append(about))
    await calls.command("SET", "k", "v")
    given_up = asyncio.ensure_future(calls.together([("NONSENSE",), ("GET", "k")]))
    await asyncio.sleep(0)

    given_up.cancel()

    with pytest.raises(asyncio.CancelledError):
        await given_up
    assert await calls.together([("GET", "k")]) == [b"v"]
    gc.collect()
    assert logged == [], "no refusal of it is left over"


async def test_transactions_of_many_callers_do_not_mix(connect: Connect, port: int) -> None:
    calls = connect(port)

    async def swap(value: str) -> Any:
        return await calls.together([("SET", "k", value), ("GET", "k")])

    results = await asyncio.gather(*(swap(f"{number}") for number in range(50)))

    assert [result[1] for result in results] == [b"%d" % number for number in range(50)]


async def test_refused_credentials_are_an_error_of_configuration(connect: Connect, server: ScriptedServer) -> None:
    server.answer = lambda command: b"-WRONGPASS invalid username-password pair\r\n"

    with pytest.raises(StoreConfigurationError, match="refuses the user or password"):
        await connect(server.port, password="wrong").command("PING")


async def test_a_password_that_changed_is_refused_until_it_is_put_right(connect: Connect) -> None:
    with EmbeddedValkey() as own, redis.Redis.from_url(own.url) as operator:
        calls = connect(urlsplit(own.url).port or 0, password="sesame")
        operator.config_set("requirepass", "sesame")
        operator.auth("sesame")
        assert await calls.command("PING") == b"PONG"

        operator.config_set("requirepass", "changed")
        operator.client_kill_filter(_type="normal", skipme=True)
        async with asyncio.timeout(60):
            with pytest.raises(StoreConfigurationError, match="refuses the user or password"):
                while True:
                    await _or_away(calls)

        operator.config_set("requirepass", "sesame")
        async with asyncio.timeout(60):
            while True:
                try:
                    assert await calls.command("PING") == b"PONG"
                    break
                except StoreError:
                    await asyncio.sleep(0.01)


async def _or_away(calls: WireCalls) -> None:
    try:
        await calls.command("PING")
    except StoreUnavailableError:  # the connection was killed
        await asyncio.sleep(0.01)


async def test_a_silent_server_is_given_up(connect: Connect, server: ScriptedServer) -> None:
    calls = connect(server.port, timeout_s=0.1)
    await calls.command("PING")
    answer, server.answer = server.answer, lambda command: None

    with pytest.raises(StoreUnavailableError, match="does not answer in time"):
        await asyncio.wait_for(_result(calls.command("PING")), 60)

    server.answer = answer
    assert await calls.command("PING") == b"OK"
    assert len(server.writers) == 2


async def test_after_a_lost_connection_the_next_call_connects_again(connect: Connect, server: ScriptedServer) -> None:
    calls = connect(server.port)
    await calls.command("PING")
    answer, server.answer = server.answer, lambda command: None
    waiting = asyncio.ensure_future(_result(calls.command("PING")))
    async with asyncio.timeout(60):
        while server.commands[-2:] != [[b"PING"]] * 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    server.hang_up()
    with pytest.raises(StoreUnavailableError, match="connection to the store was lost"):
        await asyncio.wait_for(waiting, 60)
    server.answer = answer

    assert await calls.command("PING") == b"OK"
    assert len(server.writers) == 2


async def test_a_connection_that_was_lost_unused_is_made_again_unnoticed(
    connect: Connect, server: ScriptedServer
) -> None:
    calls = connect(server.port)
    await calls.command("PING")
    server.hang_up()
    await asyncio.sleep(0.05)

    assert await calls.command("PING") == b"OK"


async def test_a_caller_that_gives_up_does_not_shift_the_answers_of_others(
    connect: Connect, server: ScriptedServer
) -> None:
    calls = connect(server.port)
    server.answer = lambda command: b"+%b\r\n" % command[-1]
    await calls.command("ECHO", "zero")
    leaver = asyncio.ensure_future(_result(calls.command("ECHO", "first")))
    stayer = asyncio.ensure_future(_result(calls.command("ECHO", "second")))
    await asyncio.sleep(0)

    leaver.cancel()

    assert await asyncio.wait_for(stayer, 60) == b"second"
    assert await calls.command("ECHO", "third") == b"third"


@pytest.mark.parametrize(
    "reply", [b"-READONLY You can't write against a read only replica.", b"-MOVED 3999 127.0.0.1:6381"]
)
async def test_a_server_that_others_took_over_from_is_left(
    connect: Connect, server: ScriptedServer, reply: bytes
) -> None:
    calls = connect(server.port)
    await calls.command("PING")
    answer, server.answer = server.answer, lambda command: reply + b"\r\n"

    with pytest.raises(StoreUnavailableError, match="another server"):
        await calls.command("SET", "a", "b")
    server.answer = answer
    await asyncio.sleep(0.05)

    await calls.command("PING")
    assert len(server.writers) == 2


@pytest.mark.parametrize(
    ("reply", "error", "says"),
    [
        (b"-LOADING Redis is loading the dataset in memory", StoreUnavailableError, "refuses calls"),
        (b"-MASTERDOWN Link with MASTER is down", StoreUnavailableError, "refuses calls"),
        (b"-OOM command not allowed when used memory > 'maxmemory'.", StoreUnavailableError, "raise its maxmemory"),
        (b"-BUSY Redis is busy running a script.", StoreUnavailableError, "refuses calls"),
        (b"-MISCONF Redis is configured to save RDB snapshots", StoreUnavailableError, "refuses calls"),
        (b"-NOPERM this user has no permissions to run the 'x' command", ForbiddenError, "too little"),
        (b"-NOAUTH Authentication required.", StoreConfigurationError, "check user and password"),
        (b"-FENCED fence 7 is no longer the leader's", LeaseLostError, "^fence 7 is no longer the leader's$"),
        (b"-ERR unknown command 'FOO'", StoreError, "could not run a command: ERR unknown command"),
    ],
)
async def test_an_error_reply_is_an_error_of_the_store(
    connect: Connect, server: ScriptedServer, reply: bytes, error: type[StoreError], says: str
) -> None:
    calls = connect(server.port)
    await calls.command("PING")
    server.answer = lambda command: reply + b"\r\n"

    with pytest.raises(error, match=says) as caught:
        await calls.command("FOO")

    assert type(caught.value) is error


@pytest.fixture
async def shared(server: ScriptedServer) -> AsyncIterator[WireCalls]:
    made = WireCalls(server.connections({"password": "secret"}), NO_SCRIPTS, 2.0)
    yield made
    await made.close()


async def test_callers_that_come_while_it_connects_share_the_attempt(server: ScriptedServer, shared: WireCalls) -> None:
    await asyncio.gather(*(shared.command("PING") for _ in range(10)))

    assert [command[0] for command in server.commands] == [b"AUTH", b"CLIENT"] + [b"PING"] * 10


async def test_a_caller_that_gives_up_does_not_take_the_attempt_from_the_others(
    server: ScriptedServer, shared: WireCalls
) -> None:
    leaver, stayer = (asyncio.ensure_future(shared.command("PING")) for _ in range(2))
    await asyncio.sleep(0)

    leaver.cancel()

    assert await asyncio.wait_for(stayer, 60) == b"OK"


async def test_once_closed_it_stays_closed(server: ScriptedServer, shared: WireCalls) -> None:
    await shared.command("PING")
    await shared.close()

    with pytest.raises(StoreUnavailableError):
        await asyncio.sleep(0.01)
        await shared.command("PING")


@pytest.mark.parametrize("waiting", [2, 3])
async def test_at_the_limit_a_transaction_leaves_whole_or_not_at_all(
    server_url: str, monkeypatch: pytest.MonkeyPatch, waiting: int
) -> None:
    calls = WireCalls(connections_to(int(server_url.rpartition(":")[2].partition("/")[0])), NO_SCRIPTS, 2.0)
    await calls.command("PING")
    monkeypatch.setattr("dualmap.statestore.redis.wire.MAX_IN_FLIGHT", 3)

    others = [calls.command("PING") for _ in range(waiting)]
    together = await asyncio.gather(calls.together([("SET", "k", "v"), ("GET", "k")]), return_exceptions=True)
    await asyncio.gather(*others)
    kept = await calls.command("GET", "k")

    if waiting < 3:
        assert (together, kept) == ([[b"OK", b"v"]], b"v")
    else:
        assert (type(together[0]), kept) == (StoreUnavailableError, None)
    await calls.close()


async def test_a_call_that_waits_at_the_server_may_have_a_timeout_of_its_own(server: ScriptedServer) -> None:
    calls = WireCalls(server.connections(), NO_SCRIPTS, 0.1)
    await calls.command("PING")
    server.answer = lambda command: None
    waiting = asyncio.ensure_future(calls.command("BZPOPMIN", "key", 1, timeout_s=30))

    await asyncio.sleep(0.3)
    server.writers[0].write(b"*-1\r\n")

    assert await asyncio.wait_for(waiting, 60) is None
    await calls.close()


async def test_one_who_hangs_up_loses_what_is_in_flight_and_connects_again(
    server: ScriptedServer, shared: WireCalls
) -> None:
    await shared.command("PING")
    answer, server.answer = server.answer, lambda command: None
    waiting = asyncio.ensure_future(shared.command("BZPOPMIN", "key", 1))

    shared.hang_up()

    with pytest.raises(StoreUnavailableError):
        await asyncio.wait_for(waiting, 60)
    server.answer = answer
    assert await shared.command("PING") == b"OK"
    assert len(server.writers) == 2


async def _result(awaitable: Any) -> Any:
    return await awaitable


# one connection ---------------------------------------------------------------------------------------------
@pytest.fixture
async def wire(server: ScriptedServer) -> AsyncIterator[Wire]:
    """To the scripted server, which has seen nothing yet but the greeting."""
    opened = await Wire.open(server.connections(), 0.1)
    server.reads.clear()
    yield opened
    opened.abort()


async def until_lost(wire: Wire) -> None:
    async with asyncio.timeout(60):
        while wire.is_connected:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_commands_of_one_turn_leave_in_one_write_after_the_first_and_are_answered_in_order(
    server: ScriptedServer, wire: Wire
) -> None:
    server.answer = lambda command: b"$%d\r\n%s\r\n" % (len(command[1]), command[1])

    answers = await asyncio.gather(*(wire.send(b"*2\r\n$4\r\nECHO\r\n$2\r\n%d\r\n" % n) for n in range(10, 99)))

    assert answers == [b"%d" % number for number in range(10, 99)]
    assert len(server.reads) <= 2


async def test_a_silent_server_is_given_up_and_everything_in_flight_fails(server: ScriptedServer, wire: Wire) -> None:
    server.answer = lambda command: None

    results = await asyncio.wait_for(asyncio.gather(*(wire.send(PING) for _ in range(3)), return_exceptions=True), 60)

    assert [type(result) for result in results] == [StoreUnavailableError] * 3
    assert "does not answer in time" in str(results[0])
    assert not wire.is_connected


async def test_a_lost_connection_fails_what_is_in_flight(server: ScriptedServer, wire: Wire) -> None:
    server.answer = lambda command: None
    waiting = wire.send(PING)

    server.hang_up()

    with pytest.raises(StoreUnavailableError, match="connection to the store was lost"):
        await asyncio.wait_for(waiting, 60)
    with pytest.raises(StoreUnavailableError, match="connection to the store was lost"):
        await wire.send(PING)


async def test_one_that_gives_up_leaves_the_other_its_own_answer_though_both_come_at_once(
    server: ScriptedServer, wire: Wire
) -> None:
    server.answer = lambda command: None
    leaver, stayer = wire.send(PING), wire.send(PING)

    leaver.cancel()
    server.writers[0].write(b"+first\r\n+second\r\n")

    assert await asyncio.wait_for(stayer, 60) == b"second"


async def test_garbage_from_the_server_ends_the_connection(server: ScriptedServer, wire: Wire) -> None:
    server.answer = lambda command: b"HTTP/1.1 400 Bad Request\r\n\r\n"

    with pytest.raises(StoreUnavailableError):
        await asyncio.wait_for(wire.send(PING), 60)


async def test_a_reply_nobody_asked_for_ends_the_connection(server: ScriptedServer, wire: Wire) -> None:
    server.writers[0].write(b"+surprise\r\n")

    await until_lost(wire)


async def test_a_server_that_became_a_read_only_copy_is_left(server: ScriptedServer, wire: Wire) -> None:
    server.answer = lambda command: b"-READONLY You can't write against a read only replica.\r\n"

    with pytest.raises(StoreUnavailableError, match="another server"):
        await wire.send(PING)

    await until_lost(wire)


class OneConnection:
    """A pool of one connection, that is open already."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def make_connection(self) -> Any:
        return self._connection


async def test_a_connection_that_ends_before_it_is_taken_over_is_lost(server: ScriptedServer) -> None:
    connection = server.connections().make_connection()
    await connection.connect()
    server.hang_up()
    async with asyncio.timeout(60):
        while not connection._reader.at_eof():  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    wire = await Wire.open(cast(ConnectionPool, OneConnection(connection)), 0.1)

    assert not wire.is_connected


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_connections_are_taken_over_on_either_event_loop_with_tls_and_without(
    run: Callable[[Coroutine[None, None, None]], None], server_url: str, tmp_path: Path
) -> None:
    authority, port = Authority(tmp_path), int(server_url.rpartition(":")[2].partition("/")[0])
    keys = PoolKeys("dualmap", "default")

    async def ping_by(url: str) -> None:
        wire = await Wire.open(Servers(url, 5.0).connections(keys), 5.0)
        assert await asyncio.gather(wire.send(PING), wire.send(PING)) == [b"PONG", b"PONG"]
        wire.abort()
        await until_lost(wire)

    async def ping_both() -> None:
        await ping_by(f"redis://127.0.0.1:{port}")
        async with tls_front(authority.server("127.0.0.1"), port) as front:
            await ping_by(f"rediss://127.0.0.1:{front}?ssl_ca_certs={authority.file}")

    run(ping_both())
