"""Certificates of a fleet under chaos: its authority, and the files and contexts that its processes and networks use.

Needs trustme, which the project's test extra installs.
"""

from __future__ import annotations

import datetime
import ssl
from collections.abc import Mapping
from pathlib import Path

import trustme

from dualmap.research.chaos.fault_proxy import HOST


class FleetCertificates:
    """Files in ``directory``, which must exist. Everybody has a certificate of one authority."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._authority = trustme.CA()
        self.authority = directory / "ca.pem"
        """File with the authority's certificate."""
        self._authority.cert_pem.write_to_path(str(self.authority))
        self._endpoint, self._client = directory / "endpoint", directory / "client"
        self.show(self.issued())
        _write(self._client, self._authority.issue_cert("fleet.example"))

    def issued(self) -> trustme.LeafCert:
        """A new certificate of this machine's address."""
        return self._authority.issue_cert(HOST)

    def expired(self) -> trustme.LeafCert:
        """One whose time is over."""
        return self._authority.issue_cert(HOST, not_after=datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC))

    def show(self, issued: trustme.LeafCert, *, key: bytes | None = None) -> None:
        """Exchange the endpoint's files for those of a certificate; ``key`` is another one than its own."""
        _write(self._endpoint, issued, key)

    def settings(self) -> Mapping[str, Mapping[str, str]]:
        """The sections of the fleet's settings that name the files."""
        certificate, key = _files(self._client)
        own_certificate, own_key = _files(self._endpoint)
        return {
            "router": {"tls_certificate": own_certificate, "tls_key": own_key},
            "upstream": {"ca_file": str(self.authority), "certificate_file": certificate, "key_file": key},
        }

    def store_options(self) -> str:
        """The options of a store's URL that name the files."""
        certificate, key = _files(self._client)
        return f"?ssl_ca_certs={self.authority}&ssl_certfile={certificate}&ssl_keyfile={key}"

    def server(self, *, refuses: bool = False) -> ssl.SSLContext:
        """A server's context, which demands its clients' certificates; ``refuses``: those of another authority."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.issued().configure_cert(context)
        (trustme.CA() if refuses else self._authority).configure_trust(context)
        context.verify_mode = ssl.CERT_REQUIRED
        return context


def _files(base: Path) -> tuple[str, str]:
    return str(base.with_suffix(".crt")), str(base.with_suffix(".key"))


def _write(base: Path, issued: trustme.LeafCert, key: bytes | None = None) -> None:
    contents = (
        b"".join(pem.bytes() for pem in issued.cert_chain_pems),
        issued.private_key_pem.bytes() if key is None else key,
    )
    for name, content in zip(_files(base), contents, strict=True):
        new = Path(f"{name}.new")
        new.write_bytes(content)
        new.replace(name)
