"""A receiver for scaling decisions: checks their signature, and acts once on each.

    .venv/bin/python examples/scaling_webhook.py 9100 SECRET

and in the fleet's file, of a pool:

    autoscale: {max_instances: 4, actuator: webhook, webhook_url: "http://HOST:9100", webhook_secret: SECRET}

Replace `start_machines` and `stop_machines` by calls of your platform. A machine that was started enters the fleet with
`dualmap instances add`, or by `POST /admin/instances`.
"""

import hashlib
import hmac
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def start_machines(count: int) -> None:
    print(f"start {count} machines", flush=True)


def stop_machines(names: list[str]) -> None:
    print(f"stop {', '.join(names)}: they are empty", flush=True)


class Receiver(BaseHTTPRequestHandler):
    secret = b""
    done: set[str] = set()  # noqa: RUF012  # keep it in a database where more than one process receives

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        expected = "sha256=" + hmac.new(self.secret, body, hashlib.sha256).hexdigest()
        if not hmac.compare_digest(expected, self.headers.get("x-dualmap-signature", "")):
            return self.answer(401)
        key = self.headers["idempotency-key"]
        if key not in self.done:  # repetitions have the same key
            decision = json.loads(body)
            if decision["leaving"]:
                stop_machines(decision["leaving"])
            elif (missing := decision["wanted"] - decision["size"] - len(decision["starting"])) > 0:
                start_machines(missing)
            self.done.add(key)
        return self.answer(204)

    def answer(self, status: int) -> None:
        self.send_response(status)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    Receiver.secret = sys.argv[2].encode()
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Receiver).serve_forever()
