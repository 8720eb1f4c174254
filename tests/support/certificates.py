"""Certificates of a private authority, in files that are renewed as Kubernetes does it."""

from __future__ import annotations

import datetime
import socket
import ssl
import threading
from dataclasses import dataclass
from pathlib import Path

import trustme


@dataclass(frozen=True)
class Mounted:
    """The files of a Secret, behind links that are swapped at once."""

    folder: Path

    @property
    def certificate(self) -> Path:
        return self.folder / "tls.crt"

    @property
    def key(self) -> Path:
        return self.folder / "tls.key"

    @property
    def ca(self) -> Path:
        return self.folder / "ca.crt"

    def renew(self, issued: trustme.LeafCert, ca: trustme.CA | None = None, *, key: bytes | None = None) -> None:
        """Exchange the files for those of another certificate; ``key`` is another one than its own."""
        chain = b"".join(pem.bytes() for pem in issued.cert_chain_pems)
        contents = {"tls.crt": chain, "tls.key": issued.private_key_pem.bytes() if key is None else key}
        if ca is not None:
            contents["ca.crt"] = ca.cert_pem.bytes()
        elif self.ca.exists():
            contents["ca.crt"] = self.ca.read_bytes()
        version = self.folder / f"..{len(list(self.folder.iterdir()))}"
        version.mkdir(parents=True)
        for name, content in contents.items():
            (version / name).write_bytes(content)
        (self.folder / "..next").symlink_to(version.name)
        (self.folder / "..next").replace(self.folder / "..data")
        for name in contents:
            if not (self.folder / name).is_symlink():
                (self.folder / name).symlink_to(f"..data/{name}")


def mounted(folder: Path, issued: trustme.LeafCert, ca: trustme.CA | None = None) -> Mounted:
    folder.mkdir()
    files = Mounted(folder)
    files.renew(issued, ca)
    return files


def client_tls(ca: trustme.CA, issued: trustme.LeafCert | None = None) -> ssl.SSLContext:
    """A client's context, with the certificate that it shows."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    ca.configure_trust(context)
    if issued is not None:
        issued.configure_cert(context)
    return context


def expired(ca: trustme.CA, *names: str) -> trustme.LeafCert:
    return ca.issue_cert(*names, not_after=datetime.datetime(2020, 1, 2, 3, 4, 5, tzinfo=datetime.UTC))


def handshake(server: ssl.SSLContext, client: ssl.SSLContext, name: str = "fleet.example") -> bytes | None:
    """The server's certificate if both agree, and the server hears the client; else None."""
    ours, theirs = socket.socketpair()
    with ours, theirs:

        def answer() -> None:
            try:
                with server.wrap_socket(theirs, server_side=True) as connection:
                    connection.send(b"hello")
            except OSError:
                theirs.close()

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            with client.wrap_socket(ours, server_hostname=name) as connection:
                return connection.getpeercert(binary_form=True) if connection.recv(5) == b"hello" else None
        except OSError:
            return None
        finally:
            thread.join(10)
