"""Whether other machines reach an administration that needs no key, while clients need one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from dualmap.router.settings import RouterSettings
from dualmap.runtime.loopback import is_loopback
from dualmap.runtime.tenant_settings import TenantSettings

ADVICE: Final = (
    "set router.admin_key or router.admins, or let it listen on this machine alone (router.host: 127.0.0.1), or say by"
    " router.open_admin that this is meant"
)


class OpenAdminError(ValueError):
    """A replica would be open to its clients: inference needs keys, and administration needs none."""


def admin_is_exposed(router: RouterSettings) -> bool:
    """Whether other machines reach an administration without a key, and no setting says that this is meant."""
    return (
        router.admin_is_open
        and not router.open_admin
        and not is_loopback(router.host)
        and not _needs_certificate(router)
    )


def _needs_certificate(router: RouterSettings) -> bool:
    """Whether operators show a certificate that clients of inference need not have."""
    return (
        router.tls_client_ca is not None
        and set(router.tls_client_required_for) == {"admin"}
        and router.ops_port is None  # which asks for none
    )


def require_closed_admin(router: RouterSettings, tenants: Sequence[TenantSettings]) -> None:
    """Raises OpenAdminError where clients need keys, and whoever reaches the replica may administer it."""
    gives_keys = router.api_keys or router.needs_key or router.jwt or router.gateway is not None or tenants
    if gives_keys and admin_is_exposed(router):
        raise OpenAdminError(
            "clients of inference need keys, and /admin, /sleep and all that controls the engines need none: each of"
            f" them could change limits and stop instances; {ADVICE}"
        )
