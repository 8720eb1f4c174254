"""``dualmap picker``: one endpoint picker, which Envoy asks where requests go."""

from __future__ import annotations

import argparse

from dualmap.cli.errors import UnfitSettingsError
from dualmap.cli.serve_router import not_listening_at, run_replica
from dualmap.cli.settings import Settings
from dualmap.runtime.collector import uncollected


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", help="beginning of this picker's id; --router.replica_id sets all of it")
    parser.add_argument(
        "--test-headers",
        action="store_true",
        help="obey test-epp-endpoint-selection, and answer with x-conformance-test-served-endpoint: for conformance"
        " tests of gateways alone",
    )


def run(arguments: argparse.Namespace, settings: Settings) -> int:
    from dualmap.runtime.extras import how_to_install

    picker = settings.picker
    try:
        with uncollected():
            from dualmap.router.serving.picker_door import door_of
    except ImportError as error:
        raise UnfitSettingsError(f"an endpoint picker needs more: {how_to_install('picker')} ({error})") from error

    def announce(port: int, ops_port: int | None) -> str:
        return f"an endpoint picker serves port {port}, its own port is {ops_port}"

    own = {
        "host": picker.host,
        "port": picker.ops_port,
        "ops_port": None,
        "tls_certificate": None,
        "tls_key": None,
        "tls_client_ca": None,
    }
    of_picker = settings.model_copy(update={"router": settings.router.model_copy(update=own)})
    with not_listening_at("--picker.port PORT, --picker.ops_port or --picker.health_port"):
        return run_replica(
            arguments.name, of_picker, announce, door_of(picker, test_headers=arguments.test_headers), picker.port
        )
