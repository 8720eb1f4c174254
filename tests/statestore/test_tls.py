"""TLS as the options of a store URL say."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from pathlib import Path

import pytest
import trustme

from statestore.errors import StoreConfigurationError
from statestore.redis.servers import Servers
from statestore.redis.tls import tls_context


@pytest.mark.parametrize(
    ("options", "checks_name", "verifies"),
    [
        ({}, True, ssl.CERT_REQUIRED),
        ({"ssl_cert_reqs": "required"}, True, ssl.CERT_REQUIRED),
        ({"ssl_check_hostname": "false"}, False, ssl.CERT_REQUIRED),
        ({"ssl_cert_reqs": "none"}, False, ssl.CERT_NONE),
    ],
)
def test_certificate_and_name_are_verified_unless_told_otherwise(
    options: Mapping[str, str], checks_name: bool, verifies: ssl.VerifyMode
) -> None:
    context = tls_context(options)

    assert (context.check_hostname, context.verify_mode) == (checks_name, verifies)


def test_a_private_authority_takes_the_place_of_the_systems(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")

    context = tls_context({"ssl_ca_certs": str(tmp_path / "ca.pem")})

    assert len(context.get_ca_certs()) == 1


def test_a_certificate_without_its_key_is_refused_with_both_names(tmp_path: Path) -> None:
    authority = trustme.CA()
    for name in ("one", "other"):
        issued = authority.issue_cert(name)
        issued.cert_chain_pems[0].write_to_path(tmp_path / f"{name}.pem")
        issued.private_key_pem.write_to_path(tmp_path / f"{name}.key")

    tls_context({"ssl_certfile": f"{tmp_path}/one.pem", "ssl_keyfile": f"{tmp_path}/one.key"})
    with pytest.raises(ValueError, match=r"ssl_certfile=.*/one\.pem or ssl_keyfile=.*/other\.key cannot be read"):
        tls_context({"ssl_certfile": f"{tmp_path}/one.pem", "ssl_keyfile": f"{tmp_path}/other.key"})


@pytest.mark.parametrize("scheme", ["rediss", "rediss+cluster"])
def test_a_certificate_file_that_cannot_be_read_is_named(scheme: str) -> None:
    with pytest.raises(StoreConfigurationError, match=r"store\.url .*ssl_ca_certs=/nope\.pem cannot be read"):
        Servers(f"{scheme}://x/0?ssl_ca_certs=/nope.pem", 1.0)
