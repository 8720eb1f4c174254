"""The protocol-level data plane: inference requests spliced to instances, everything else handed to an ASGI app."""

from __future__ import annotations

from router.http.client import ClientConnection
from router.http.observer import NullObserver, Observer
from router.http.plane import DataPlane, build_data_plane
from router.http.protocol import http_protocol

__all__ = ["ClientConnection", "DataPlane", "NullObserver", "Observer", "build_data_plane", "http_protocol"]
