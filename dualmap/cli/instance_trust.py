"""The TLS of the commands towards instances."""

from __future__ import annotations

from dualmap.cli.errors import UnfitSettingsError
from dualmap.cli.settings import Settings
from dualmap.runtime.certificates import CertificateError
from dualmap.runtime.trust import InstanceTrust


def instance_trust(settings: Settings) -> InstanceTrust:
    """Raises UnfitSettingsError: a file that ``upstream`` names cannot be used."""
    try:
        return InstanceTrust(settings.upstream)
    except CertificateError as error:
        raise UnfitSettingsError(str(error)) from error
