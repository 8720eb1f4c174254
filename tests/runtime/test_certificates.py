"""Certificates follow their files, and what is wrong with these is said."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

import pytest
import trustme
from cryptography import x509

from dualmap.runtime.certificates import (
    CHECK_S,
    RETRY_S,
    CertificateError,
    FollowedFiles,
    RenewedContext,
    ServerFiles,
    client_name,
    validity_of,
)
from tests.support.certificates import Mounted, client_tls, expired, handshake, mounted


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Port:
    """A server's context over mounted files, looked at when the clock says so."""

    def __init__(self, files: Mounted, *, client_ca: bool = False, requires_client: bool = False) -> None:
        self.clock = Clock()
        served = ServerFiles(
            "router", files.certificate, files.key, files.ca if client_ca else None, requires_client=requires_client
        )
        self.followed = FollowedFiles(
            served.name, served.paths, served.context, certificate=files.certificate, monotonic_s=self.clock
        )
        self.context = RenewedContext(self.followed)

    def pass_time(self, time_s: float = CHECK_S) -> None:
        self.clock.now_s += time_s


def der(issued: trustme.LeafCert) -> bytes:
    return ssl.PEM_cert_to_DER_cert(issued.cert_chain_pems[0].bytes().decode())


@pytest.fixture(scope="module")
def ca() -> trustme.CA:
    return trustme.CA()


def test_new_connections_get_the_renewed_certificate_behind_a_swapped_link(ca: trustme.CA, tmp_path: Path) -> None:
    first, second = ca.issue_cert("fleet.example"), ca.issue_cert("fleet.example")
    files = mounted(tmp_path / "tls", first)
    port = Port(files)

    assert handshake(port.context, client_tls(ca)) == der(first)
    files.renew(second)
    assert handshake(port.context, client_tls(ca)) == der(first), "files are compared once a second at most"
    port.pass_time()
    assert handshake(port.context, client_tls(ca)) == der(second)
    assert port.followed.report().problem == ""


def test_a_file_that_is_written_in_place_with_the_same_length_is_read_again(ca: trustme.CA, tmp_path: Path) -> None:
    files = mounted(tmp_path / "tls", ca.issue_cert("fleet.example"))
    port = Port(files)
    before = files.certificate.stat()
    renewed = ca.issue_cert("fleet.example")
    files.certificate.write_bytes(renewed.cert_chain_pems[0].bytes())
    files.key.write_bytes(renewed.private_key_pem.bytes())
    os.utime(files.certificate, ns=(before.st_atime_ns, before.st_mtime_ns))
    port.pass_time()

    assert handshake(port.context, client_tls(ca)) == der(renewed)


