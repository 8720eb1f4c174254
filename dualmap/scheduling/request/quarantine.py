"""Requests that may kill the engine that holds them: tried on one more engine, one copy at a time, then refused.

When an engine dies, every request that it held is a suspect, identified by the hash of its prompt. The next copy to be
sent, usually the retry, is its trial: other copies wait until the trial has shown a token. After a second death copies
are refused, for a time that doubles with every further death. A completed trial clears the prompt.

Blame needs a control. An instance that has answered nothing since it died last was dead before the request came. If as
many other instances died at the same time as under the prompt, they have a cause in common, and it is not the prompt: a
restart of all engines, say.

Each replica has a memory of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from dualmap.scheduling.backoff import backoff_s
from dualmap.scheduling.values import value

FIRST_REFUSAL_S: Final = 60.0
LONGEST_REFUSAL_S: Final = 1800.0
MEMORY_S: Final = 3600.0
"""A suspect is forgotten this long after the last death."""
TRIAL_S: Final = 10.0
"""Copies wait this long for a trial at most: a prompt that kills does so when the engine starts it."""
SURVIVED_S: Final = 2.0
"""An engine that has answered a prompt for this long has survived it: what kills it later is something else."""
ONE_DEATH_S: Final = 5.0
"""An engine's requests break one after the other: within this time it died once."""
COMMON_CAUSE_S: Final = 5.0
"""Instances that are lost within this time of each other may have been lost for one reason."""
LOSS_MEMORY_S: Final = 60.0
MAX_SUSPECTS: Final = 16_384
"""The oldest suspects are forgotten first."""


@dataclass(slots=True)
class Suspect:
    """A prompt that an engine held when it died."""

    deaths: int = 0
    last_death_s: float = 0.0
    died_at_s: dict[str, float] = field(default_factory=dict)
    """Time of the last death of each instance that died."""
    pardoned: bool = False
    """Deaths of it were put down to a common cause, which is done once."""
    trial: Trial | None = None

    @property
    def names(self) -> str:
        """The instances that died."""
        return ", ".join(self.died_at_s)

    @property
    def refused_until_s(self) -> float:
        if self.deaths < 2:
            return self.last_death_s
        refusal_s = backoff_s(self.deaths - 1, first_s=FIRST_REFUSAL_S, longest_s=LONGEST_REFUSAL_S)
        return self.last_death_s + refusal_s


class Trial:
    """The one copy of a suspect that may be sent now. Its holder must call ``end``."""

    def __init__(self, began_s: float, on_end: Callable[[bool], None]) -> None:
        self.began_s = began_s
        self.passed = False
        """Other copies need not wait for it: the engine is still alive, or the trial is over."""
        self._on_end = on_end
        self._waiting: list[Callable[[], None]] = []

    def when_passed(self, call: Callable[[], None]) -> None:
        """Call this once other copies need not wait any more."""
        if self.passed:
            call()
        else:
            self._waiting.append(call)

    def passes(self) -> None:
        """The engine has given a token: it survives the prompt so far."""
        self.passed = True
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call()

    def end(self, *, completed: bool) -> None:
        """The copy is over."""
        self._on_end(completed)
        self.passes()


@value
class OtherTrial:
    """Another copy of the prompt is on trial: wait until it has passed, and try again."""

    trial: Trial
    within_s: float
    """The longest wait. Time that has passed counts as a token that was shown."""


@value
class Quarantined:
    """The prompt is refused."""

    deaths: int
    """Engines that died while they held it."""
    retry_after_s: float


Admission = Trial | OtherTrial | Quarantined | None
"""Verdict on a request before it is sent. It may be sent if this is None, or if it is the trial itself."""


