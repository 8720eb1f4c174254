"""A replica in place of a peer, for the time of a test."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from email.message import Message
from http.server import BaseHTTPRequestHandler, HTTPServer

import orjson


@contextlib.contextmanager
def peer_server(answer: Callable[[str, Message], tuple[int, bytes]]) -> Iterator[str]:
    """The URL of a server that answers a path and header fields with this status and body."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answer(self.path, self.headers)
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


def answering(content: object) -> contextlib.AbstractContextManager[str]:
    """The URL of a server that answers everything with this JSON."""
    return peer_server(lambda *_: (200, orjson.dumps(content)))
