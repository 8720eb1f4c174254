"""A rollout: a new revision's weight in steps, each held until the gate has enough evidence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, asdict, field, replace
from enum import StrEnum
from itertools import pairwise
from math import isfinite
from typing import Any, Final

import orjson

from dualmap.scheduling.revisions.figures import NO_FIGURES, Figures, total
from dualmap.scheduling.revisions.gate import (
    Bounds,
    Events,
    Judgement,
    OwnEvents,
    Standing,
    judge,
    overall,
)
from dualmap.scheduling.revisions.weights import RevisionWeights, WeightError, with_shadow, with_weights
from dualmap.scheduling.values import value

STEPS: Final = (5.0, 10.0, 25.0, 50.0, 100.0)
"""Percent of all sessions."""
WARM_UP_REQUESTS: Final = 100
"""Requests of a new revision whose first tokens and hits say nothing of it: its caches have no prefix yet that sessions
share."""


class RolloutState(StrEnum):
    RUNNING = "running"
    PAUSED = "paused"
    DONE = "done"
    ROLLED_BACK = "rolled back"


ENDED: Final = frozenset({RolloutState.DONE, RolloutState.ROLLED_BACK})


@value
class Rollout:
    """The rollout of a revision, as the store keeps it. The last one stays until another begins."""

    revision: str
    steps: tuple[float, ...] = STEPS
    step: int = 0
    """The step that is held now."""
    state: RolloutState = RolloutState.RUNNING
    _: KW_ONLY
    bounds: Bounds = Bounds()
    version: int = 0
    """The version of the weights since the step began: the figures are of sessions that began since."""
    since_ms: int = 0
    figures: Mapping[str, Figures] = field(default_factory=dict)
    """What was seen in this step, by revision."""
    own: Mapping[str, Mapping[str, Events]] = field(default_factory=dict)
    """Events of this step that operators reported, by name and revision."""
    why: str = ""
    """Why it is in its state, in words."""
    shadow: float = 0.0
    """Percent of all sessions that are copied to the revision before it serves any; 0: it serves at once."""
    cold: Mapping[str, Figures] | None = None
    """What was seen in this step, by revision, until the caches of the new one were warm; None: they are not yet. First
    tokens and hits are compared by what came since."""

    @property
    def is_shadowing(self) -> bool:
        """Whether its revision gets copies, and answers nobody yet."""
        return self.step < 0

    @property
    def percent(self) -> float:
        return 0.0 if self.is_shadowing else self.steps[self.step]

    def text(self) -> bytes:
        """The record as the store keeps it."""
        return orjson.dumps(
            {
                "revision": self.revision,
                "steps": list(self.steps),
                "step": self.step,
                "state": self.state.value,
                "bounds": self.bounds.by_name,
                "version": self.version,
                "since_ms": self.since_ms,
                "figures": _texts(self.figures),
                "own": {name: {rev: [each.of, each.bad] for rev, each in by.items()} for name, by in self.own.items()},
                "why": self.why,
                "shadow": self.shadow,
                "cold": None if self.cold is None else _texts(self.cold),
            }
        )

    @classmethod
    def parse(cls, text: bytes) -> Rollout:
        """Raises ValueError, or the like, where it is no such record."""
        given = orjson.loads(text)
        found = cls(
            given["revision"],
            tuple(map(float, given["steps"])),
            given["step"],
            RolloutState(given["state"]),
            bounds=Bounds.of(given["bounds"]),
            version=given["version"],
            since_ms=given["since_ms"],
            figures=_parsed(given["figures"]),
            own={
                name: {rev: Events(int(of), int(bad)) for rev, (of, bad) in by.items()}
                for name, by in given["own"].items()
            },
            why=given["why"],
            shadow=float(given.get("shadow", 0.0)),
            cold=None if given.get("cold") is None else _parsed(given["cold"]),
        )
        assert isinstance(found.revision, str) and -1 <= found.step < len(found.steps)
        return found

    def with_figures(self, grown: Mapping[str, Figures]) -> Rollout:
        """The rollout with what came, by revision."""
        names = sorted({*self.figures, *grown})
        figures = {name: self.figures.get(name, NO_FIGURES).plus(grown.get(name, NO_FIGURES)) for name in names}
        are_warm = figures.get(self.revision, NO_FIGURES).requests >= WARM_UP_REQUESTS
        cold = figures if self.cold is None and are_warm else self.cold
        return replace(self, figures=figures, cold=cold)

    def judgements(self) -> tuple[Judgement, ...]:
        """What this step has shown so far."""
        before, new = self.sides()
        return judge(before, new, self.bounds, self._own_events())

    def sides(self) -> tuple[Figures, Figures]:
        """The figures of all other revisions together, and those of the new one, as they are judged."""
        others = total(self._judged(name) for name in self.figures if name != self.revision)
        return others, self._judged(self.revision)

    def _judged(self, revision: str) -> Figures:
        """The figures of a revision, first tokens and hits since caches are warm. Until then the new one has none."""
        seen = self.figures.get(revision, NO_FIGURES)
        if self.cold is not None:
            return seen.since_warm(self.cold.get(revision, NO_FIGURES))
        return seen.since_warm(seen) if revision == self.revision else seen

    def _own_events(self) -> OwnEvents:
        found: dict[str, tuple[Events, Events]] = {}
        for name, by in self.own.items():
            others = [each for revision, each in by.items() if revision != self.revision]
            before = Events(sum(each.of for each in others), sum(each.bad for each in others))
            found[name] = before, by.get(self.revision, Events())
        return found

    def described(self) -> dict[str, Any]:
        """All of it, for people."""
        judgements = self.judgements()
        return {
            "revision": self.revision,
            "steps": list(self.steps),
            "step": self.step + 1,
            "percent": self.percent,
            "state": self.state.value,
            "why": self.why,
            "shadow_percent": self.shadow if self.is_shadowing else 0.0,
            "per_revision": {name: _per_request(self._judged(name)) for name in sorted(self.figures)},
            "since_ms": self.since_ms,
            "standing": overall(judgements, self.sides()[1]).value,
            "judgements": [_described(each) for each in judgements],
            "requests": {name: each.requests for name, each in sorted(self.figures.items())},
        }


def _texts(by_revision: Mapping[str, Figures]) -> dict[str, str]:
    return {name: each.text for name, each in by_revision.items()}


def _parsed(texts: Mapping[str, str]) -> dict[str, Figures]:
    return {name: Figures.parse(each) for name, each in texts.items()}


def _per_request(figures: Figures) -> dict[str, float | None]:
    """What no bound is about, for people: hits, lengths, and where greedy answers part."""
    prompt, requests, differing = figures.prompt_tokens, figures.requests, figures.differing
    return {
        "hits_percent": 100 * figures.hit_tokens / prompt if prompt else None,
        "output_tokens": figures.output_tokens / requests if requests else None,
        "compared": figures.compared,
        "differing": differing,
        "agreed_tokens": figures.agreed_tokens / differing if differing else None,
    }


def _described(each: Judgement) -> dict[str, Any]:
    high = each.high if isfinite(each.high) else None
    return {**asdict(each), "standing": each.standing.value, "high": high, "text": each.text}


def checked_steps(steps: tuple[float, ...]) -> tuple[float, ...]:
    """Raises WeightError unless they grow from above 0 to 100 at most."""
    if not steps or steps[0] <= 0 or steps[-1] > 100 or any(b <= a for a, b in pairwise(steps)):
        raise WeightError("steps must grow, from above 0 to 100 %, as 5,10,25,50,100")
    return steps


@value
class Move:
    """The next state of a rollout, with the weights that go with it."""

    rollout: Rollout
    weights: RevisionWeights
    text: str
    """What happened, in words."""


def begun(
    revision: str,
    steps: tuple[float, ...],
    bounds: Bounds,
    weights: RevisionWeights,
    now_ms: int,
    *,
    shadow: float = 0.0,
) -> Move:
    """The first step: the shadow's, where a part of all sessions is to be copied first.

    Raises:
        WeightError: no other revision has a weight, or the steps make no sense.
    """
    rollout = Rollout(revision, checked_steps(steps), bounds=bounds, shadow=shadow)
    return _at_step(rollout, -1 if shadow else 0, weights, now_ms, f"rollout of {revision} begins")


def advanced(rollout: Rollout, weights: RevisionWeights, now_ms: int) -> Move | None:
    """What follows from the figures; None: nothing yet. A step that was passed leads to the next one, the last one to
    the end, and a figure that is worse takes all sessions of the revision back at once."""
    if rollout.state is not RolloutState.RUNNING:
        return None
    if weights.version != rollout.version:
        why = "the weights were changed by hand: resume to go on from there, or roll back"
        return Move(replace(rollout, state=RolloutState.PAUSED, why=why), weights, f"paused: {why}")
    judgements = rollout.judgements()
    standing = overall(judgements, rollout.sides()[1])
    if standing is Standing.OPEN:
        return None
    if standing is Standing.WORSE:
        worse = "; ".join(each.text for each in judgements if each.standing is Standing.WORSE)
        return rolled_back(rollout, weights, now_ms, f"worse {_where(rollout)}: {worse}")
    return _at_step(rollout, rollout.step + 1, weights, now_ms, f"{standing.value} {_where(rollout)}")


def _where(rollout: Rollout) -> str:
    return "as a shadow" if rollout.is_shadowing else f"at {rollout.percent:g} %"


def rolled_back(rollout: Rollout, weights: RevisionWeights, now_ms: int, why: str) -> Move:
    """The end of a rollout whose revision gets nothing any more, and whose sessions move."""
    after = with_shadow(with_weights(weights, {rollout.revision: 0.0}, move=True), "", 0.0)
    ended = replace(rollout, state=RolloutState.ROLLED_BACK, why=why, since_ms=now_ms, version=after.version)
    return Move(ended, after, f"rolled back: {why}")


def resumed(rollout: Rollout, weights: RevisionWeights, now_ms: int) -> Move:
    """A paused rollout, whose step begins again."""
    return _at_step(rollout, rollout.step, weights, now_ms, "resumed")


def _at_step(rollout: Rollout, step: int, weights: RevisionWeights, now_ms: int, why: str) -> Move:
    if step == len(rollout.steps):
        ended = replace(rollout, state=RolloutState.DONE, why=why, since_ms=now_ms)
        return Move(ended, weights, f"{why}: done, {rollout.revision} has {rollout.percent:g} %")
    if step < 0:
        after, says = with_shadow(weights, rollout.revision, rollout.shadow), f"gets copies of {rollout.shadow:g} %"
    else:
        after, says = with_weights(weights, {rollout.revision: rollout.steps[step]}), f"has {rollout.steps[step]:g} %"
    is_last = step >= 0 and rollout.steps[step] >= 100
    held = replace(
        rollout,
        step=step,
        state=RolloutState.DONE if is_last else RolloutState.RUNNING,
        version=after.version,
        since_ms=now_ms,
        figures={},
        own={},
        cold=None if rollout.cold is None else {},
        why=why,
    )
    return Move(held, after, f"{why}: {rollout.revision} {says}{', done' if is_last else ''}")
