"""Certificates in files that are renewed while the process runs, as by cert-manager and a Secret of Kubernetes.

New connections use the new certificate, and running ones go on. Files are compared when a connection begins or a report
is made, at most once a second; behind a link that the kubelet has swapped is another file. Renewed files that cannot be
used change nothing but the report: the former certificate stays in use until files come that fit.
"""

from __future__ import annotations

import base64
import binascii
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

log = logging.getLogger(__name__)

CHECK_S: Final = 1.0
RETRY_S: Final = 30.0
"""Unchanged files that could not be used are tried again after this time: their disk may have been the reason."""

T = TypeVar("T")

Stamp = tuple[int, int, int, int]


class CertificateError(ValueError):
    """A file cannot be used; the message names its setting and says what to do."""


@dataclass(frozen=True, slots=True)
class CertificateReport:
    """The state of one certificate, for people and alerts."""

    name: str
    """The setting that names the certificate, or the CAs where there is no certificate."""
    expires_unix_s: float | None
    """The end of the validity of the certificate that is in use; None for CAs, or where it cannot be read."""
    problem: str
    """Why the renewed files are not in use, or that the certificate is not valid now; empty where all is well."""

    @property
    def expires(self) -> str | None:
        return None if self.expires_unix_s is None else _date(self.expires_unix_s)


class FollowedFiles(Generic[T]):
    """A thing that is made of files, and made again when they change. Any thread may use it."""

    def __init__(
        self,
        name: str,
        files: Sequence[Path],
        make: Callable[[], T],
        *,
        certificate: Path | None = None,
        monotonic_s: Callable[[], float] = time.monotonic,
        unix_s: Callable[[], float] = time.time,
    ) -> None:
        """``certificate`` is the one whose validity is reported.

        Raises:
            CertificateError: ``make`` raised it.
        """
        self._name = name
        self._files = tuple(files)
        self._make = make
        self._certificate = certificate
        self._monotonic_s = monotonic_s
        self._unix_s = unix_s
        self._lock = threading.Lock()
        self._failure = ""
        self._stamps = self._read_stamps()
        self._tried_s = self._checked_s = monotonic_s()
        self._made = make()
        self._validity = None if certificate is None else validity_of(certificate)
        if why := self._invalid():
            log.warning("%s: %s", name, why)

    def current(self) -> T:
        """The thing, made of the files as they are by now, or as they were when they could last be used."""
        now_s = self._monotonic_s()
        if now_s - self._checked_s >= CHECK_S:
            with self._lock:
                self._check(now_s)
        return self._made

    def report(self) -> CertificateReport:
        self.current()
        expires_s = None if self._validity is None else self._validity[1]
        return CertificateReport(self._name, expires_s, self._failure or self._invalid())

    def _check(self, now_s: float) -> None:
        self._checked_s = now_s
        stamps = self._read_stamps()
        if stamps == self._stamps and (not self._failure or now_s - self._tried_s < RETRY_S):
            return
        # Compared before they are read: a file that changes meanwhile has another stamp at the next check.
        self._stamps, self._tried_s = stamps, now_s
        try:
            made = self._make()
        except (CertificateError, OSError) as error:
            if str(error) != self._failure:
                log.error("a renewed certificate cannot be used, and the former one stays in use: %s", error)
            self._failure = str(error)
            return
        self._made, self._failure = made, ""
        self._validity = None if self._certificate is None else validity_of(self._certificate)
        until = f", valid until {_date(self._validity[1])}" if self._validity is not None else ""
        log.info("%s: its files have changed and were read again%s", self._name, until)
        if why := self._invalid():
            log.warning("%s: %s", self._name, why)

    def _read_stamps(self) -> tuple[Stamp | None, ...]:
        return tuple(map(_stamp, self._files))

    def _invalid(self) -> str:
        if self._validity is None:
            return ""
        first_s, last_s = self._validity
        if self._unix_s() > last_s:
            return f"{self._certificate} expired at {_date(last_s)}: renew it"
        if self._unix_s() < first_s:
            return f"{self._certificate} is not valid before {_date(first_s)}: is this machine's clock right?"
        return ""


def reported(certificates: Iterable[FollowedFiles[Any]]) -> dict[str, dict[str, str | None]]:
    """The reports as plain values, for ``/health``."""
    reports = [each.report() for each in certificates]
    return {each.name: {"expires": each.expires, "problem": each.problem or None} for each in reports}


