"""Whom clients of this product trust over TLS, and as whom they present themselves.

All of them trust the system's CA store, or what SSL_CERT_FILE and SSL_CERT_DIR name in its place, as OpenSSL reads
them. Clients of instances trust the CA of ``upstream.ca_file`` too.
"""

from __future__ import annotations

import os
import ssl
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from dualmap.runtime.certificates import (
    FollowedFiles,
    RenewedContext,
    load_authorities,
    load_certificate,
    trusting_alone,
)
from dualmap.runtime.pool_settings import UpstreamSettings


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
    """TLS towards instances, the same for all clients of a process; they may keep ``context`` as long as they live."""

    def __init__(self, settings: UpstreamSettings | None = None) -> None:
        """Takes tens of milliseconds once in a process.

        Raises:
            CertificateError: a file of ``upstream`` cannot be used; the message names the setting.
        """
        self.context = system_trust()
        self.certificates: tuple[FollowedFiles[Any], ...] = ()
        if settings is None or settings == UpstreamSettings():
            return
        files = [path for path in (settings.certificate_file, settings.key_file, settings.ca_file) if path is not None]
        name = "upstream.ca_file" if settings.certificate_file is None else "upstream.certificate_file"
        followed = FollowedFiles(name, files, partial(_trust_of, settings), certificate=settings.certificate_file)
        self.context = RenewedContext(followed, settings.server_name)
        self.certificates = (followed,)


def _trust_of(settings: UpstreamSettings) -> ssl.SSLContext:
    if settings.verify_name or settings.ca_file is None:
        context = _system_trust()
        if settings.ca_file is not None:
            load_authorities(context, settings.ca_file, "upstream.ca_file")
    else:  # anyone has a certificate of the system's CAs, for some name
        context = trusting_alone(settings.ca_file, "upstream.ca_file")
        context.check_hostname = False
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    if settings.certificate_file is not None:
        names = ("upstream.certificate_file", "upstream.key_file")
        load_certificate(context, settings.certificate_file, settings.key_file, names)
    return context
