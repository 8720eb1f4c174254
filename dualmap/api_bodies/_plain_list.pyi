def plain_list(body: bytes, quoted: bytes, only: bytes, api: int, /) -> tuple[bytes, bytes] | None:
    """See ``plain_list.plain_list``.

    Args:
        quoted: name of the list, as JSON.
        only: JSON that takes the place of the messages.
    """

def plain_items(
    body: bytes, begin: int, stretch: int, api: int, /
) -> tuple[bytes, list[tuple[int, int, int, int, int, int]]] | None:
    """See ``plain_list.plain_items``."""
