"""Provenance of figures: the commit, the day and the command, so that they can be made again."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from dualmap.runtime.extras import package_version

_GIT_TIMEOUT_S = 10
_LEFT_OUT = {"--out", "--cache", "--workers"}
"""Options with a value that change where or how fast, not what."""


@dataclass(frozen=True, slots=True)
class Provenance:
    """Provenance of one experiment."""

    commit: str
    """Commit, with a ``+`` behind it where files differed from it; a version where there is no repository."""
    date: str
    """UTC, as 2026-11-22."""
    command: str

    @classmethod
    def here(cls, words: Sequence[str]) -> Provenance:
        """The provenance of a command that starts now, by the words behind ``dualmap``."""
        return cls(
            _commit(), datetime.now(UTC).date().isoformat(), shlex.join(("dualmap", *_without_output_options(words)))
        )

    @property
    def sentence(self) -> str:
        return f"Commit {self.commit}, {self.date}: `{self.command}`"


def _without_output_options(words: Sequence[str]) -> list[str]:
    kept: list[str] = []
    skipped = False
    for word in words:
        if skipped or word == "--quiet" or word.split("=")[0] in _LEFT_OUT:
            skipped = not skipped and word in _LEFT_OUT
        else:
            kept.append(word)
    return kept


def _commit() -> str:
    try:
        commit = _git("rev-parse", "--short=10", "HEAD").strip()
        return commit + ("+" if _git("status", "--porcelain", "--untracked-files=no").strip() else "")
    except (OSError, subprocess.SubprocessError):
        return package_version()


def _git(*words: str) -> str:
    folder = Path(__file__).parent
    done = subprocess.run(
        ("git", *words), cwd=folder, capture_output=True, text=True, check=True, timeout=_GIT_TIMEOUT_S
    )
    return done.stdout
