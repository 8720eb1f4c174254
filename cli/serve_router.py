"""``dualmap router``: one router replica."""

from __future__ import annotations

import argparse
import os
import secrets

from dualmap.cli.errors import UnfitSettingsError, not_listening, of_store
from dualmap.cli.instance_trust import instance_trust
from dualmap.cli.logs import log_to_stderr
from dualmap.cli.parent import end_with_parent
from dualmap.cli.service_manager import ServiceManager
from dualmap.cli.settings import Settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", help="beginning of this replica's id; --router.replica_id sets all of it")


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    import uvloop

    from dualmap.router.requests.tracing import TracingUnavailableError
    from dualmap.router.serving.serve import serve
    from dualmap.router.tokens import NoTokenizerError
    from dualmap.statestore.errors import StoreError

    # Never the same id twice, even with the same name: a lease must not be taken for that of a former process.
    name = f"{arguments.name}-{secrets.token_hex(3)}" if arguments.name else None
    log_to_stderr(settings.router.log_level, style=settings.router.log_format, levels=settings.router.log_levels)
    end_with_parent(os.environ)
    manager = ServiceManager(os.environ)
    trust = instance_trust(settings)

    def announce(port: int, ops_port: int | None) -> None:
        own = f", its own port is {ops_port}" if ops_port is not None else ""
        print(f"a router replica serves port {port}{own}", flush=True)
        manager.ready()

    async def serve_as_a_service() -> None:
        async with manager.watched():
            await serve(
                settings.router,
                settings.scheduling,
                settings.store,
                settings.pools,
                trust=trust,
                replica_id=settings.router.replica_id or name,
                on_ready=announce,
            )

    try:
        uvloop.run(serve_as_a_service())
    except (NoTokenizerError, TracingUnavailableError) as error:
        raise UnfitSettingsError(str(error)) from error
    except StoreError as error:
        raise of_store(error) from error
    except OSError as error:
        raise not_listening(error, "--router.port PORT or --router.ops_port") from error
    return 0
