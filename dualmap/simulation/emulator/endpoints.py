"""The emulated server's paths: vLLM's own, and switches for faults under ``/emulator/``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dualmap.simulation.emulator.connection import HttpRequest, Responder
from dualmap.simulation.emulator.engine_control import EngineControl
from dualmap.simulation.emulator.errors import ApiError
from dualmap.simulation.emulator.faults import Faults
from dualmap.simulation.emulator.generation_request import Limits
from dualmap.simulation.emulator.generator import Generator
from dualmap.simulation.emulator.inference import Inference
from dualmap.simulation.emulator.routes import Route, Routes
from dualmap.simulation.emulator.served_names import ServedNames
from dualmap.simulation.emulator.server_info import ServerInfo, configuration_routes
from dualmap.simulation.emulator.settings import EmulatorSettings

VERSION = "0.32.0+emulated"
_RESPONSES = "/v1/responses/"


class Endpoints:
    """Answers the requests of one emulated server for one of its engines.

    Args:
        generators: of all its engines, by rank; ``generator`` is one of them.
        die: see ``Faults``.
    """

    def __init__(
        self, settings: EmulatorSettings, generator: Generator, generators: Sequence[Generator],
        die: Callable[[bool, float | None], None], names: ServedNames,
    ) -> None:  # fmt: skip
        limits = limits_of(settings, names)
        self.faults = Faults(generator, die)
        inference = Inference(generator, limits, self.faults, VERSION, stores=settings.store_responses)
        self._stored_response = Route(inference.stored_response)
        pulls: Routes = {}
        if generator.peer_pulls is not None:
            pulls = {**generator.peer_pulls.routes(), **configuration_routes(generator, settings)}
        self._routes: Routes = {
            **inference.routes(),
            **ServerInfo(generators, limits, VERSION).routes(),
            **pulls,
            **EngineControl(generators, inference.renders(), scale_out=settings.scale_out).routes(),
            **self.faults.routes(),
            **generator.kv_legs.routes(),
        }

    def handle(self, request: HttpRequest, responder: Responder) -> None:
        """Answer, now or later; every ApiError becomes the JSON of its API."""
        route = self._find(request, responder)
        if route is None:
            return
        try:
            route.handler(request, responder)
        except ApiError as error:
            responder.send(error.status, route.error_body(error))

    def _find(self, request: HttpRequest, responder: Responder) -> Route | None:
        methods = self._routes.get(request.path)
        if methods is None and request.path.startswith(_RESPONSES):
            return self._stored_response
        if methods is None:
            responder.send(404, b'{"detail":"Not Found"}')
            return None
        route = methods.get("GET" if request.method == "HEAD" else request.method)
        if route is None:
            responder.send(405, b'{"detail":"Method Not Allowed"}')
        return route


def limits_of(settings: EmulatorSettings, names: ServedNames) -> Limits:
    """The limits of requests to a server with these settings; with them, a request's answer is known."""
    config = settings.engine_config()
    return Limits(
        names=names,
        max_model_len=config.max_request_tokens,
        block_tokens=config.block_tokens,
        seed=settings.seed,
    )