class Quarantine:
    """The suspects of one pool on one replica. Other requests only pay for one dictionary lookup.

    Times are monotonic seconds.
    """

    def __init__(self, warn: Callable[[str], None] = lambda text: None) -> None:
        """``warn`` gets what an operator should know."""
        self._warn = warn
        self.suspects: dict[int, Suspect] = {}
        self._answered_s: dict[str, float] = {}
        """Time at which each instance last showed that it lives."""
        self._died_s: dict[str, float] = {}
        """Time at which the first request of each dead instance broke."""
        self._lost_s: dict[str, float] = {}
        """Time at which each instance was first seen to answer nothing any more. Instances that a prompt is refused for
        are left out."""
        self._missed_s: dict[str, float] = {}
        """Time at which each such instance was last seen."""

    def answered(self, instance_id: str, now_s: float) -> None:
        """The instance gave a token, or a whole answer."""
        self._answered_s[instance_id] = now_s

    def has_answered(self, instance_id: str, since_s: float) -> bool:
        """Whether the instance has given a token, or a whole answer, since then."""
        return self._answered_s.get(instance_id, -math.inf) >= since_s

    def unreachable(self, instance_id: str, now_s: float) -> None:
        """No connection could be made to the instance, or it was closed unanswered."""
        self._lose(instance_id, now_s)

    def lost(self, now_s: float) -> frozenset[str]:
        """Instances that died, or could not be reached, a short while ago, and have answered nothing since."""
        since_s = now_s - LOSS_MEMORY_S
        return frozenset(
            name
            for name, seen_s in self._missed_s.items()
            if seen_s > max(since_s, self._answered_s.get(name, since_s))
        )

    def _lose(self, instance_id: str, now_s: float) -> None:
        self._missed_s[instance_id] = now_s
        seen_s = self._lost_s.get(instance_id, self._died_s.get(instance_id))
        if seen_s is None or self._answered_s.get(instance_id, seen_s) > seen_s:
            self._lost_s[instance_id] = now_s

    def died(self, prompt_hash: int | None, instance_id: str, request_id: str, sent_s: float, now_s: float) -> None:
        """The instance's engine seems to have died while it held a request of this prompt, sent there at ``sent_s``.
        None: of a prompt that it had survived."""
        self._lose(instance_id, now_s)
        if not self._lived(instance_id, sent_s, now_s) or prompt_hash is None:
            return
        suspect = self.suspects.pop(prompt_hash, None) or Suspect()
        self.suspects[prompt_hash] = suspect  # behind those that were suspected before
        if now_s - suspect.died_at_s.get(instance_id, -ONE_DEATH_S) >= ONE_DEATH_S:
            suspect.deaths += 1
            suspect.last_death_s = suspect.died_at_s[instance_id] = now_s
            if suspect.deaths > 1:
                self._warn(
                    f"the prompt of request {request_id} is refused for {suspect.refused_until_s - now_s:.0f} s:"
                    f" engines died while they held it, {suspect.deaths} in all, of {suspect.names}"
                )
        self._forget_oldest(now_s)

    def _forget_oldest(self, now_s: float) -> None:
        """Drop suspects that are too old or too many. They stand in the order of their last deaths, nearly."""
        while self.suspects:
            prompt_hash, oldest = next(iter(self.suspects.items()))
            if now_s - oldest.last_death_s < MEMORY_S and len(self.suspects) <= MAX_SUSPECTS:
                return
            del self.suspects[prompt_hash]

    def _lived(self, instance_id: str, sent_s: float, now_s: float) -> bool:
        """Whether the engine was alive when the request came, as far as it is known. Notes its death."""
        died_s = self._died_s.get(instance_id)
        if died_s is not None and self._answered_s.get(instance_id, died_s) <= died_s:
            # Its requests break one after the other: they die of one death, unless they came after it.
            return now_s - died_s < ONE_DEATH_S and sent_s <= died_s
        self._died_s[instance_id] = now_s
        return True

    def _has_common_cause(self, suspect: Suspect) -> bool:
        """Whether the deaths under the prompt were not more than those at the same time without it."""
        others = [
            name
            for name, lost_s in self._lost_s.items()
            if name not in suspect.died_at_s and abs(lost_s - suspect.last_death_s) < COMMON_CAUSE_S
        ]
        return len(others) >= suspect.deaths

    def _explain(self, suspect: Suspect) -> None:
        """The deaths under a prompt that is refused excuse no other one."""
        for instance_id in suspect.died_at_s:
            self._lost_s.pop(instance_id, None)

    def forget_all_but(self, instance_ids: Mapping[str, object]) -> None:
        """Drop what is kept about instances that left the fleet."""
        for kept in (self._answered_s, self._died_s, self._lost_s, self._missed_s):
            for instance_id in kept.keys() - instance_ids.keys():
                del kept[instance_id]

    def admit(self, prompt_hash: int, now_s: float) -> Admission:
        """Whether a request of this prompt may be sent now."""
        suspect = self.of(prompt_hash, now_s)
        if suspect is None:
            return None
        if suspect.deaths > 1 and not suspect.pardoned and self._has_common_cause(suspect):
            self._warn(f"a prompt is not refused: engines died without it at the same time as {suspect.names}")
            suspect.deaths, suspect.pardoned = 1, True
        left_s = suspect.refused_until_s - now_s
        if left_s > 0:
            if suspect.deaths > 1:
                self._explain(suspect)
            return Quarantined(suspect.deaths, left_s)
        trial = suspect.trial
        if trial is None:
            suspect.trial = self._begin_trial(prompt_hash, suspect, now_s)
            return suspect.trial
        within_s = trial.began_s + TRIAL_S - now_s
        return None if trial.passed or within_s <= 0 else OtherTrial(trial, within_s)

    def of(self, prompt_hash: int, now_s: float) -> Suspect | None:
        """The suspect that is remembered of the prompt."""
        suspect = self.suspects.get(prompt_hash)
        if suspect is not None and now_s - suspect.last_death_s >= MEMORY_S:
            del self.suspects[prompt_hash]
            return None
        return suspect

    def _begin_trial(self, prompt_hash: int, suspect: Suspect, now_s: float) -> Trial:
        def ended(completed: bool) -> None:
            suspect.trial = None
            if completed and self.suspects.get(prompt_hash) is suspect:
                del self.suspects[prompt_hash]

        return Trial(now_s, ended)
