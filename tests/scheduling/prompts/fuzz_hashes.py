"""Compares an extension's hashes with those of Python: ``python -m`` with a path and a number of texts."""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

from dualmap.scheduling.prompts.hashes import hashes_in_python
from tests.support.sanitized import loaded


def main(path: str, texts: str) -> None:
    extension, random = loaded(Path(path)), Random(1)
    for number in range(int(texts)):
        size = number if number < 1200 else random.randrange(5000)
        data, seed = random.randbytes(size), random.choice((0, 1, 2**64 - 1, random.getrandbits(64)))
        block_bytes = random.choice((1, 3, 8, 16, 17, 64, 128, 129, 240, 241, 512, 1024, 1025, 2048, size + 1))
        expected = hashes_in_python(data, seed, block_bytes)
        assert extension.prefix_hashes(data, seed, block_bytes) == expected, (number, size, block_bytes)
    print(texts)


if __name__ == "__main__":
    main(*sys.argv[1:])
