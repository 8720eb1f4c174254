"""A transport that is always there."""

from __future__ import annotations


class IdleTransport:
    """Takes what is written, and has nothing to send."""

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def writelines(self, data: object) -> None: ...

    def abort(self) -> None: ...

    def get_extra_info(self, name: str) -> object:
        return self if name == "sslcontext" else None
