def prefix_hashes(data: bytes | memoryview, seed: int, block_bytes: int, /) -> tuple[tuple[int, ...], int | None]:
    """Does what ``hashes.hashes_in_python`` does."""
