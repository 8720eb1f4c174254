_Header = tuple[bytes, bytes]

def read_request(
    data: bytes, max_head_bytes: int, max_fields: int, /
) -> tuple[bytes, list[_Header], dict[bytes, bytes], int, int] | None:
    """See ``plain_heads.ReadRequest``."""

def read_answer(data: bytes, max_head_bytes: int, /) -> tuple[int, list[_Header], dict[bytes, bytes], int, int] | None:
    """See ``plain_heads.ReadAnswer``."""

def without(fields: list[_Header], dropped: frozenset[bytes], /) -> list[_Header]:
    """Does what ``plain_heads.without_in_python`` does."""

def lines(begin: bytes, fields: list[_Header], end: bytes, /) -> bytes:
    """Does what ``plain_heads.lines_in_python`` does."""