def _stamp(file: Path) -> Stamp | None:
    """A value that differs for another content; None for a file that is not there."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


class RenewedContext(ssl.SSLContext):
    """A TLS context for as long as a process runs: each connection gets the context of the files as they are by then.

    Its own options are not used. ``server_name`` is what clients expect of the server's certificate instead of the host
    that they connect to.
    """

    def __new__(cls, files: FollowedFiles[ssl.SSLContext], server_name: str | None = None) -> RenewedContext:
        return super().__new__(cls, files.current().protocol)

    def __init__(self, files: FollowedFiles[ssl.SSLContext], server_name: str | None = None) -> None:
        self._files = files
        self._server_name = server_name

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        context = self._files.current()
        name = self._server_name or server_hostname
        return context.wrap_bio(incoming, outgoing, server_side, name, session)

    def wrap_socket(
        self,
        sock: socket.socket,
        server_side: bool = False,
        do_handshake_on_connect: bool = True,
        suppress_ragged_eofs: bool = True,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLSocket:
        context = self._files.current()
        name = self._server_name or server_hostname
        return context.wrap_socket(sock, server_side, do_handshake_on_connect, suppress_ragged_eofs, name, session)


# files -----------------------------------------------------------------------------------------------------------
def load_certificate(context: ssl.SSLContext, certificate: Path, key: Path | None, names: tuple[str, str]) -> None:
    """Let ``context`` present a certificate. ``names`` are the settings of certificate and key; without ``key`` the key
    is in the certificate's file.

    Raises:
        CertificateError: they cannot be used.
    """
    require_readable(certificate, names[0])
    if key is not None:
        require_readable(key, names[1])
    where = f"{names[0]} {certificate}" if key is None else f"{names[1]} {key}"

    def no_password() -> str:
        """Without this callback OpenSSL would ask for a password at the terminal."""
        raise CertificateError(
            f"{where} is encrypted, and a key must have no password here: write one without it by"
            " 'openssl pkey -in KEY -out NEW'"
        )

    try:
        context.load_cert_chain(certificate, key, password=no_password)
    except (OSError, ssl.SSLError) as error:
        with_key = "" if key is None else f" with {names[1]} {key}"
        raise CertificateError(f"{names[0]} {certificate}{with_key}: {_why(error)}") from error


def load_authorities(context: ssl.SSLContext, file: Path, name: str) -> None:
    """Let ``context`` trust the CAs of a file, which the setting ``name`` names.

    Raises:
        CertificateError: it holds none, or cannot be read.
    """
    require_readable(file, name)
    try:
        context.load_verify_locations(cafile=file)
    except (OSError, ssl.SSLError) as error:
        raise CertificateError(f"{name} {file}: {_why(error)}") from error


def trusting_alone(file: Path, name: str) -> ssl.SSLContext:
    """A client's context that trusts the CAs of a file, and none beside them.

    Raises:
        CertificateError: it holds none, or cannot be read.
    """
    require_readable(file, name)
    try:
        return ssl.create_default_context(cafile=str(file))
    except (OSError, ssl.SSLError) as error:
        raise CertificateError(f"{name} {file}: {_why(error)}") from error


def require_readable(file: Path, name: str) -> None:
    """Raises CertificateError: the file that the setting ``name`` names cannot be read."""
    try:
        with file.open("rb"):
            pass
    except OSError as error:
        raise CertificateError(
            f"{name} {file} cannot be read: {error.strerror or error}; is the path right, and may this process's user"
            " read it?"
        ) from error


def _why(error: OSError) -> str:
    if not isinstance(error, ssl.SSLError):
        return error.strerror or str(error)
    if error.reason == "KEY_VALUES_MISMATCH":
        return "this is not the key of this certificate; give the two that were issued together"
    return f"it holds no PEM that can be used ({error.reason or error})"  # an OSError whose text is a number


# server side -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class ServerFiles:
    """The files of a port that speaks TLS."""

    section: str
    """The section of the settings that names them."""
    certificate: Path
    key: Path
    client_ca: Path | None
    requires_client: bool
    """Whether a client without a certificate of these CAs is refused; else its certificate is verified if it has one.
    """
    protocol: str = "http/1.1"
    """The protocol that is spoken there, as clients agree on it (ALPN)."""

    @property
    def name(self) -> str:
        return f"{self.section}.tls_certificate"

    @property
    def paths(self) -> tuple[Path, ...]:
        return (self.certificate, self.key, *(() if self.client_ca is None else (self.client_ca,)))

    def context(self) -> ssl.SSLContext:
        """A context of the files as they are now.

        Raises:
            CertificateError: they cannot be used.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols([self.protocol])
        load_certificate(context, self.certificate, self.key, (self.name, f"{self.section}.tls_key"))
        if self.client_ca is not None:
            load_authorities(context, self.client_ca, f"{self.section}.tls_client_ca")
            context.verify_mode = ssl.CERT_REQUIRED if self.requires_client else ssl.CERT_OPTIONAL
        return context

    def followed(self) -> FollowedFiles[ssl.SSLContext]:
        """Raises CertificateError: they cannot be used."""
        return FollowedFiles(self.name, self.paths, self.context, certificate=self.certificate)


