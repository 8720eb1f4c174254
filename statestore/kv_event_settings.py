"""Settings: where instances publish their KV events."""

from __future__ import annotations

import re
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

_PLACEHOLDER = re.compile(r"\{(host|port)(?:([+-])(\d{1,5}))?\}")


def _endpoint_template(template: str) -> str:
    try:
        urlsplit(_fill(template, "host", 30_000))
        fits = re.fullmatch(r"(tcp://.+:\d+|ipc://.+)", _fill(template, "host", 30_000)) is not None
    except ValueError:
        fits = False
    if not fits:
        told = "{host} and {port+10000} are filled in"
        raise PydanticCustomError("endpoint", "must be tcp://HOST:PORT; {told}", {"told": told})
    return template


def _fill(template: str, host: str, port: int) -> str:
    def filled(found: re.Match[str]) -> str:
        name, sign, offset = found.groups()
        if name == "host":
            return host
        return str(port + (int(offset or 0) if sign != "-" else -int(offset)))

    return _PLACEHOLDER.sub(filled, template)


EventEndpoint = Annotated[str, AfterValidator(_endpoint_template)]


class KvEventSettings(BaseModel):
    """Where instances publish their KV events (vLLM's ``--kv-events-config``)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    endpoint: EventEndpoint = Field(
        description="ZeroMQ endpoint; {host} and {port} are those of the instance's URL, {port+10000} adds to it;"
        " a rank of data parallelism adds its number to the port, as vLLM does"
    )
    replay_endpoint: EventEndpoint | None = Field(
        None, description="endpoint for missed events, written the same way; without one a gap empties the view"
    )
    topic: str = Field("", description="topic that is published; empty: any")

    def endpoint_of(self, url: str, rank: int | None) -> str:
        """Where the instance of this base URL publishes."""
        return _endpoint(self.endpoint, url, rank)

    def replay_endpoint_of(self, url: str, rank: int | None) -> str | None:
        return None if self.replay_endpoint is None else _endpoint(self.replay_endpoint, url, rank)


def _endpoint(template: str, url: str, rank: int | None) -> str:
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    filled = _fill(template, f"[{host}]" if ":" in host else host, port)
    if not rank or not filled.startswith("tcp://"):
        return filled + (f"_dp{rank}" if rank else "")
    address, _, base = filled.rpartition(":")
    return f"{address}:{int(base) + rank}"
