"""TLS to the store's servers, by the options of its URL, which have redis-py's names."""

from __future__ import annotations

import ssl
from collections.abc import Mapping

_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")


def tls_context(options: Mapping[str, str]) -> ssl.SSLContext:
    """Where redis-py would trust the system's authorities besides those of ``ssl_ca_certs``, this trusts these alone.

    Raises:
        ValueError: a file cannot be read.
    """
    try:
        context = ssl.create_default_context(cafile=options.get("ssl_ca_certs"))
        if "ssl_certfile" in options:
            # An empty passphrase: or OpenSSL would ask for one at the terminal.
            context.load_cert_chain(options["ssl_certfile"], options.get("ssl_keyfile"), password="")
    except OSError as error:  # among them ssl.SSLError
        files = " or ".join(f"{name}={options[name]}" for name in _FILES if name in options)
        raise ValueError(f"{files} cannot be read: {error}") from error
    verified = options.get("ssl_cert_reqs") != "none"
    context.check_hostname = verified and options.get("ssl_check_hostname") != "false"
    context.verify_mode = ssl.CERT_REQUIRED if verified else ssl.CERT_NONE
    return context
