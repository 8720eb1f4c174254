"""``python -m scripts.documents docs`` renews the generated pages, parts of pages and pictures in the folder."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from scripts.documents import configuration, interfaces, leader_jobs, phase_diagrams, redis_keys

GENERATORS: Final[tuple[Callable[[Path], Mapping[Path, str]], ...]] = (
    configuration.files,
    interfaces.files,
    leader_jobs.files,
    phase_diagrams.files,
    redis_keys.files,
)


def files(docs: Path) -> Mapping[Path, str]:
    """Every generated file of the folder, as it should be."""
    return {path: text for generate in GENERATORS for path, text in generate(docs).items()}


if __name__ == "__main__":
    for path, text in files(Path(sys.argv[1])).items():
        path.write_text(text, "utf-8")
