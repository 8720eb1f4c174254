"""TLS to the store's servers, as the options of its URL say."""

from __future__ import annotations

import ssl
from collections.abc import Mapping


def tls_context(options: Mapping[str, str]) -> ssl.SSLContext:
    """Verifies certificate and host name by the system's authorities, or by those of ``ssl_ca_certs`` alone.

    ``ssl_check_hostname=false`` asks for no name, ``ssl_cert_reqs=none`` for no valid certificate either;
    ``ssl_certfile`` and ``ssl_keyfile`` (which may be one file) are shown to servers that ask.

    Raises:
        ValueError: a file cannot be read; says which.
    """
    authorities, certificate = options.get("ssl_ca_certs"), options.get("ssl_certfile")
    try:
        context = ssl.create_default_context(cafile=authorities)
    except OSError as error:  # among them ssl.SSLError
        raise ValueError(f"the certificates of ssl_ca_certs={authorities} cannot be read: {error}") from error
    if certificate is not None:
        key = options.get("ssl_keyfile")
        try:
            # An empty passphrase: or OpenSSL would ask for one at the terminal.
            context.load_cert_chain(certificate, key, password="")
        except OSError as error:
            names = f"ssl_certfile={certificate}" + (f" and ssl_keyfile={key}" if key is not None else "")
            raise ValueError(f"certificate and key of {names} cannot be read: {error}") from error
    if options.get("ssl_check_hostname") == "false" or options.get("ssl_cert_reqs") == "none":
        context.check_hostname = False
    if options.get("ssl_cert_reqs") == "none":
        context.verify_mode = ssl.CERT_NONE
    return context