def test_a_broken_renewal_keeps_the_former_certificate_and_says_why_until_it_is_mended(
    ca: trustme.CA, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = ca.issue_cert("fleet.example"), ca.issue_cert("fleet.example")
    files = mounted(tmp_path / "tls", first)
    port = Port(files)

    files.renew(second, key=first.private_key_pem.bytes())
    port.pass_time()
    for _ in range(3):
        assert handshake(port.context, client_tls(ca)) == der(first)
        port.pass_time()
    assert "this is not the key of this certificate" in port.followed.report().problem
    assert sum("the former one stays in use" in line for line in caplog.messages) == 1
    files.certificate.unlink()
    port.pass_time()
    assert handshake(port.context, client_tls(ca)) == der(first)
    assert "router.tls_certificate" in port.followed.report().problem
    assert "cannot be read" in port.followed.report().problem
    files.certificate.symlink_to("..data/tls.crt")
    files.renew(second)
    port.pass_time()
    assert handshake(port.context, client_tls(ca)) == der(second)
    assert port.followed.report().problem == ""


def test_unchanged_files_that_could_not_be_read_are_tried_again(tmp_path: Path) -> None:
    file, clock = tmp_path / "file", Clock()
    file.write_text("one")
    works = True

    def read() -> str:
        if not works:
            raise CertificateError("the disk is away")
        return file.read_text()

    followed = FollowedFiles("a", [file], read, monotonic_s=clock)
    works = False
    file.write_text("another")
    clock.now_s += CHECK_S
    assert followed.current() == "one" and followed.report().problem == "the disk is away"
    works = True
    clock.now_s += CHECK_S
    assert followed.current() == "one"
    clock.now_s += RETRY_S
    assert followed.current() == "another" and followed.report().problem == ""


def test_a_renewed_ca_replaces_the_former_one(ca: trustme.CA, tmp_path: Path) -> None:
    other = trustme.CA()
    ours, theirs = ca.issue_cert("fleet.example"), other.issue_cert("client")
    files = mounted(tmp_path / "tls", ours, ca)
    port = Port(files, client_ca=True, requires_client=True)
    mine = client_tls(ca, ca.issue_cert("client"))

    assert handshake(port.context, mine) and not handshake(port.context, client_tls(ca, theirs))
    files.renew(ours, other)
    port.pass_time()
    assert not handshake(port.context, mine) and handshake(port.context, client_tls(ca, theirs))


def test_clients_below_tls_1_2_are_refused(ca: trustme.CA, tmp_path: Path) -> None:
    port = Port(mounted(tmp_path / "tls", ca.issue_cert("fleet.example")))
    old, new = client_tls(ca), client_tls(ca)
    old.set_ciphers("DEFAULT@SECLEVEL=0")
    with pytest.warns(DeprecationWarning):
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    new.maximum_version = ssl.TLSVersion.TLSv1_2

    assert handshake(port.context, old) is None and handshake(port.context, new) is not None


@pytest.mark.parametrize("key_type", [trustme.KeyType.ECDSA, trustme.KeyType.RSA])
def test_the_validity_of_a_certificate_is_read_from_its_file(key_type: trustme.KeyType, tmp_path: Path) -> None:
    ca = trustme.CA(key_type=key_type)
    files = mounted(tmp_path / "tls", expired(ca, "fleet.example"))
    (files.folder / "root.pem").write_bytes(ca.cert_pem.bytes())  # valid beyond 2049, which is written otherwise

    for file in (files.certificate, files.folder / "root.pem"):
        known = x509.load_pem_x509_certificate(file.read_bytes())
        assert validity_of(file) == (known.not_valid_before_utc.timestamp(), known.not_valid_after_utc.timestamp())


@pytest.mark.parametrize(
    "content", [None, b"", b"no PEM", b"-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----"]
)
def test_what_is_no_certificate_has_no_validity(content: bytes | None, tmp_path: Path) -> None:
    file = tmp_path / "file"
    if content is not None:
        file.write_bytes(content)
    assert validity_of(file) is None


def test_an_expired_certificate_is_used_and_warned_of(
    ca: trustme.CA, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    port = Port(mounted(tmp_path / "tls", expired(ca, "fleet.example")))

    assert "expired at 2020-01-02T03:04:05Z: renew it" in caplog.text
    assert "expired" in port.followed.report().problem
    assert port.followed.report().expires == "2020-01-02T03:04:05Z"


def test_a_certificate_whose_time_has_not_come_is_warned_of(ca: trustme.CA, tmp_path: Path) -> None:
    files = mounted(tmp_path / "tls", ca.issue_cert("fleet.example"))
    followed = FollowedFiles("a", [files.certificate], str, certificate=files.certificate, unix_s=lambda: 0.0)
    assert "is this machine's clock right?" in followed.report().problem


@pytest.mark.parametrize(
    ("certificate", "name"),
    [
        (None, None),
        ({}, None),
        ({"subject": ((("commonName", "alice"),),)}, "alice"),
        ({"subject": ((("commonName", "x"),),), "subjectAltName": (("DNS", "a.b"), ("URI", "spiffe://c/d"))}, "spiffe://c/d"),
        ({"subject": ((("organizationName", "o"),),), "subjectAltName": (("IP Address", "::1"),)}, "unnamed"),
    ],
)  # fmt: skip
def test_a_client_has_the_name_of_its_workload_else_of_its_host_else_of_its_subject(
    certificate: dict[str, object] | None, name: str | None
) -> None:
    assert client_name(certificate) == name


def test_a_key_with_a_password_is_refused_with_the_command_that_removes_it(ca: trustme.CA, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization

    issued = ca.issue_cert("fleet.example")
    files = mounted(tmp_path / "tls", issued)
    key = serialization.load_pem_private_key(issued.private_key_pem.bytes(), None)
    protected = serialization.BestAvailableEncryption(b"secret")
    files.renew(issued, key=key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, protected))
    with pytest.raises(CertificateError, match=r"router\.tls_key .*openssl pkey"):
        Port(files)


def test_a_key_that_may_not_be_read_is_named(ca: trustme.CA, tmp_path: Path) -> None:
    files = mounted(tmp_path / "tls", ca.issue_cert("fleet.example"))
    files.key.unlink()
    with pytest.raises(CertificateError, match=r"router\.tls_key .* cannot be read.*may this process's user read it"):
        Port(files)
