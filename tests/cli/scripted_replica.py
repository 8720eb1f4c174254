"""A replica that answers as a test says."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, HTTPServer


class Replica(HTTPServer):
    """Answers every request with what the test put in, and remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[str, str, str | None, object]] = []
        self.answers: list[tuple[int, object]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Replica

    def handle_any(self) -> None:
        length = int(self.headers.get("content-length", 0))
        body = json.loads(self.rfile.read(length)) if length else None
        self.server.asked.append((self.command, self.path, self.headers.get("authorization"), body))
        status, answer = self.server.answers.pop(0)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(b"" if answer is None else json.dumps(answer).encode())

    do_GET = do_POST = do_PATCH = do_DELETE = handle_any  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass


def error(message: str) -> dict[str, object]:
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": "x"}}
