"""One connection: batches, order, timeouts, loss. The server is a scripted one, except where it must be real."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import hiredis
import pytest

from statestore.connection import Connection
from statestore.endpoint import Endpoint
from statestore.errors import LeaseLostError, StoreConfigurationError, StoreError, StoreUnavailableError
from statestore.redis.calls import Calls
from statestore.replies import MovedElsewhereError, ScriptMissingError, reply_error

Answer = Callable[[list[bytes]], bytes | None]


class ScriptedServer:
    """Answers each command as told, and remembers what arrived in one piece."""

    def __init__(self) -> None:
        self.reads: list[list[list[bytes]]] = []
        self.writers: list[asyncio.StreamWriter] = []
        self.answer: Answer = lambda command: b"+OK\r\n"
        self.port = 0

    @property
    def commands(self) -> list[list[bytes]]:
        return [command for read in self.reads for command in read]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        parser = hiredis.Reader()
        while data := await reader.read(1 << 20):
            parser.feed(data)
            read = []
            while (command := parser.gets()) is not False:
                read.append(command)
            self.reads.append(read)
            for command in read:
                answer = self.answer(command)
                if answer is not None:
                    writer.write(answer)
        writer.close()

    def hang_up(self) -> None:
        for writer in self.writers:
            writer.close()


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    scripted = ScriptedServer()
    listener = await asyncio.start_server(scripted.serve, "127.0.0.1", 0)
    scripted.port = listener.sockets[0].getsockname()[1]
    yield scripted
    scripted.hang_up()
    listener.close()


@pytest.fixture
async def connect(server: ScriptedServer) -> AsyncIterator[Callable[..., Connection]]:
    """Makes connections to the scripted server and closes them in the end."""
    made = []

    def connection(*, password: str | None = None, **changes: object) -> Connection:
        async def resolve() -> Endpoint:
            return Endpoint(port=server.port, password=password)

        options = {"connect_timeout_s": 2.0, "command_timeout_s": 2.0} | changes
        made.append(Connection(resolve, **options))  # type: ignore[arg-type]
        return made[-1]

    yield connection
    for one in made:
        await one.close()


async def test_commands_of_one_turn_leave_in_one_write_after_the_first_and_are_answered_in_order(
    server: ScriptedServer, connect: Callable[..., Connection]
) -> None:
    connection = connect()
    await connection.connect()
    server.answer = lambda command: b"$%d\r\n%s\r\n" % (len(command[1]), command[1])
    server.reads.clear()

    answers = await asyncio.gather(*(_result(connection.command("ECHO", f"{number}")) for number in range(100)))

    assert answers == [b"%d" % number for number in range(100)]
    assert len(server.reads) <= 2


async def test_callers_that_come_while_it_connects_share_the_attempt(
    server: ScriptedServer, connect: Callable[..., Connection]
) -> None:
    connection = connect()

    await asyncio.gather(*(_result(connection.command("PING")) for _ in range(10)))

    assert len(server.writers) == 1


async def test_a_new_connection_greets_with_its_credentials(
    server: ScriptedServer, connect: Callable[..., Connection]
) -> None:
    await connect(password="secret").command("PING")

    assert [command[0] for command in server.commands] == [b"AUTH", b"CLIENT", b"PING"]


async def test_refused_credentials_are_an_error_of_configuration(
    server: ScriptedServer, connect: Callable[..., Connection]
) -> None:
    server.answer = lambda command: b"-WRONGPASS invalid username-password pair\r\n"

    with pytest.raises(StoreConfigurationError, match="password"):
        await connect(password="wrong").command("PING")


async def test_a_silent_server_is_given_up_and_everything_in_flight_fails(
    server: ScriptedServer, connect: Callable[..., Connection]
) -> None:
    connection = connect(command_timeout_s=0.1)
    await connection.connect()
    server.answer = lambda command: None

    results = await asyncio.wait_for(
        asyncio.gather(*(_result(connection.command("PING")) for _ in range(3)), return_exceptions=True), 5
    )

    assert [type(result) for result in results] == [StoreUnavailableError] * 3
    assert "does not answer in time" in str(results[0])
    assert not connection.connected


async def test_a_slow_call_may_have_a_timeout_of_its_own(
    server: ScriptedServer, connect: Callable[..., Connection]
) -> None:
    connection = connect(command_timeout_s=0.1)
    await connection.connect()
    server.answer = lambda command: None
    waiting = asyncio.ensure_future(connection.command("BZPOPMIN", "key", 1, timeout_s=30))

    await asyncio.sleep(0.4)
    server.writers[0].write(b"*-1\r\n")

    assert await asyncio.wait_for(waiting, 5) is None


async def test_a_lost_connection_fails_what_is_in_flight_and_the_next_call_connects_anew(
    server: ScriptedServer, connect: Callable[..., Connection]
) -> None:
    connection = connect()
    await connection.connect()
    answer, server.answer = server.answer, lambda command: None
    waiting = asyncio.ensure_future(connection.command("PING"))
    await asyncio.sleep(0.05)

    server.hang_up()
    with pytest.raises(StoreUnavailableError):
        await asyncio.wait_for(waiting, 5)
    server.answer = answer

    assert await connection.command("PING") == b"OK"
    assert len(server.writers) == 2


async def test_a_caller_that_gives_up_does_not_shift_the_answers_of_others(
    server: ScriptedServer, connect: Callable[..., Connection]
) -> None:
    connection = connect()
    await connection.connect()
    server.answer = lambda command: None
    leaver = asyncio.ensure_future(connection.command("ECHO", "first"))
    stayer = asyncio.ensure_future(connection.command("ECHO", "second"))
    await asyncio.sleep(0.05)

    leaver.cancel()
    server.writers[0].write(b"+first\r\n+second\r\n")

    assert await asyncio.wait_for(stayer, 5) == b"second"


async def test_garbage_from_the_server_ends_the_connection(
    server: ScriptedServer, connect: Callable[..., Connection]
) -> None:
    connection = connect()
    await connection.connect()
    server.answer = lambda command: b"HTTP/1.1 400 Bad Request\r\n\r\n"

    with pytest.raises(StoreUnavailableError):
        await asyncio.wait_for(_result(connection.command("PING")), 5)


async def test_a_reply_nobody_asked_for_ends_the_connection(
    server: ScriptedServer, connect: Callable[..., Connection]
) -> None:
    connection = connect()
    await connection.command("PING")

    server.writers[0].write(b"+surprise\r\n")

    async with asyncio.timeout(5):
        while connection.connected:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_server_that_takes_no_more_connections_is_away_and_says_what_to_do(valkey_url: str) -> None:
    first = Connection(_at(valkey_url), connect_timeout_s=2.0, command_timeout_s=2.0)
    refused = Connection(_at(valkey_url), connect_timeout_s=2.0, command_timeout_s=2.0)
    former = (await first.command("CONFIG", "GET", "maxclients"))[1]
    await first.command("CONFIG", "SET", "maxclients", 1)

    try:
        with pytest.raises(StoreUnavailableError, match="raise its maxclients"):
            await refused.command("PING")
    finally:
        await first.command("CONFIG", "SET", "maxclients", former)
        await asyncio.gather(first.close(), refused.close())


async def test_a_server_that_became_a_read_only_copy_is_left(
    server: ScriptedServer, connect: Callable[..., Connection]
) -> None:
    connection = connect()
    await connection.connect()
    server.answer = lambda command: b"-READONLY You can't write against a read only replica.\r\n"

    with pytest.raises(StoreUnavailableError, match="another server"):
        await connection.command("SET", "a", "b")
    await asyncio.sleep(0.05)

    assert not connection.connected


async def test_while_nobody_listens_calls_fail_at_once_between_attempts() -> None:
    attempts = 0

    async def resolve() -> Endpoint:
        nonlocal attempts
        attempts += 1
        return Endpoint(port=1)

    connection = Connection(resolve, connect_timeout_s=1.0, command_timeout_s=1.0)
    for _ in range(50):
        with pytest.raises(StoreUnavailableError, match="cannot connect"):
            await connection.command("PING")
    await connection.close()

    assert attempts < 5


async def test_a_kept_connection_comes_back_without_a_caller(
    server: ScriptedServer, connect: Callable[..., Connection]
) -> None:
    told = asyncio.Event()
    connection = connect(keep=True, on_connected=told.set)
    await connection.connect()
    await asyncio.wait_for(told.wait(), 5)
    told.clear()

    server.hang_up()

    await asyncio.wait_for(told.wait(), 5)
    assert connection.connected


async def test_pushes_do_not_take_the_answers_of_commands(
    server: ScriptedServer, connect: Callable[..., Connection]
) -> None:
    pushes: list[list[object]] = []
    connection = connect(on_push=pushes.append)
    await connection.connect()
    push = b"*3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$1\r\nm\r\n"
    subscribed, pong = b"*3\r\n$9\r\nsubscribe\r\n$1\r\nc\r\n:1\r\n", b"*2\r\n$4\r\npong\r\n$0\r\n\r\n"
    server.answer = lambda command: push + pong if command[0] == b"PING" else subscribed + push

    replies = asyncio.gather(connection.command("SUBSCRIBE", "c"), connection.command("PING"))

    assert await asyncio.wait_for(replies, 5) == [[b"subscribe", b"c", 1], [b"pong", b""]]
    assert pushes == [[b"message", b"c", b"m"]] * 2


@pytest.mark.parametrize("waiting", [2, 3])
async def test_at_the_limit_a_transaction_leaves_whole_or_not_at_all(
    valkey_url: str, monkeypatch: pytest.MonkeyPatch, waiting: int
) -> None:
    connection = Connection(_at(valkey_url), connect_timeout_s=2.0, command_timeout_s=2.0)
    calls = Calls(connection, {})
    await connection.connect()
    monkeypatch.setattr("statestore.wire.MAX_IN_FLIGHT", 3)

    others = [connection.command("PING") for _ in range(waiting)]
    together = await asyncio.gather(calls.together([("SET", "k", "v"), ("GET", "k")]), return_exceptions=True)
    await asyncio.gather(*others)
    kept = await connection.command("GET", "k")

    if waiting < 3:
        assert (together, kept) == ([[b"OK", b"v"]], b"v")
    else:
        assert (type(together[0]), kept) == (StoreUnavailableError, None)
    await connection.close()


def _at(url: str) -> Callable[[], Awaitable[Endpoint]]:
    async def resolve() -> Endpoint:
        return Endpoint(port=int(url.rpartition(":")[2].partition("/")[0]))

    return resolve


async def test_a_wire_that_was_lost_says_so(server: ScriptedServer, connect: Callable[..., Connection]) -> None:
    wire = await connect().connect()
    wire.connection_lost(None)

    for answers in ([wire.send(b"PING")], wire.send_together([b"MULTI", b"EXEC"])):
        with pytest.raises(StoreUnavailableError, match="connection to the store was lost"):
            await answers[0]


async def test_a_closed_connection_stays_closed(server: ScriptedServer, connect: Callable[..., Connection]) -> None:
    connection = connect()
    await connection.command("PING")
    await connection.close()

    with pytest.raises(StoreUnavailableError):
        await asyncio.sleep(0.01)
        await connection.command("PING")


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ("MOVED 3999 127.0.0.1:6381", MovedElsewhereError),
        ("ERR Error running script (call to f_1): @user_script:1: -READONLY You can't write", MovedElsewhereError),
        ("LOADING Redis is loading the dataset in memory", StoreUnavailableError),
        ("OOM command not allowed when used memory > 'maxmemory'.", StoreUnavailableError),
        ("ERR max number of clients reached", StoreUnavailableError),
        ("NOAUTH Authentication required.", StoreConfigurationError),
        ("NOPERM this user has no permissions to run the 'info' command", StoreConfigurationError),
        ("ERR The user executing the script can't run this command or subcommand script: f_1", StoreConfigurationError),
        ("ERR ACL failure in script: User fleet has no permissions to run the 'hset' command", StoreConfigurationError),
        ("NOSCRIPT No matching script.", ScriptMissingError),
        ("FENCED fence 7 is no longer the leader's", LeaseLostError),
        ("ERR unknown command 'FOO'", StoreError),
    ],
)
def test_error_replies_are_translated_once(message: str, error: type[StoreError]) -> None:
    assert type(reply_error(message)) is error


async def _result(awaitable: Awaitable[object]) -> object:
    return await awaitable
