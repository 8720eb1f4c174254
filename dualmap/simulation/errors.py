"""Errors of the simulation package: every error of user input is one of these."""

from __future__ import annotations

from pathlib import Path


class SimulationError(Exception):
    """Root of everything the simulation raises; the command line reports it and exits with ``exit_code``."""

    exit_code = 2
    """Exit code of a command line that cannot be used; 1 where it can, and the work fails."""


class TraceError(SimulationError):
    """A trace cannot be used: which file, which line (1-based, None for the file as a whole), and why."""

    def __init__(self, source: str | Path, line: int | None, reason: str) -> None:
        self.source = str(source)
        self.line = line
        self.reason = reason
        place = self.source if line is None else f"{self.source}:{line}"
        super().__init__(f"{place}: {reason}")


class ScenarioError(SimulationError):
    """A run cannot be simulated as it is described; the message says why."""
