"""The FastAPI app of a replica: health, metrics, models and administration. Inference bytes never pass here."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, RedirectResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route

from dualmap.router.admin import (
    adapters,
    engine_control,
    explanations,
    inspection,
    instances,
    models,
    revisions,
    rollouts,
    served_traffic,
    tenants,
    usage,
)
from dualmap.router.admin import settings as fleet_settings
from dualmap.router.admin.auth import admin_finder, caller_of, require_caller
from dualmap.router.batches import admin_routes as batch_admin
from dualmap.router.batches import routes as batch_routes
from dualmap.router.batches.service import Batches
from dualmap.router.errors import (
    InvalidRequestError,
    MethodNotAllowedError,
    NotFoundError,
    RouterError,
    error_body,
    error_headers,
    from_exception,
)
from dualmap.router.http.paths import ABORT_PATH, likely_meant
from dualmap.router.replica.runtime import Runtime
from dualmap.router.requests.metaserver import FOLDER as METASERVER
from dualmap.router.serving.health import health_report
from dualmap.router.serving.reference_page import HEADERS as PAGE_HEADERS
from dualmap.router.serving.reference_page import reference_page
from dualmap.router.settings import RouterSettings
from dualmap.router.telemetry.port_metrics import COUNTS_PATH as METRIC_COUNTS
from dualmap.router.tenants.directory import TenantDirectory, usable_model, usable_models
from dualmap.router.ui.routes import add_ui
from dualmap.runtime.complaints import in_words
from dualmap.runtime.extras import package_version
from dualmap.runtime.loopback import is_loopback
from dualmap.statestore.errors import StoreError

log = logging.getLogger(__name__)

DESCRIPTION = """
Operation of one replica of a DualMap fleet. Every change here applies to the whole fleet, through its shared state; any
replica answers for all of it.

Inference (`/v1/chat/completions`, `/v1/completions` and the other paths of vLLM) is served on the same port.
"""


_ADMIN = (
    instances,
    revisions,
    rollouts,
    models,
    tenants,
    inspection,
    explanations,
    served_traffic,
    fleet_settings,
    engine_control,
    usage,
)


def create_app(runtime: Runtime, batches: Batches | None = None) -> FastAPI:
    """The app over a started or starting runtime; it starts and stops nothing itself. ``batches``: None where no files
    are kept."""
    settings = runtime.context.settings
    # No redirects: they would contain the host that the client sent.
    app = FastAPI(
        title="DualMap router", version=package_version(), description=DESCRIPTION, redirect_slashes=False,
        docs_url=None, redoc_url=None,
    )  # fmt: skip
    app.state.runtime = runtime
    app.state.batches = batches
    app.state.started_unix_s = int(time.time())
    _answer_errors(app)
    _add_operation(app, runtime)
    _warn_of_open_admin(settings, runtime.tenants)
    find_admin = admin_finder(settings, runtime.tenants, runtime.advertised_url)
    needs_admin = Depends(find_admin)
    of_admins = [*(part.routes for part in _ADMIN), batch_admin.routes]
    of_clients = [adapters.routes_for(find_admin), usage.own_routes, batch_routes.routes]
    app.state.parts = [*of_admins, *of_clients]
    for part in of_admins:
        app.include_router(part, dependencies=[needs_admin])
    for part in of_clients:
        app.include_router(part)
    if settings.ui:
        add_ui(app, runtime, needs_admin)
    return app


def _warn_of_open_admin(settings: RouterSettings, directory: TenantDirectory) -> None:
    """Warn where others may have access: inference requires keys, or other machines reach the replica."""
    if settings.admin_is_open and (directory or not is_loopback(settings.host)):
        log.warning(
            "/admin requires no key: anyone who reaches this replica may add, drain and remove instances;"
            " set router.admin_key or router.admins"
        )


def _add_operation(app: FastAPI, runtime: Runtime) -> None:
    needs_api_key = require_caller(runtime.tenants)

    async def model_cards() -> dict[str, Any]:
        pools = runtime.pools.pools
        await asyncio.gather(*(pool.view.look() for pool in pools.values()))
        lengths = await asyncio.gather(*map(runtime.model_lengths.of, pools.values()))
        known = {name: length for name, length in zip(pools, lengths, strict=True) if length is not None}
        return runtime.pools.model_cards(app.state.started_unix_s, known)

    @app.get("/", include_in_schema=False)
    async def root() -> Response:
        """The live page, for those who open the endpoint in a browser. The place is relative: no host in it."""
        return RedirectResponse("ui" if runtime.context.settings.ui else "docs")

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return HTMLResponse(reference_page(app.openapi()), headers=PAGE_HEADERS)

    @app.get("/health", tags=["operation"])
    async def health() -> dict[str, Any]:
        """Alive. Reports when the replica runs without its shared state."""
        return health_report(runtime)

    @app.get("/ready", tags=["operation"])
    async def ready() -> Response:
        """200 while the replica may receive traffic; 503 before it has joined the fleet, and while it drains."""
        accepts = runtime.accepts_traffic
        return JSONResponse(health_report(runtime) | {"ready": accepts}, status_code=200 if accepts else 503)

    @app.get("/metrics", tags=["operation"], response_class=PlainTextResponse)
    async def metrics(request: Request) -> Response:
        """Prometheus metrics, and the fleet as the shared state sees it: at `router.ops_port` of this replica; at the
        endpoint of all replicas that share its port, with vLLM's names for what tools read of a server."""
        await runtime.read_metrics()
        port = (request.scope.get("server") or ("", None))[1]
        if runtime.port and str(port) != runtime.port:
            page = generate_latest(runtime.context.metrics.registry)
        else:
            page = await runtime.port_metrics.page()
        return Response(page, media_type=CONTENT_TYPE_LATEST)

    @app.get(METRIC_COUNTS, include_in_schema=False)
    async def metric_counts() -> Response:
        """The counts of this replica alone, for replicas that share its port."""
        runtime.read_own_gauges()
        return Response(runtime.port_metrics.counts(), media_type="application/json")

    @app.post("/ping", include_in_schema=False)
    @app.get("/ping", tags=["operation"])
    async def ping() -> Response:
        """The status of `/ready` without a body, for platforms that use it."""
        return Response(status_code=200 if runtime.accepts_traffic else 503)

    @app.get("/version", tags=["operation"])
    async def version() -> dict[str, str]:
        """Version of this replica's package."""
        return {"version": package_version()}

    @app.post(METASERVER + "{token}", include_in_schema=False)
    async def metaserver(token: str, params: dict[str, Any]) -> dict[str, bool]:
        """A decoder of a layerwise connector requests the prefill leg of its request."""
        if not runtime.context.metaserver.requested(token, params):
            raise NotFoundError("no request of this replica waits for such a prefill leg; send the request again")
        return {"found": True}

    @app.get("/load", tags=["operation"])
    async def load() -> dict[str, int]:
        """Requests in flight and held on this replica."""
        return {"server_load": len(runtime.context.live)}

    app.add_api_route(
        ABORT_PATH, engine_control.control, methods=["POST"], tags=["operation"], name="abort_requests",
        operation_id="abort_requests", dependencies=[Depends(needs_api_key)],
        description="vLLM's own, at every instance in service: only one has the request.",
    )  # fmt: skip

    @app.get("/v1/models", tags=["models"])
    async def list_models(request: Request) -> Mapping[str, Any]:
        """Every model, alias and LoRA adapter of all pools that the caller may use, in OpenAI's shape."""
        caller = caller_of(runtime.tenants, request)
        return usable_models(caller, await model_cards())

    @app.get("/v1/models/{model:path}", tags=["models"])
    async def model(model: str, request: Request) -> Mapping[str, Any]:
        """One model by its name, which the caller may use."""
        caller = caller_of(runtime.tenants, request)
        return usable_model(caller, await model_cards(), model)


