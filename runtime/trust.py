"""Whom clients of this product trust over TLS, and as whom they present themselves.

All of them trust the system's CA store, or what SSL_CERT_FILE and SSL_CERT_DIR name in its place, as OpenSSL reads
them. Clients of instances trust the CA of ``upstream.ca_file`` too.
"""

from __future__ import annotations

import os
import ssl
from functools import lru_cache
from pathlib import Path

from dualmap.runtime.pool_settings import UpstreamSettings


class TrustError(ValueError):
    """A file of ``upstream`` cannot be used; the message names the setting."""


def system_trust() -> ssl.SSLContext:
    """The system's CA store, for all who do not connect to instances. Made once, and not to be changed."""
    return _shared(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))


@lru_cache(maxsize=4)
def _shared(_file: str | None, _directory: str | None) -> ssl.SSLContext:
    return _system_trust()


def _system_trust() -> ssl.SSLContext:
    """The CA store of the system; where it has none, that of Mozilla, which comes with the HTTP client."""
    paths = ssl.get_default_verify_paths()
    if paths.cafile is not None or (paths.capath is not None and any(Path(paths.capath).iterdir())):
        return ssl.create_default_context()
    import certifi

    return ssl.create_default_context(cafile=certifi.where())


class InstanceTrust:
    """TLS towards instances, the same for all clients of a process."""

    def __init__(self, settings: UpstreamSettings | None = None) -> None:
        """Raises TrustError. Takes tens of milliseconds once in a process."""
        self.context = system_trust() if settings is None or settings == UpstreamSettings() else _trust_of(settings)


def _trust_of(settings: UpstreamSettings) -> ssl.SSLContext:
    context = _system_trust()
    try:
        if settings.ca_file is not None:
            context.load_verify_locations(cafile=settings.ca_file)
    except (OSError, ssl.SSLError) as error:
        raise TrustError(f"upstream.ca_file {settings.ca_file}: {_why(error)}") from error
    try:
        if settings.certificate_file is not None:
            context.load_cert_chain(settings.certificate_file, settings.key_file, password=_no_password)
    except (OSError, ssl.SSLError) as error:
        named = settings.certificate_file if settings.key_file is None else f"{settings.certificate_file} with "
        raise TrustError(f"upstream.certificate_file {named}{settings.key_file or ''}: {_why(error)}") from error
    return context


def _no_password() -> str:
    """Refuse to give a password. Without this callback OpenSSL would ask for one at the terminal."""
    raise TrustError("upstream.key_file is encrypted; give the key without a password")


def _why(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):  # an OSError whose text is a number
        return f"it holds no PEM that can be used ({error.reason or error})"
    return error.strerror or str(error)
