"""Images in requests."""

from __future__ import annotations

import struct
import zlib
from base64 import b64encode


def png(width: int, height: int, content: int = 0) -> bytes:
    """A gray PNG; other ``content`` gives other bytes, and another shade."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    rows = (b"\0" + bytes([content % 256]) * (3 * width)) * height
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def png_url(width: int, height: int, content: int = 0) -> str:
    return f"data:image/png;base64,{b64encode(png(width, height, content)).decode()}"