def _answer_errors(app: FastAPI) -> None:
    """Every error leaves in OpenAI's shape, by the one table."""

    def answer(error: RouterError) -> Response:
        return JSONResponse(error_body(error), status_code=error.status, headers=error_headers(error))

    async def router_error(_: Request, error: Exception) -> Response:
        return answer(from_exception(error))

    async def validation_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return answer(_invalid_request(error.errors()[0]))

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            allowed = _allowed_methods(request)
            refusal: RouterError = MethodNotAllowedError(f"{request.url.path} takes {allowed}")
            response = answer(refusal)
            response.headers["allow"] = allowed
            return response
        if error.status_code == HTTPStatus.NOT_FOUND:
            return answer(NotFoundError(f"there is nothing at {request.url.path}; {_path_hint(request)}"))
        return answer(InvalidRequestError(str(error.detail)))

    for kind in (RouterError, StoreError, Exception):
        app.add_exception_handler(kind, router_error)
    app.add_exception_handler(RequestValidationError, validation_error)
    app.add_exception_handler(HTTPException, http_error)


def _invalid_request(first: Mapping[str, Any]) -> InvalidRequestError:
    """The first of FastAPI's validation errors, as a message to the client."""
    if first["type"] == "json_invalid":  # its place is an offset, no field
        return InvalidRequestError(
            f"the body is not valid JSON: {first['ctx']['error']} at character {first['loc'][-1]}"
        )
    if first["loc"] == ("body",):  # bytes, a list, nothing at all
        return InvalidRequestError("the body must be a JSON object, sent with content-type: application/json")
    where = ".".join(str(part) for part in first["loc"] if part != "body")
    said = in_words(first)
    return InvalidRequestError(f"{where}: {said}" if where else said, param=where or None)


def _methods_at(path: str, request: Request) -> set[str]:
    """Every method of a path of the app; empty for one that it has not."""
    routes = [*request.app.routes, *(route for part in request.app.state.parts for route in part.routes)]
    scope = {**request.scope, "path": path}
    return {
        method
        for route in routes
        if isinstance(route, Route) and route.matches(scope)[0] is not Match.NONE
        for method in route.methods or ()
    }


def _path_hint(request: Request) -> str:
    """The path that a client with a wrong base URL probably meant."""
    meant = likely_meant(request.url.path)
    return f"did you mean {meant}?" if meant is not None else "see /docs"


def _allowed_methods(request: Request) -> str:
    """Every method of the path; Starlette's error knows those of the first route that matches it alone."""
    methods = _methods_at(request.url.path, request)
    return ", ".join(sorted(methods | {"HEAD"} if "GET" in methods else methods))
