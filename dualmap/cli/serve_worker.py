"""``dualmap worker``: one background worker."""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets

from dualmap.cli.errors import not_listening, of_store
from dualmap.cli.instance_trust import instance_trust
from dualmap.cli.logs import log_to_stderr
from dualmap.cli.parent import end_with_parent
from dualmap.cli.service_manager import ServiceManager
from dualmap.cli.settings import Settings
from dualmap.runtime.collector import uncollected


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", help="beginning of this worker's id in logs and as leader")


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    with uncollected():
        from dualmap.statestore.errors import StoreError
        from dualmap.workers.serve import serve

    # Never the same id twice, even with the same name: a lease must not be taken for that of a former process.
    worker_id = f"{arguments.name}-{secrets.token_hex(3)}" if arguments.name else None
    log_to_stderr(settings.router.log_level, style=settings.router.log_format, levels=settings.router.log_levels)
    end_with_parent(os.environ)
    manager = ServiceManager(os.environ)
    trust = instance_trust(settings)

    async def serve_as_a_service() -> None:
        async with manager.watched():
            manager.ready()
            await serve(
                settings.worker,
                settings.scheduling,
                settings.store,
                settings.pools,
                trust=trust,
                worker_id=worker_id,
            )

    try:
        asyncio.run(serve_as_a_service())
    except StoreError as error:
        raise of_store(error) from error
    except OSError as error:
        raise not_listening(error, "--worker.ops_port") from error
    return 0
