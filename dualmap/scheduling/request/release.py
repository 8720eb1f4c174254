"""Releases of what a request no longer needs, as its driver reports them to the store."""

from __future__ import annotations

from dataclasses import KW_ONLY

from dualmap.scheduling.runs.turn import TurnEnd
from dualmap.scheduling.tenants.budgets import Draws
from dualmap.scheduling.values import value


@value
class Release:
    """A request needs less than it did: its first token came, or is presumed to have come, so it has no pending tokens
    any more; or it is over, and nothing is left of it."""

    request_id: str
    instance_id: str = ""
    """Instance that gave the first token; empty: the request is over."""
    replica_id: str = ""
    """Another replica's request of this id is left alone: one that gave up before it heard DUPLICATE has nothing to
    release. Empty: any."""
    attempt: int | None = None
    """A newer attempt is left alone; None: any."""
    _: KW_ONLY
    note: str = ""
    """JSON that is logged for the leader, see ``scheduling.estimates.learning``; empty: nothing is."""
    seen: bool = False
    """Whether that first token, or the whole answer, was seen. Only a seen token is a sign of life of the instance and
    stamps its prefill clock. False where the first token is presumed, and where the request ends without its answer."""
    returned: Draws | None = None
    """The part of its draws that the request gives back to its budgets, where it is over, see ``budgets.returned``.
    None: all that its record says it drew."""
    used: str = ""
    """The usage that it is metered by, where it is over for good, see ``scheduling.request.metering``; empty: it is not
    metered. ``KEPT`` there: its try is over, and its record stays to be metered by; with ``returned`` its draws stand,
    for the next try to take over."""
    turn: TurnEnd | None = None
    """The turn of a run that is over with it."""

    def ending(self, turn: TurnEnd) -> Release:
        """This release, with which a turn is over, too. Field by field: ``dataclasses.replace`` costs every turn as
        much as all else that names its run."""
        return Release(
            self.request_id,
            self.instance_id,
            self.replica_id,
            self.attempt,
            note=self.note,
            seen=self.seen,
            returned=self.returned,
            used=self.used,
            turn=turn,
        )
