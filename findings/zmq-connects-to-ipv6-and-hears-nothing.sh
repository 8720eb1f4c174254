#!/bin/sh
# pyzmq 27.1.0 from PyPI: a subscriber of KV events in a cluster of IPv6 addresses.
#
# Guess: `connect("tcp://[::1]:PORT")` works as with every other library; if not, it raises, as `bind` does.
# Seen: sockets are IPv4 alone unless the option `zmq.IPV6` is set. `bind` to such an address raises "No such device";
# `connect` returns without an exception, and nothing ever arrives. With the option set, the same subscriber hears
# all.
# For users: on IPv6 and dual-stack clusters the index of an engine's blocks stays empty and looks as if the engine
# had sent no events. The fleet sets the option on every socket (docs/operate/kv-events.md).
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv" && "$folder/venv/bin/pip" install -q --disable-pip-version-check pyzmq==27.1.0 || exit 2
"$folder/venv/bin/python" - <<'PROGRAM'
import socket
import zmq

try:
    socket.create_server(("::1", 0), family=socket.AF_INET6).close()
except OSError as error:
    print(f"this machine has no IPv6: {error}")
    raise SystemExit(2)
context = zmq.Context()
try:
    context.socket(zmq.PUB).bind("tcp://[::1]:*")
    bound = "works"
except zmq.ZMQError as error:
    bound = error.strerror.split(" (")[0]
print(f"bind without the option: {bound}")
publisher = context.socket(zmq.PUB)
publisher.setsockopt(zmq.IPV6, 1)
port = publisher.bind_to_random_port("tcp://[::1]")
subscribers = {}
for option in (0, 1):
    subscribers[option] = context.socket(zmq.SUB)
    subscribers[option].setsockopt(zmq.IPV6, option)
    subscribers[option].subscribe(b"")
    subscribers[option].connect(f"tcp://[::1]:{port}")
    print(f"connect with IPV6={option}: no exception")
for _ in range(100):  # until the one with the option has joined
    publisher.send(b"event")
    if subscribers[1].poll(100):
        break
heard = {option: bool(subscriber.poll(1000)) for option, subscriber in subscribers.items()}
print(f"heard an event, by option: {heard}")
context.destroy(linger=0)
raise SystemExit(0 if bound == "No such device" and heard == {0: False, 1: True} else 1)
PROGRAM
