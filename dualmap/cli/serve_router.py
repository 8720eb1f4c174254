"""``dualmap router``: one router replica."""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from dualmap.cli.errors import UnfitSettingsError, not_listening, of_store
from dualmap.cli.instance_trust import instance_trust
from dualmap.cli.logs import log_to_stderr
from dualmap.cli.parent import end_with_parent
from dualmap.cli.service_manager import ServiceManager
from dualmap.cli.settings import Settings
from dualmap.runtime.collector import uncollected

if TYPE_CHECKING:
    from dualmap.router.serving.serve import MakeDoor


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", help="beginning of this replica's id; --router.replica_id sets all of it")


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    def announce(port: int, ops_port: int | None) -> str:
        own = f", its own port is {ops_port}" if ops_port is not None else ""
        return f"a router replica serves port {port}{own}"

    with not_listening_at("--router.port PORT or --router.ops_port"):
        return run_replica(arguments.name, settings, announce)


@contextlib.contextmanager
def not_listening_at(options: str) -> Iterator[None]:
    """Say by which options another port is taken, where one cannot be listened on."""
    try:
        yield
    except OSError as error:
        raise not_listening(error, options) from error


def run_replica(
    name: str | None,
    settings: Settings,
    announce: Callable[[int, int | None], str],
    door: MakeDoor | None = None,
    door_port: int | None = None,
) -> int:
    """Serve until a signal to stop; with a ``door`` requests come there."""
    with uncollected():
        import uvloop

        from dualmap.router.admin.exposure import OpenAdminError
        from dualmap.router.batches.storage import StorageUnavailableError
        from dualmap.router.requests.tracing import TracingUnavailableError
        from dualmap.router.serving.serve import serve
        from dualmap.router.tenants.signed_tokens import TokensUnavailableError
        from dualmap.router.tokens import NoTokenizerError
        from dualmap.runtime.certificates import CertificateError
        from dualmap.statestore.errors import StoreError

    # Never the same id twice, even with the same name: a lease must not be taken for that of a former process.
    own_name = f"{name}-{secrets.token_hex(3)}" if name else None
    log_to_stderr(settings.router.log_level, style=settings.router.log_format, levels=settings.router.log_levels)
    end_with_parent(os.environ)
    manager = ServiceManager(os.environ)
    trust = instance_trust(settings)

    def on_ready(port: int, ops_port: int | None) -> None:
        print(announce(port, ops_port), flush=True)
        manager.ready()

    async def serve_as_a_service() -> None:
        async with manager.watched():
            await serve(
                settings.router,
                settings.scheduling,
                settings.store,
                settings.pools,
                tenants=settings.tenants,
                trust=trust,
                replica_id=settings.router.replica_id or own_name,
                on_ready=on_ready,
                door=door,
                door_port=door_port,
            )

    try:
        uvloop.run(serve_as_a_service())
    except (
        CertificateError, NoTokenizerError, OpenAdminError, StorageUnavailableError, TracingUnavailableError,
        TokensUnavailableError,
    ) as error:  # fmt: skip
        raise UnfitSettingsError(str(error)) from error
    except StoreError as error:
        raise of_store(error) from error
    return 0
