"""The protocol-level data plane: inference requests spliced to instances, everything else handed to an ASGI app."""

from __future__ import annotations

from dualmap.router.http.client import ClientConnection
from dualmap.router.http.plane import DataPlane, build_data_plane
from dualmap.router.http.uvicorn_protocol import http_protocol

__all__ = ["ClientConnection", "DataPlane", "build_data_plane", "http_protocol"]
