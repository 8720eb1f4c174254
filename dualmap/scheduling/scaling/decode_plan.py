"""The plan of the instances that decode alone: from the room that running requests take to a wanted number.

Decode legs are never held: each goes to its instance at once, and takes KV memory and a sequence there until its answer
has ended. So their load is *room*: context tokens of running requests over KV memory, or running requests over the most
that an instance runs at a time, whichever is more, in instances' worth. A request counts with its whole expected answer
from the moment at which it is placed, so the room shows seconds ahead what memory will hold. The second measure is the
*pace* of answers, the mean time per output token over its SLO: large batches answer too slowly before memory is full.

Up by one of three tests. *Crowd*, fast: for some seconds running requests take more room than there is, so that engines
preempt. *Room*: they take more than 0.85 of it in the mean of a while. *Pace*: answers come too slowly for as long, and
the batches are large enough for more instances to make them smaller.

Down, slowly, one instance at a time: only when the most room that was taken in the last minutes fits one instance less
with a margin, and answers of larger batches stay within their SLO.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import ceil
from statistics import fmean

from dualmap.scheduling.scaling.cusum import TROUGH_S
from dualmap.scheduling.scaling.role_plan import SLOW_ANSWERS
from dualmap.scheduling.scaling.scale_plan import (
    DOWN_GAP_S,
    GROWTH,
    LONGEST_GAP_S,
    PEAK_S,
    ROOM_TARGET,
    SLACK_S,
    FleetFigures,
    Plan,
    ScaleRule,
    plan_by_use,
)

LOOKED_S = 20.0
"""Means over so long show a lack of room, or slow answers."""
FULL_BATCHES = 4.0
"""Running requests of an instance, in the mean, from which one instance more makes batches smaller. The time per output
token of fewer requests is that of the engine itself, however many instances there are."""
ROOM_DOWN = 0.6
"""Largest share of its room that each remaining instance may use for one to leave."""


@dataclass(slots=True)
class DecodePlanner:
    """The memory of one leader. A new one begins without: it scales up within seconds, and down after minutes."""

    rule: ScaleRule
    _now: FleetFigures = field(default_factory=lambda: FleetFigures(float("-inf"), 0))
    _looks: deque[FleetFigures] = field(default_factory=deque)
    """Looks of the last minutes."""
    _begun_s: float = float("-inf")
    """Time of the first look, or of the first one after a gap."""
    _changed_s: float = float("-inf")
    """Time of the last look at which another number was ready than before."""
    _used_s: float = float("-inf")
    _last_down_s: float = float("-inf")

    def observe(self, now: FleetFigures) -> None:
        """Take in one look at the decode instances; looks come about once a second."""
        if now.at_s - self._now.at_s > LONGEST_GAP_S:
            self._looks.clear()
            self._begun_s = self._used_s = now.at_s
        if now.ready != self._now.ready:
            self._changed_s = now.at_s
        if now.shows_use:
            self._used_s = now.at_s
        self._now = now
        self._looks.append(now)
        while now.at_s - self._looks[0].at_s > SLACK_S + PEAK_S:
            self._looks.popleft()

    def plan(self) -> Plan:
        """The wanted number as of the last look."""
        now, rule = self._now, self.rule
        if now.size < rule.min_instances:
            return Plan(rule.min_instances, f"{now.size} of at least {rule.min_instances} decode instances")
        if (plan := plan_by_use(now, now.at_s - self._used_s, rule)) is not None:
            return plan
        more = max((self._by_crowd(now), self._by_room(now), self._by_pace(now)), key=lambda plan: plan.wanted)
        if more.wanted > now.size:
            wanted = rule.bounded(more.wanted)
            return Plan(wanted, more.reason if wanted > now.size else f"{more.reason}; at the maximum", more.load)
        if now.size > rule.max_instances:
            return Plan(rule.max_instances, f"{now.size} of at most {rule.max_instances} decode instances")
        return self._down(now)

    # up ----------------------------------------------------------------------------------------------------------
    def _by_crowd(self, now: FleetFigures) -> Plan:
        least = min(each.room for each in self._since(TROUGH_S))
        if self._seen_s < TROUGH_S or least <= now.size:
            return Plan(0, "")
        reason = f"crowd: running requests take the room of {least:.1f} decode instances for {TROUGH_S:.0f} s"
        return Plan(min(ceil(least / ROOM_TARGET), 2 * now.size), f"{reason}, {now.size} serve", least)

    def _by_room(self, now: FleetFigures) -> Plan:
        room = self._mean(lambda each: each.room)
        if self._seen_s < LOOKED_S:
            return Plan(0, "")
        reason = f"running requests take the room of {room:.1f} decode instances, {now.size} serve"
        return Plan(min(ceil(room / ROOM_TARGET), ceil(GROWTH * now.size)), reason, room)

    def _by_pace(self, now: FleetFigures) -> Plan:
        """Looks from before the last newcomer was ready are no reason for the next one."""
        if now.starting or now.at_s - max(self._begun_s, self._changed_s) < PEAK_S:
            return Plan(0, "")
        pace, batch = self._mean(lambda each: each.answer_pace), self._mean(lambda each: each.running_requests)
        if pace <= SLOW_ANSWERS or batch < FULL_BATCHES * now.ready:
            return Plan(0, "")
        reason = f"answers take {pace:.2f} of the SLO per output token with {now.ready} decode instances"
        return Plan(min(ceil(now.ready * pace / SLOW_ANSWERS), ceil(GROWTH * now.size)), reason, now.ready * pace)

    # down --------------------------------------------------------------------------------------------------------
    def _down(self, now: FleetFigures) -> Plan:
        looks = self._since(SLACK_S)
        room = max(each.room for each in looks)
        stay = Plan(now.size, f"running requests take the room of {room:.1f} decode instances at most", room)
        left = now.ready - 1
        if now.starting or now.ready <= max(1, self.rule.min_instances):
            return stay
        if now.at_s - max(self._begun_s, self._grown_s(looks)) < SLACK_S or now.at_s - self._last_down_s < DOWN_GAP_S:
            return stay
        if room > ROOM_DOWN * left or self._slows(looks, left):
            return stay
        self._last_down_s = now.at_s
        reason = (
            f"slack: at most the room of {room:.1f} decode instances in the last {SLACK_S:.0f} s, {now.ready} serve"
        )
        return Plan(left, reason, room)

    def _slows(self, looks: Iterable[FleetFigures], left: int) -> bool:
        """Whether answers of so many instances may become too slow: each has more requests then, so the time per output
        token grows no faster than the instances become fewer."""
        return any(
            each.running_requests >= FULL_BATCHES * left and each.answer_pace * each.ready > SLOW_ANSWERS * left
            for each in looks
        )

    def _grown_s(self, looks: Iterable[FleetFigures]) -> float:
        """The last time at which fewer were ready than now: newcomers first show what they do."""
        return max((each.at_s for each in looks if each.ready < self._now.ready), default=float("-inf"))

    # what was seen -----------------------------------------------------------------------------------------------
    @property
    def _seen_s(self) -> float:
        return self._now.at_s - self._begun_s

    def _since(self, window_s: float) -> list[FleetFigures]:
        return [each for each in self._looks if self._now.at_s - each.at_s <= window_s]

    def _mean(self, figure: Callable[[FleetFigures], float]) -> float:
        return fmean(map(figure, self._since(LOOKED_S)))
