"""``dualmap worker``: one background worker."""

from __future__ import annotations

import argparse
import asyncio
import os

from cli.errors import CommandError
from cli.logs import log_to_stderr
from cli.parent import end_with_parent
from cli.settings import Settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--id", help="id of this worker in logs and as leader; made up when left out")


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    from statestore.errors import StoreConfigurationError
    from workers.serve import serve

    log_to_stderr(settings.router.log_level)
    end_with_parent(os.environ)
    try:
        asyncio.run(serve(settings.worker, settings.scheduling, settings.store, settings.pools, worker_id=arguments.id))
    except (StoreConfigurationError, OSError) as error:
        raise CommandError(str(error)) from error
    return 0
