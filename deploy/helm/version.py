"""The version of pyproject.toml, where others state it: `python deploy/helm/version.py` writes it there.

`make docs` runs it. A chart must state its version as text, and a command in a document is copied as it stands.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VERSION = str(tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"])

STATED = {
    "deploy/helm/dualmap/Chart.yaml": r"(?m)^(?P<before>(?:version|appVersion): )\S+",
    "docs/getting-started/kubernetes.md": r"(?P<before>\bdualmap-fleet:)\d[\w.]*",
}
"""Files that state the version, with a pattern of the words before it."""


def texts() -> dict[str, str]:
    """The text of each of these files, by its name, as it must be."""
    return {
        name: re.sub(pattern, rf"\g<before>{VERSION}", (ROOT / name).read_text("utf-8"))
        for name, pattern in STATED.items()
    }


if __name__ == "__main__":
    for name, text in texts().items():
        (ROOT / name).write_text(text, "utf-8")