def server_files(
    section: str,
    certificate: Path | None,
    key: Path | None,
    client_ca: Path | None,
    *,
    requires_client: bool,
    protocol: str = "http/1.1",
) -> ServerFiles | None:
    """The files of a port as its section of the settings names them; None without TLS.

    Raises:
        ValueError: one of them lacks another.
    """
    if (certificate is None) != (key is None):
        raise ValueError("tls_certificate and tls_key must be set together")
    if client_ca is not None and certificate is None:
        raise ValueError("tls_client_ca needs tls_certificate and tls_key")
    if certificate is None or key is None:
        return None
    return ServerFiles(section, certificate, key, client_ca, requires_client, protocol)


def client_name(certificate: dict[str, Any] | None) -> str | None:
    """The name in a verified client's certificate, as ``getpeercert`` gives it: the first alternative name of a
    workload (URI), a host or a mailbox, else the common name of its subject. None without a certificate."""
    if not certificate:
        return None
    alternatives = certificate.get("subjectAltName", ())
    for kind in ("URI", "DNS", "email"):
        for found, name in alternatives:
            if found == kind:
                return str(name)
    for part in certificate.get("subject", ()):
        for field, text in part:
            if field == "commonName":
                return str(text)
    return "unnamed"


# validity --------------------------------------------------------------------------------------------------------
_BEGIN, _END = b"-----BEGIN CERTIFICATE-----", b"-----END CERTIFICATE-----"


def validity_of(file: Path) -> tuple[float, float] | None:
    """The first and the last second, in Unix time, at which the first certificate of a PEM file is valid. None where
    that cannot be read. The standard library reads it of peers alone."""
    try:
        body = file.read_bytes().partition(_BEGIN)[2].partition(_END)[0]
        return _validity(base64.b64decode(body))
    except (OSError, binascii.Error, ValueError, IndexError):
        return None


def _validity(certificate: bytes) -> tuple[float, float]:
    """Certificate and its first part are sequences; version, number, algorithm and issuer precede the validity (RFC
    5280, section 4.1)."""
    _, start, _ = _element(certificate, 0)
    _, at, _ = _element(certificate, start)
    tag, _, after = _element(certificate, at)
    skipped = 4 if tag == 0xA0 else 3  # the version may be left out
    for _ in range(skipped):
        at = _element(certificate, at)[2]
    _, at, _ = _element(certificate, at)
    first, after = _time(certificate, at)
    return first, _time(certificate, after)[0]


def _element(data: bytes, at: int) -> tuple[int, int, int]:
    """Tag, start of the content and end of the DER element that begins at ``at``."""
    tag, length, start = data[at], data[at + 1], at + 2
    if length & 0x80:
        start += length & 0x7F
        length = int.from_bytes(data[at + 2 : start], "big")
    return tag, start, start + length


def _time(data: bytes, at: int) -> tuple[float, int]:
    tag, start, end = _element(data, at)
    text = data[start:end].decode("ascii")
    if tag == 0x17:  # UTCTime: two digits of the year, from 1950 on
        text = ("19" if text[:2] >= "50" else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp(), end


def _date(unix_s: float) -> str:
    return f"{datetime.fromtimestamp(unix_s, UTC):%Y-%m-%dT%H:%M:%SZ}"
