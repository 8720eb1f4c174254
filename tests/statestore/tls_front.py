"""TLS in front of a server that speaks none: the embedded Valkey is built without it."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import trustme


class Authority:
    """A private certificate authority, its certificate in a file."""

    def __init__(self, folder: Path) -> None:
        self._authority = trustme.CA()
        self.file = folder / "ca.pem"
        self._authority.cert_pem.write_to_path(self.file)

    def server(self, *names: str, wants_certificates: bool = False) -> ssl.SSLContext:
        """A server's side: it has a certificate for these names, and may want one of its clients."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._authority.issue_cert(*names).configure_cert(context)
        if wants_certificates:
            context.verify_mode = ssl.CERT_REQUIRED
            self._authority.configure_trust(context)
        return context

    def client_certificate(self, file: Path) -> Path:
        """Certificate and key in one file."""
        self._authority.issue_cert("fleet").private_key_and_cert_chain_pem.write_to_path(file)
        return file


@contextlib.asynccontextmanager
async def tls_front(
    context: ssl.SSLContext, port: int, *, own_port: int = 0, cuts_off: bool = False
) -> AsyncIterator[int]:
    """A port of this machine that passes on to ``port`` what arrives by TLS. At the end its callers have hung up, or
    are cut off."""

    serving: set[asyncio.Task[None] | None] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.add(asyncio.current_task())
        with contextlib.suppress(OSError), contextlib.closing(writer):
            behind_reader, behind_writer = await asyncio.open_connection("127.0.0.1", port)
            passing = {asyncio.create_task(_pass(*way)) for way in ((reader, behind_writer), (behind_reader, writer))}
            try:
                await asyncio.wait(passing, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for each in passing:
                    each.cancel()
                behind_writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", own_port, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        if cuts_off:
            for each in filter(None, serving):
                each.cancel()
        await asyncio.gather(*filter(None, serving), return_exceptions=cuts_off)


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
