"""Compares an extension's readers and writers of heads with what stands for them: ``python -m`` with a path and a
number."""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

from dualmap.router.http.plain_heads import lines_in_python, without_in_python
from tests.router.http.near_heads import compared
from tests.support.sanitized import loaded


def main(path: str, count: str) -> None:
    extension, random = loaded(Path(path)), Random(1)
    requests, answers = compared(random, int(count), extension.read_request, extension.read_answer)
    assert min(requests, answers) > int(count) // 6, (requests, answers)
    for _ in range(int(count)):
        fields = [
            (random.randbytes(random.randrange(3)), random.randbytes(random.choice((0, 1, 7, 100, 9000))))
            for _ in range(random.choice((0, 1, 5, 200)))
        ]
        dropped = frozenset([name for name, _ in fields if random.random() < 0.5])
        assert extension.without(fields, dropped) == without_in_python(fields, dropped)
        begin, end = random.randbytes(random.randrange(20)), random.randbytes(random.randrange(20))
        assert extension.lines(begin, fields, end) == lines_in_python(begin, fields, end)
    print(count)


if __name__ == "__main__":
    main(*sys.argv[1:])
