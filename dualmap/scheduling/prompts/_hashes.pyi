def prefix_hashes(data: bytes | memoryview, seed: int, block_bytes: int, /) -> tuple[tuple[int, ...], int | None]:
    """As ``hashes.hashes_in_python``."""
