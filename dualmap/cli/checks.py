"""Checks of a router or a worker at its start beyond those of its settings' values: files, packages, stores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from dualmap.cli.settings import Settings
from dualmap.router.admin.exposure import OpenAdminError, require_closed_admin
from dualmap.router.requests.tracing import TracingUnavailableError, require_tracing
from dualmap.router.tenants.signed_tokens import TokensUnavailableError, require_tokens
from dualmap.router.tokens import NoTokenizerError, read_model
from dualmap.runtime.certificates import CertificateError
from dualmap.runtime.trust import InstanceTrust
from dualmap.statestore.connect import require_shared
from dualmap.statestore.errors import StoreConfigurationError

_UNFIT = (
    OpenAdminError, NoTokenizerError, StoreConfigurationError, TracingUnavailableError, TokensUnavailableError,
    CertificateError,
)  # fmt: skip


def complaints(settings: Settings) -> Iterator[str]:
    """Why a fleet of these settings would not start on this machine. Reads the files they name, and calls no server."""
    for check in _checks(settings):
        try:
            check()
        except _UNFIT as error:
            yield str(error)


def _checks(settings: Settings) -> Iterator[Callable[[], object]]:
    yield partial(require_closed_admin, settings.router, settings.tenants)
    yield partial(require_shared, settings.store)
    yield partial(require_tracing, settings.router)
    yield partial(require_tokens, settings.router.jwt)
    yield partial(InstanceTrust, settings.upstream)
    for tls in (settings.router.tls, settings.picker.tls):
        if tls is not None:
            yield tls.context
    for pool in settings.pools:
        if pool.tokenizer is not None and pool.tokenizer != "instances":
            yield partial(read_model, pool, pool.tokenizer)
