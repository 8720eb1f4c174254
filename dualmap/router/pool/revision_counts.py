"""Figures of the requests that this replica served, by revision, while revisions have weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from dualmap.scheduling.request.machine import RequestMachine
from dualmap.scheduling.request.outcome import ANSWERED, FAILED_BY_THE_FLEET, FailureKind, Outcome
from dualmap.scheduling.revisions.figures import NO_FIGURES, Figures, Moments, figures_text

_NO_FAULT: Final = frozenset({FailureKind.DRAINED, FailureKind.NO_DECODER, FailureKind.RECOMPUTED, FailureKind.PULL})
"""Failures that say nothing of an instance's revision."""
_FAILED: Final = FAILED_BY_THE_FLEET | {Outcome.CLIENT_ERROR}
"""An instance's 4xx counts too: what one revision refuses and another one serves is a difference."""


MOST_OF_SESSION: Final = 20
"""Requests of one session that count: a revision is judged by what happens to many."""
_PLACES: Final = 1 << 16
"""Sessions are counted in so many places by their hashes, so that any number of them takes as much memory."""


class RevisionCounts:
    """Sums of sessions that began since the weights were last changed; the replica's heartbeat carries them."""

    def __init__(self) -> None:
        self._version = 0
        self._by_revision: dict[str, Figures] = {}
        self._of_sessions = bytearray(2 * _PLACES)
        """Requests that were counted of each session, by its place; twice as many places, as what may be the doing of
        clients has its own."""

    def count(self, machine: RequestMachine, version: int, slo_tpot_s: float, *, named_slo: bool = False) -> None:
        """Count a request that has ended, if its session began under the weights in force, which have this version;
        ``named_slo``: its client named the SLO. No client makes a revision look ill by itself: of one session up to
        ``MOST_OF_SESSION`` requests count, and one whose answer was a 4xx, or late by a SLO of its own."""
        revision = machine.spec.revision
        if machine.spec.cohort != version:
            return
        self._follow(version)
        by_client = machine.outcome is Outcome.CLIENT_ERROR or (named_slo and machine.on_time is False)
        place = _place_of(machine.spec.session) + by_client
        if self._of_sessions[place] >= (1 if by_client else MOST_OF_SESSION):
            return
        self._of_sessions[place] += 1
        self._add(revision, _figures_of(machine, slo_tpot_s))

    def has_enough_copies(self, version: int, session: str) -> bool:
        """Whether as many copies of a session's requests have been added as count."""
        return version == self._version and self._of_sessions[_place_of(session)] >= MOST_OF_SESSION

    def _follow(self, version: int) -> None:
        """Begin again where the weights have another version: it grows, or begins at 1 once all were forgotten."""
        if version != self._version:
            self._version, self._by_revision, self._of_sessions = version, {}, bytearray(2 * _PLACES)

    def add_copy(self, version: int, session: str, by_revision: Mapping[str, Figures]) -> None:
        """Add what a copy of a session's request showed, and the request that it is a copy of, under the weights in
        force, which have this version."""
        self._follow(version)
        place = _place_of(session)
        self._of_sessions[place] = min(self._of_sessions[place] + 1, MOST_OF_SESSION)
        for revision, figures in by_revision.items():
            self._add(revision, figures)

    def _add(self, revision: str, figures: Figures) -> None:
        self._by_revision[revision] = self._by_revision.get(revision, NO_FIGURES).plus(figures)

    @property
    def text(self) -> str:
        """The sums as a heartbeat carries them; empty: there are none."""
        return figures_text(self._version, self._by_revision)


def _place_of(session: str) -> int:
    return 2 * (int(session or "0", 16) % _PLACES)


def _figures_of(machine: RequestMachine, slo_tpot_s: float) -> Figures:
    outcome, usage, first_token_s, ended_s = machine.outcome, machine.usage, machine.first_token_s, machine.ended_s
    failed = outcome in _FAILED or any(each.kind not in _NO_FAULT for _, each, _ in machine.failures)
    ttft = tpot = Moments()
    slow = False
    if first_token_s is not None:
        ttft = Moments.of(first_token_s)
    output_tokens = usage.output_tokens if usage is not None else None
    if outcome in ANSWERED and first_token_s is not None and ended_s is not None and (output_tokens or 0) > 1:
        assert output_tokens is not None
        each_s = (ended_s - first_token_s) / (output_tokens - 1)
        tpot, slow = Moments.of(each_s), each_s > slo_tpot_s
    on_time = machine.on_time
    return Figures(
        1,
        int(failed),
        int(on_time is not None),
        int(on_time is False),
        tpot.count,
        int(slow),
        ttft=ttft,
        tpot=tpot,
        prompt_tokens=0 if usage is None else usage.prompt_tokens or 0,
        hit_tokens=0 if usage is None else usage.cached_tokens or 0,
        output_tokens=output_tokens or 0,
    )
