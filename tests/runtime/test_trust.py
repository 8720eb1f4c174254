"""Whom clients trust: the system, and what the settings name beside it."""

from __future__ import annotations

import ast
import ssl
from pathlib import Path

import pytest
import trustme

from dualmap.runtime.certificates import CertificateError
from dualmap.runtime.pool_settings import UpstreamSettings
from dualmap.runtime.trust import InstanceTrust, system_trust
from tests.support.certificates import handshake


@pytest.fixture(scope="module")
def ca() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def ca_file(ca: trustme.CA, tmp_path: Path) -> Path:
    path = tmp_path / "ca.pem"
    ca.cert_pem.write_to_path(str(path))
    return path


@pytest.fixture
def client_files(ca: trustme.CA, tmp_path: Path) -> tuple[Path, Path]:
    made, certificate, key = ca.issue_cert("router.fleet"), tmp_path / "client.pem", tmp_path / "client.key"
    made.cert_chain_pems[0].write_to_path(str(certificate))
    made.private_key_pem.write_to_path(str(key))
    return certificate, key


def shakes_hands(client: ssl.SSLContext, ca: trustme.CA, *, wants_certificate: bool = False) -> bool:
    """Whether a server of the CA and this client agree on a connection."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert("instance.fleet").configure_cert(server)
    if wants_certificate:
        server.verify_mode = ssl.CERT_REQUIRED
        ca.configure_trust(server)
    return handshake(server, client, "instance.fleet") is not None


def test_a_ca_that_nobody_named_is_not_trusted(ca: trustme.CA) -> None:
    assert not shakes_hands(InstanceTrust().context, ca)


def test_the_ca_of_the_environment_is_trusted_by_all(
    ca: trustme.CA, ca_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(ca_file))
    assert shakes_hands(system_trust(), ca)
    assert shakes_hands(InstanceTrust().context, ca)


def test_the_ca_of_the_settings_is_trusted_beside_the_systems(
    ca: trustme.CA, ca_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, other_file = trustme.CA(), tmp_path / "system.pem"
    other.cert_pem.write_to_path(str(other_file))
    monkeypatch.setenv("SSL_CERT_FILE", str(other_file))
    trust = InstanceTrust(UpstreamSettings(ca_file=ca_file)).context
    assert shakes_hands(trust, ca) and shakes_hands(trust, other)
    assert not shakes_hands(system_trust(), ca)


def test_an_instance_that_wants_a_certificate_gets_that_of_the_settings(
    ca: trustme.CA, ca_file: Path, client_files: tuple[Path, Path], tmp_path: Path
) -> None:
    certificate, key = client_files
    both = tmp_path / "both.pem"
    both.write_bytes(certificate.read_bytes() + key.read_bytes())
    for files in ({"certificate_file": certificate, "key_file": key}, {"certificate_file": both}):
        trust = InstanceTrust(UpstreamSettings(ca_file=ca_file, **files)).context
        assert shakes_hands(trust, ca, wants_certificate=True)
    without = InstanceTrust(UpstreamSettings(ca_file=ca_file)).context
    assert not shakes_hands(without, ca, wants_certificate=True)


@pytest.mark.parametrize("name", ["ca_file", "certificate_file"])
@pytest.mark.parametrize("content", [None, b"", b"no PEM"])
def test_a_file_that_cannot_be_used_is_named_at_the_start(name: str, content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "file.pem"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CertificateError, match=rf"upstream\.{name} .*file\.pem"):
        InstanceTrust(UpstreamSettings.model_validate({name: path}))


def test_a_key_of_another_certificate_is_named(ca: trustme.CA, client_files: tuple[Path, Path], tmp_path: Path) -> None:
    other = tmp_path / "other.key"
    ca.issue_cert("other").private_key_pem.write_to_path(str(other))
    with pytest.raises(CertificateError, match=r"client\.pem with .*other\.key"):
        InstanceTrust(UpstreamSettings(certificate_file=client_files[0], key_file=other))


def test_an_encrypted_key_is_refused_and_no_password_is_asked_for(
    client_files: tuple[Path, Path], tmp_path: Path
) -> None:
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_pem_private_key(client_files[1].read_bytes(), None)
    encrypted = tmp_path / "encrypted.key"
    encrypted.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with pytest.raises(CertificateError, match="encrypted"):
        InstanceTrust(UpstreamSettings(certificate_file=client_files[0], key_file=encrypted))


def test_a_key_without_a_certificate_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="key_file needs a certificate_file"):
        UpstreamSettings(key_file=tmp_path / "key.pem")


ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("package", ["router", "workers", "cli", "simulation", "statestore"])
def test_every_http_client_of_the_product_is_told_whom_to_trust(package: str) -> None:
    """Left out, it would be the CAs that come with the library, whatever the system trusts."""
    untold = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for path in (ROOT / package).rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call)
        and ast.unparse(call.func) in ("httpx.AsyncClient", "httpx.Client", "httpx.get", "httpx.post", "httpx.request")
        and not any(keyword.arg == "verify" for keyword in call.keywords)
    ]
    assert untold == []
