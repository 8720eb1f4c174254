"""The life of a request: one table of transitions, and what follows from each event.

Rules for this file:

- The machine does no I/O and reads no clock. A driver reports what happened by ``on(event, now_s)``, carries out the
  effects that it returns, in their order, and reports what came of them by the next event. A router drives it with
  awaits, the simulator in virtual time, a test by hand. A rule that stands in a driver is in the wrong place.
- It is the only owner of where a request is. Everything that depends on that is a function of the machine's values:
  what a store that lost it is told (``stored_request``), what is learned from it, and what people read.
- ``LEGAL_IN`` says in which phases an event may come, and is read before anything else; an event that is not legal
  raises ``TransitionError`` and changes nothing. ``TRANSITIONS`` says where an event leads, by the input that the
  handler takes it for. An event that comes after the end is late news, and changes nothing: ends and failures race with
  each other.
- At most the last of the effects that one event returns has an answer. So a driver is a loop, and nothing else happens
  to the request between an effect and its answer but that it is cancelled (``Ended``).
- Every end goes through ``_end``, which releases what may be reserved. A reservation may exist from the moment its
  search begins, as the answer of the store can be lost.
- A request that is passed on without being scheduled is the same machine. It reserves nothing. One of a tenant is
  registered, so that it draws from its budgets, is released, and is metered.
- Nothing here knows HTTP, or what carries the bytes. The data plane says what failed (``InstanceFailure``), and whether
  the client has a part of the answer.

Times are seconds of the driver's monotonic clock. What is recorded of the request is its age, in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from enum import StrEnum
from typing import Any, Final, Protocol

import orjson

from dualmap.scheduling.errors import TransitionError
from dualmap.scheduling.estimates.learning import DisprovedTier, features_to_note, finished_note, transfer_note
from dualmap.scheduling.placing.decision import Policy, RouteQuery
from dualmap.scheduling.placing.placement import (
    NO_CLAIM,
    NO_COURSE,
    Claim,
    Fleet,
    Placed,
    PlaceReply,
    PlaceStatus,
    Search,
    SearchCourse,
    SearchFailed,
    SearchRules,
)
from dualmap.scheduling.placing.policies.decode_legs import DecodeLegs
from dualmap.scheduling.placing.policies.pinned import Pinned
from dualmap.scheduling.placing.split import SplitRule
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.queues.granting import Grant
from dualmap.scheduling.queues.queue_order import QueueOrder
from dualmap.scheduling.request.answers import Verdict
from dualmap.scheduling.request.charge import (
    NOTHING_COUNTED,
    Charge,
    Counted,
    Expected,
    charge,
    is_plain,
    keeps_tokens,
    possible,
    reported_charge,
)
from dualmap.scheduling.request.eviction import AnswerUnderWay, EvictionRule, Shortage
from dualmap.scheduling.request.evidence import Evidence
from dualmap.scheduling.request.metering import KEPT, used_by
from dualmap.scheduling.request.outcome import (
    ANSWERED,
    FAILED_BY_THE_FLEET,
    FailureKind,
    InstanceFailure,
    Outcome,
    Usage,
)
from dualmap.scheduling.request.passed_on import PassedOnBalancer, pick_instance
from dualmap.scheduling.request.quarantine import SURVIVED_S, OtherTrial, Quarantined, Trial
from dualmap.scheduling.request.release import Release
from dualmap.scheduling.request.slo import slo_s as slo_of
from dualmap.scheduling.request.waiting_room import WaitingRoom
from dualmap.scheduling.runs.admission import WAITS_OF_SLO
from dualmap.scheduling.runs.turn import UNNAMED, RunName, Turn, TurnEnd
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.scheduling.state.instance import InstanceSpec, Role
from dualmap.scheduling.state.legs import Leg, decode_leg_id, serves
from dualmap.scheduling.state.request import RequestState, StoredRequest
from dualmap.scheduling.state.tier_load import Source
from dualmap.scheduling.tenants.budgets import Drawn, DrawnReply, Draws, drawn_text, nothing_of, rest_of, returned
from dualmap.scheduling.tenants.shares import NO_TENANT, Share
from dualmap.scheduling.values import value


class Phase(StrEnum):
    """Where a request is."""

    NEW = "new"
    """Only its driver knows of it."""
    PARKED = "parked"
    """A turn of an agent's run that waits for the memory of others."""
    ADMITTING = "admitting"
    """The request is about to be placed, for the first time or once more. It waits for the trial of a copy of its
    prompt, which is suspected of killing engines."""
    PLACING = "placing"
    """An instance is searched for. The store may have reserved one."""
    AWAITING = "awaiting"
    """The pool has no instance, and may have none: the request waits for the first one, which is being started."""
    HELD = "held"
    """The request waits in the queue of an instance, and can be moved."""
    DISPATCHED = "dispatched"
    """The request may be sent to its instance."""
    PREFILLING = "prefilling"
    """The request was sent. Nothing of the answer has come."""
    PRESUMED = "presumed"
    """The answer does not stream, and by now the prefill should be over."""
    PAIRING = "pairing"
    """The request is split, and the decode leg goes first: it is placed while the prefill instance keeps room."""
    PAIRED = "paired"
    """Both legs are placed. The decode leg is sent, and asks for the prefill leg."""
    STAGED = "staged"
    """The prefill leg is over, and the decode leg is being placed."""
    DECODING = "decoding"
    """The decode leg may be sent. Nothing of the answer has come."""
    ANSWERING = "answering"
    """The first token has come."""
    BROKEN_OFF = "broken_off"
    """The instance failed after the client had a part of the answer: nothing else is tried."""
    DONE = "done"
    """The request is over. What was reserved for it is released, or being released."""


class Input(StrEnum):
    """The inputs of the machine: the columns of ``TRANSITIONS``. An event is one of several inputs, by its content and
    by the rules."""

    PARKS = "parks"
    """It is a turn whose run waits for memory."""
    ADMITTED = "admitted"
    SUSPECTED = "suspected"
    SEARCHES_AGAIN = "searches_again"
    """The id was taken, or all instances that could take the request are those that failed it."""
    PUT_OFF = "put_off"
    """No instance is there, and one is started."""
    INSTANCE_CAME = "instance_came"
    """The pool has an instance now."""
    QUEUED = "queued"
    TAKEN = "taken"
    """An instance has room for it."""
    TAKEN_IN_PAIR = "taken_in_pair"
    """An instance has room for it, and the decode leg goes first."""
    RESERVATION_LOST = "reservation_lost"
    SENT = "sent"
    PREFILL_PRESUMED = "prefill_presumed"
    FIRST_TOKEN = "first_token"
    PREFILL_ENDED = "prefill_ended"
    """The prefill leg has answered."""
    DECODER_TAKEN = "decoder_taken"
    DECODES_AGAIN = "decodes_again"
    """The decode leg is placed once more, for the same KV."""
    MOVED = "moved"
    """The instance failed, and the gateway that carries the bytes has sent the request to another one."""
    FAILED = "failed"
    """The instance failed, and another one may try: the client has nothing of the answer."""
    CONTINUES = "continues"
    """The instance failed, or gives the request up, and another one may give the rest of the answer."""
    BROKE_OFF = "broke_off"
    """The instance failed, and the client has a part of the answer that cannot be continued."""
    REFUSED = "refused"
    ENDED = "ended"


@value
class PhaseRow:
    """The properties of a phase that the table of transitions does not show."""

    may_be_reserved: bool = True
    """The store may have a reservation of this try."""
    on_an_instance: bool = False
    """An instance has it, or may have it by now, and is judged by what becomes of it."""
    to_be_sent: bool = False
    """An instance has room for it, and it is not on its way."""
    was_sent: bool = False
    """An instance has it, and has not failed it."""
    prefill_under_way: bool = False
    """Tokens of the request are pending on the instance."""
    prefill_is_over: bool = False
    computes_unseen: bool = False
    """An answer that is only seen whole is being computed."""


_ROWS: Final = {
    Phase.NEW: PhaseRow(may_be_reserved=False),
    Phase.PARKED: PhaseRow(may_be_reserved=False),
    Phase.ADMITTING: PhaseRow(may_be_reserved=False),
    Phase.PLACING: PhaseRow(),
    Phase.AWAITING: PhaseRow(may_be_reserved=False),
    Phase.HELD: PhaseRow(),
    Phase.DISPATCHED: PhaseRow(on_an_instance=True, to_be_sent=True, prefill_under_way=True),
    Phase.PREFILLING: PhaseRow(on_an_instance=True, was_sent=True, prefill_under_way=True),
    Phase.PRESUMED: PhaseRow(on_an_instance=True, was_sent=True, prefill_is_over=True, computes_unseen=True),
    Phase.PAIRING: PhaseRow(on_an_instance=True, prefill_under_way=True),
    Phase.PAIRED: PhaseRow(on_an_instance=True, to_be_sent=True, was_sent=True, prefill_under_way=True),
    Phase.STAGED: PhaseRow(on_an_instance=True, was_sent=True, prefill_is_over=True),
    Phase.DECODING: PhaseRow(on_an_instance=True, was_sent=True, prefill_is_over=True, computes_unseen=True),
    Phase.ANSWERING: PhaseRow(on_an_instance=True, was_sent=True, prefill_is_over=True),
    Phase.BROKEN_OFF: PhaseRow(),
    Phase.DONE: PhaseRow(),
}


def _phases(is_so: Callable[[PhaseRow], bool]) -> frozenset[Phase]:
    return frozenset(phase for phase in Phase if is_so(_ROWS[phase]))


ON_AN_INSTANCE: Final = _phases(lambda row: row.on_an_instance)
TO_BE_SENT: Final = _phases(lambda row: row.to_be_sent)
WAS_SENT: Final = _phases(lambda row: row.was_sent)
PREFILL_UNDER_WAY: Final = _phases(lambda row: row.prefill_under_way)
_PREFILL_IS_OVER: Final = _phases(lambda row: row.prefill_is_over)
_COMPUTES_UNSEEN: Final = _phases(lambda row: row.computes_unseen)
_NEVER_RESERVED: Final = _phases(lambda row: not row.may_be_reserved)


def _transitions() -> dict[tuple[Phase, Input], Phase]:
    p, i = Phase, Input
    table = {
        (p.NEW, i.ADMITTED): p.PLACING,
        (p.NEW, i.SUSPECTED): p.ADMITTING,
        (p.PARKED, i.ADMITTED): p.PLACING,
        (p.PARKED, i.SUSPECTED): p.ADMITTING,
        (p.ADMITTING, i.SUSPECTED): p.ADMITTING,
        (p.ADMITTING, i.ADMITTED): p.PLACING,
        (p.PLACING, i.SEARCHES_AGAIN): p.PLACING,
        (p.PLACING, i.PARKS): p.PARKED,
        (p.PLACING, i.PUT_OFF): p.AWAITING,
        (p.AWAITING, i.INSTANCE_CAME): p.PLACING,
        (p.PLACING, i.QUEUED): p.HELD,
        (p.PLACING, i.TAKEN): p.DISPATCHED,
        (p.PLACING, i.TAKEN_IN_PAIR): p.PAIRING,
        (p.HELD, i.TAKEN): p.DISPATCHED,
        (p.HELD, i.TAKEN_IN_PAIR): p.PAIRING,
        (p.HELD, i.RESERVATION_LOST): p.PLACING,
        (p.DISPATCHED, i.SENT): p.PREFILLING,
        (p.PREFILLING, i.PREFILL_PRESUMED): p.PRESUMED,
        (p.ANSWERING, i.PREFILL_PRESUMED): p.ANSWERING,  # the timer runs on: to stop it costs more than to ignore it
        (p.BROKEN_OFF, i.PREFILL_PRESUMED): p.BROKEN_OFF,
        (p.DISPATCHED, i.FIRST_TOKEN): p.ANSWERING,
        (p.PREFILLING, i.FIRST_TOKEN): p.ANSWERING,
        (p.PRESUMED, i.FIRST_TOKEN): p.ANSWERING,
        (p.DISPATCHED, i.PREFILL_ENDED): p.STAGED,
        (p.PREFILLING, i.PREFILL_ENDED): p.STAGED,
        (p.PAIRING, i.DECODES_AGAIN): p.PAIRING,
        (p.PAIRING, i.DECODER_TAKEN): p.PAIRED,
        (p.PAIRED, i.PREFILL_ENDED): p.DECODING,
        (p.PAIRED, i.FIRST_TOKEN): p.ANSWERING,
        (p.ANSWERING, i.PREFILL_ENDED): p.ANSWERING,  # the last layer may be confirmed behind the first token
        (p.PAIRED, i.PREFILL_PRESUMED): p.PAIRED,
        (p.STAGED, i.DECODES_AGAIN): p.STAGED,
        (p.STAGED, i.DECODER_TAKEN): p.DECODING,
        (p.DECODING, i.DECODES_AGAIN): p.STAGED,
        (p.DECODING, i.FIRST_TOKEN): p.ANSWERING,
        (p.ANSWERING, i.FIRST_TOKEN): p.ANSWERING,
        (p.ANSWERING, i.CONTINUES): p.ADMITTING,
    }
    for phase in ON_AN_INSTANCE:
        table |= {(phase, i.FAILED): p.ADMITTING, (phase, i.BROKE_OFF): p.BROKEN_OFF}
        table.setdefault((phase, i.SENT), phase)  # once more, over a new connection to the same instance
    for phase in (p.DISPATCHED, p.PREFILLING, p.PRESUMED):
        table[phase, i.MOVED] = p.PREFILLING
    for phase in (p.NEW, p.PARKED, p.ADMITTING, p.PLACING, p.AWAITING, p.HELD):
        table[phase, i.REFUSED] = p.DONE
    for phase in Phase:
        table[phase, i.ENDED] = p.DONE
    return table


TRANSITIONS: Final[Mapping[tuple[Phase, Input], Phase]] = _transitions()
"""The phase after an input. A pair that is missing is illegal."""


def phases_with(given: Input) -> tuple[Phase, ...]:
    """The phases in which an input is legal."""
    return tuple(phase for phase in Phase if (phase, given) in TRANSITIONS)


DECODES_PER_STAGING: Final = 2
"""Decode legs that are sent for the same staged KV at most."""
PULL_PATIENCE: Final = 1.2
"""Multiples of the expected TTFT, or of that with what is pulled computed in place of it, whichever is longer, after
which a pull is taken to be stuck."""
PULL_GRACE_S: Final = 0.5
"""Time beside that, for what no expectation knows of."""
SLOWEST_TOKEN_S: Final = 0.25
"""A token of an answer that is only seen whole takes no longer than this."""
FASTEST_TOKEN_S: Final = 0.005
"""Nor less: what is learned of streams that come in a few pieces says nothing of a token."""
_NEEDS_PREFILL: Final = (FailureKind.NO_DECODER, FailureKind.RECOMPUTED, FailureKind.TRANSFER)
"""No other decoder is tried with the same KV. A transfer that is stuck may be so for its source, which a decoder whose
leg is aborted may have told to free the KV."""


# events ----------------------------------------------------------------------------------------------------------
@value
class Arrived:
    """The request is to be served."""


@value
class TurnGoes:
    """Its run may use memory: the turn may be placed."""


@value
class TrialOver:
    """The trial of another copy that it waited for has passed, or took too long."""


@value
class Reserved:
    """The search took an instance, or a place in a queue."""

    course: SearchCourse
    target: InstanceSpec | None
    """The instance to send it to; None where the instance is no member any more, and where it is held."""


@value
class Registered:
    """The store admits it, which is passed on: its tenant's budgets are drawn from."""

    drawn: Drawn


@value
class NotPlaced:
    """No instance took it."""

    why: SearchFailed


@value
class Renamed:
    """The request has another id."""

    request_id: str


@value
class InstanceReady:
    """The pool has an instance again."""


@value
class Granted:
    """The request was held, and an instance has room for it now."""

    grant: Grant
    target: InstanceSpec | None
    """The instance to send it to; None where it is no member any more."""


@value
class ReservationLost:
    """The store no longer knows of it while it is held: it came back empty, or reaped it."""


@value
class TurnedAway:
    """The request was held, or has waited for an instance, for as long as it may."""

    why: Refusal


@value
class Sent:
    """The request is on its way to its instance."""


@value
class PrefillPresumed:
    """The time set by ``StartTimer`` has passed."""


@value
class FirstToken:
    """The first token came, of an answer that streams; of another, its first byte."""


@value
class DeadlinePassed:
    """The SLO has passed since the request arrived. That may be reported some moments late, and whether or not it has a
    first token by then: what is known of its first token is judged by that one's own age."""


@value
class PrefillEnded:
    """The prefill leg has answered."""


@value
class DecoderReserved:
    """The search for its decode leg took an instance."""

    placed: Placed
    target: InstanceSpec | None
    """The instance to send it to; None where it is no member any more."""


@value
class NoDecoder:
    """No instance took its decode leg."""


@value
class Failed:
    """An instance failed it."""

    failure: InstanceFailure
    begun: bool = False
    """The client has a part of the answer, which cannot be continued."""
    overdue: bool = False
    """The time for the whole request is over."""
    leg: Leg | None = None
    """The leg that failed, where two run at once; None: the one that its phase says."""
    keeps_kv: bool = False
    """The KV of its decode leg is still staged, so that another decoder could take it."""
    sent_tokens: int | None = None
    """The tokens of the answer that the client has, where another instance can give the rest. None: nothing is
    continued, and without ``begun`` the client has nothing. Before the first token there is nothing to continue."""


@value
class Moved:
    """The instance failed the request, and the gateway that carries its bytes has sent it to another one, which has it
    by now."""

    failure: InstanceFailure
    target: InstanceSpec


@value
class Ended:
    """The request is over, however it went: answered, broken off, cancelled."""

    outcome: Outcome
    usage: Usage | None = None
    """The usage as the instance reported it, also of the part of an answer that a client has left."""
    counted: Counted | None = None
    """The part of the answer, or of its rest, that the router has seen; None: nothing passes there."""


Event = (
    Arrived
    | TurnGoes
    | TrialOver
    | Reserved
    | Registered
    | NotPlaced
    | Renamed
    | InstanceReady
    | Granted
    | ReservationLost
    | TurnedAway
    | Sent
    | PrefillPresumed
    | DeadlinePassed
    | FirstToken
    | PrefillEnded
    | DecoderReserved
    | NoDecoder
    | Failed
    | Moved
    | Ended
)


# effects ---------------------------------------------------------------------------------------------------------
class Refusal(StrEnum):
    """Why a request is not served."""

    LIMITED = "limited"
    """A limit of its tenant is met."""
    NO_INSTANCE = "no_instance"
    NOT_STARTED = "not_started"
    """The pool had no instance, and none became ready in time."""
    TOO_MANY_WAIT = "too_many_wait"
    """As many requests as may wait for the first instance already do."""
    QUEUE_FULL = "queue_full"
    WOULD_BE_LATE = "would_be_late"
    """Late requests are refused, and it is expected to be late everywhere."""
    IS_LATE = "is_late"
    """Late requests are refused, and it was passed over until it was late."""
    LATE_FOR_TOO_LONG = "late_for_too_long"
    HELD_TOO_LONG = "held_too_long"
    INSTANCE_REMOVED = "instance_removed"
    QUARANTINED = "quarantined"
    NOBODY_LEFT = "nobody_left"
    """No instance is ready beside those that failed it."""
    TRIES_SPENT = "tries_spent"
    CONTINUED_TOO_OFTEN = "continued_too_often"
    BUDGET_SPENT = "budget_spent"
    TOO_MANY_TURNS = "too_many_turns"
    """Too many turns of its run wait for memory."""
    OVERDUE = "overdue"
    """The time for the whole request is over."""
    TOO_SLOW = "too_slow"
    """A whole answer did not come in time: the next instance would most likely take as long."""


@value
class AwaitTurn:
    """Wait until the turn goes by the ledger of runs, ``within_s`` at most. Answer: ``TurnGoes`` or ``TurnedAway``."""

    turn: Turn
    within_s: float


@value
class AwaitTrial:
    """Wait until the trial has passed, ``within_s`` at most. Answer: ``TrialOver``."""

    trial: Trial
    within_s: float


@value
class Reserve:
    """Run the search. Answer: ``Reserved`` or ``NotPlaced``."""

    search: Search


@value
class Register:
    """Draw from the budgets of a request that is passed on, and enter it without an instance. Answer: ``Registered`` or
    ``NotPlaced``."""

    request: StoredRequest
    draws: Draws | None


@value
class Rename:
    """The id is another live request's. Answer: ``Renamed``."""


@value
class AwaitInstance:
    """Wait until the pool has an instance, ``within_s`` at most. Answer: ``InstanceReady`` or ``TurnedAway``."""

    within_s: float


@value
class AwaitGrant:
    """Wait for the grant of this attempt. Answer: ``Granted``, ``ReservationLost`` or ``TurnedAway``."""

    placed: Placed
    attempt: int
    within_s: float
    """The longest wait."""


@value
class Evict:
    """Have answers leave the instance, as ``EvictionRule.evicted`` says: it lacks this for the request. Their machines
    are told that they failed (``FailureKind.EVICTED``)."""

    instance_id: str
    shortage: Shortage


@value
class ReserveDecoder:
    """Run the search for the decode leg. Answer: ``DecoderReserved`` or ``NoDecoder``."""

    search: Search


@value
class Send:
    """Send it where ``to_send`` of the machine says. A driver whose caller sends has nothing to do: it returns."""


@value
class StartTimer:
    """Report ``PrefillPresumed`` after this time, unless ``LeaveInstance`` comes first."""

    delay_s: float


@value
class LeaveInstance:
    """The request is no longer on this instance: forget what is kept of it there, and its timer."""

    instance_id: str
    failure: InstanceFailure | None = None
    """The failure that ended its try there; None: it was not a failure."""


@value
class ReleaseFirst:
    """Release these before the next effect: the next reservation must not meet the former one."""

    releases: tuple[Release, ...]


@value
class Enter:
    """Enter it in the store as it is now, on the instance that has it: no room is asked for. It is released first."""


@value
class Post:
    """Release this without waiting."""

    release: Release
    teaches: bool = False
    """The TTFT may be learned from it: its note is to be ``RequestMachine.ttft_sample``."""
    last: bool = False
    """This release leaves nothing of the request in the store."""


@value
class CountRetry:
    """The request is tried again, after a failure of this kind."""

    kind: FailureKind
    decodes: bool = False
    """The retry is of its decode leg alone."""
    continues: bool = False
    """Another instance is to give the rest of its answer."""


@value
class Refuse:
    """The request is over, and its client gets an error."""

    why: Refusal
    failed: SearchFailed | None = None
    quarantined: Quarantined | None = None


@value
class Close:
    """The request is over: explain it, count it, forget it."""


Effect = (
    AwaitTurn
    | AwaitTrial
    | Reserve
    | Register
    | Rename
    | AwaitInstance
    | AwaitGrant
    | Evict
    | ReserveDecoder
    | Send
    | StartTimer
    | LeaveInstance
    | ReleaseFirst
    | Enter
    | Post
    | CountRetry
    | Refuse
    | Close
)
Effects = tuple[Effect, ...]

# Members of enumerations that every request meets, by names of this module: up to Python 3.11 an enumeration looks its
# member up in a way that costs as much as a call.
_PLACING: Final = Phase.PLACING
_AWAITING: Final = Phase.AWAITING
_DECODING: Final = Phase.DECODING
_ANSWERING: Final = Phase.ANSWERING
_BROKEN_OFF: Final = Phase.BROKEN_OFF
_DONE: Final = Phase.DONE
_ADMITTED: Final = Input.ADMITTED
_QUEUED: Final = Input.QUEUED
_TAKEN: Final = Input.TAKEN
_TAKEN_IN_PAIR: Final = Input.TAKEN_IN_PAIR
_SENT: Final = Input.SENT
_FIRST_TOKEN: Final = Input.FIRST_TOKEN
_ENDED: Final = Input.ENDED
_WHOLE: Final = Leg.WHOLE
_PREFILL: Final = Leg.PREFILL
_DECODE: Final = Leg.DECODE
_DECODE_ROLE: Final = Role.DECODE
_COMPLETED: Final = Outcome.COMPLETED
_PLACE_HELD: Final = PlaceStatus.HELD
_STORED_HELD: Final = RequestState.HELD

_NOTHING: Final[Effects] = ()
_SEND: Final[Effects] = (Send(),)
_CLOSE: Final = Close()
_RENAME: Final[Effects] = (Rename(),)


def turned_away(record: StoredRequest, waited_s: float, order: QueueOrder, *, refuses_late: bool) -> Refusal | None:
    """Return why a held request that has waited so long, and is known to the store by this record, is held no longer. A
    retry is never turned away for being late: its client has waited already."""
    if record.attempt > 1:
        return None
    if refuses_late and record.deferred and not order.fills(record):
        return Refusal.IS_LATE
    if not order.gives_up(record, waited_s):
        return None
    return Refusal.IS_LATE if refuses_late else Refusal.LATE_FOR_TOO_LONG


# the machine -----------------------------------------------------------------------------------------------------
class PlacingFleet(Fleet, Protocol):
    """The fleet as the machine sees it, beside what a search needs of it."""

    def window_delay_s(self, spec: InstanceSpec, uncached_tokens: int) -> float:
        """Time until the instance has prefilled a full dispatch window, and ``uncached_tokens`` behind it."""


MAX_CONTINUATIONS = 8
"""Times that one answer continues on another instance at most."""


@dataclass(kw_only=True, frozen=True, slots=True)
class RequestRules:
    """The rules that a pool's requests are served by on one replica, as its settings are now."""

    replica_id: str
    fleet: PlacingFleet
    policy: Policy
    order: QueueOrder
    scheduling: SchedulingSettings
    at_once: bool = False
    """No request waits in the fleet for the dispatch window of its instance, see ``placing.decision.holds``."""
    refuses_late: bool = False
    max_tries: int = 3
    """Instances tried at most until the answer begins, or goes on."""
    decode_first: bool = False
    """Decode legs are sent first, and ask for their prefill legs: layerwise connectors."""
    staged_timeout_s: float = 60.0
    """Staged KV is given up after this time."""
    transfer_timeout_s: float = 60.0
    """Longest wait for the first token of a decode leg."""
    evidence: Evidence = field(default_factory=Evidence)
    balancer: PassedOnBalancer = field(default_factory=PassedOnBalancer)
    """Picks instances for requests that are passed on."""
    waiting_room: WaitingRoom | None = None
    """Where requests wait for the first instance; None: the pool has some at all times, or refuses."""
    eviction: EvictionRule | None = field(init=False)
    """The rule by which answers leave for others; None: no class is evictable."""
    search: SearchRules = field(init=False)
    search_whole: SearchRules = field(init=False)
    """The rules of searches for requests that may not be split."""
    decode_search: SearchRules = field(init=False)
    """The rules of searches for decode legs, whatever the policy of the others is."""
    max_hold_s: float = field(init=False)

    def __post_init__(self) -> None:
        scheduling, rule = self.scheduling, SplitRule(self.scheduling.split)
        # Read for every request: what follows from the settings is at hand, and said once for all drivers.
        eviction = EvictionRule(scheduling.classes)
        object.__setattr__(self, "eviction", eviction if eviction.is_on else None)
        search = SearchRules(
            self.policy,
            self.order,
            self.fleet,
            scheduling.decode_stall_s,
            self.at_once,
            rule,
        )
        object.__setattr__(self, "search", search)
        object.__setattr__(self, "search_whole", replace(search, split=None))
        decode_policy = DecodeLegs(scheduling.kv_weight_s, rule)
        object.__setattr__(self, "decode_search", replace(search, policy=decode_policy, at_once=False, split=None))
        object.__setattr__(self, "max_hold_s", scheduling.max_hold_s)


@value
class RequestSpec:
    """A request as it is known before it is placed."""

    prompt_hash: int
    """Equal prompts have equal ones: a prompt that kills engines is known by it."""
    chain: Chain | None
    """None: it is not scheduled, and passed on to any suitable instance."""
    slo_s: float
    model: str = ""
    """The name that its instance is asked for."""
    claim: Claim = NO_CLAIM
    _: KW_ONLY
    expected_output_tokens: int = 0
    output_limit: int | None = None
    """The most tokens that its answer may have; None: it sets no limit."""
    stored_tokens: int = 0
    """Tokens of a conversation that it continues, which its instance has stored."""
    text_bytes: int = 0
    """Length of its prompt, where bytes per token can be learned from it; 0: they cannot."""
    images: int = 0
    streams: bool = True
    may_split: bool = False
    """Another instance than the one that prefills it can answer it."""
    pinned_to: str | None = None
    """The only instance that can answer it."""
    only: frozenset[str] | None = None
    """The instances that may be sent it; None: any."""
    hides_first_token: bool = False
    """The time of its first token is not seen, though its answer streams."""
    can_go_on: bool = False
    """The request streams, and another instance could go on with its answer."""
    may_pull: bool = False
    """Its instance can be told where to pull a part of its prompt from."""
    shows_prompt: bool = True
    """Its engine sees the prompt that was read: it truncates nothing, and has stored nothing of it."""
    answers: int = 1
    """The number of answers that are computed for it."""
    run: RunName = UNNAMED
    """The run whose turn it is, by name."""
    body_tokens: int = 0
    """Tokens of its prompt by the bytes of its body, where it is passed on; 0: it has none, or nothing is known."""
    adapter: str = ""
    """The adapter that computes it; empty: none."""
    revision: str = ""
    """The revision that serves it; empty: any, as where one instance alone can answer it."""
    cohort: int = 0
    """The version of the weights by which its session was given to its revision; 0: it was not chosen by them."""
    session: str = ""
    """That session, as a hash."""
    shadowed: str = ""
    """Its session, where it is copied to a revision that answers nobody; empty: it is not."""
    adapter_share: float = 1.0
    """See ``Placement.adapter_share``."""


@dataclass(slots=True)
class DecodeLeg:
    """The second leg of a split request. It exists from its first search on: it may be reserved since."""

    request_id: str
    failed: frozenset[str]
    """Instances that failed the request, this leg of it or the other."""
    avoided: frozenset[str]
    """The instance of the prefill leg, if it could answer too: the KV is to leave it, and no connector is known to send
    it to its own instance. Empty once there is no other."""
    placed: Placed | None = None
    _: KW_ONLY
    target: InstanceSpec | None = None
    """The instance that it may be sent to; None while it is being placed."""
    cached_tokens: int = 0
    """Prompt tokens that are believed to be there already: the rest is transferred."""
    placed_s: float | None = None
    staged_s: float | None = None
    """The age of the request when its prefill leg ended."""
    sends: int = 0
    answered: bool = False
    """The first token has come, so what the prefill leg had reserved is released."""
    rounds: list[tuple[Placed, int]] = field(default_factory=list)
    """Every choice of an instance for it, with the attempt."""
    last_id: str = ""
    """The instance that it was placed on last."""


class RequestMachine:
    """One request. Its attributes may be read by anybody, and are changed by ``on`` alone."""

    phase: Phase = Phase.NEW
    leg: Leg = Leg.WHOLE
    """PREFILL: it is split."""
    attempt: int = 1
    """Counts reservations that replaced one another, also those that the store had lost."""
    tries: int = 0
    """The number of times that an instance had room for it."""
    excluded: frozenset[str] = frozenset()
    """Instances that failed it."""
    placed: Placed | None = None
    """The reservation that stands."""
    estimate: Placed | None = None
    """The last reservation that was made: its TTFT is expected, also after it was lost."""
    awaits_since_s: float | None = None
    """When it began to wait for the first instance of the pool, on the driver's clock; it stays once it has."""
    enqueued_ms: int = 0
    """The time of its first reservation, by the store's clock."""
    target: InstanceSpec | None = None
    """The last instance that had room for it; of a split request, that of its prefill leg."""
    instance_id: str = ""
    """The id of that instance; empty: none had room."""
    answering_id: str = ""
    """The instance whose answer the client gets, or is to get: that of the decode leg as soon as one has room."""
    uncached_tokens: int = 0
    """Prompt tokens that that instance has to prefill, by its KV metadata."""
    grant: Grant | None = None
    """The grant that dispatched it last; None where it was not held."""
    sent_tokens: int = 0
    """Tokens of the answer that the client had when it was continued last: its prompt has grown by them."""
    decode: DecodeLeg | None = None
    decode_attempt: int = 0
    """Counts reservations of decode legs."""
    turn: Turn | None = None
    """The request is in the ledger of runs as this turn, from when it is first placed to its end."""
    parked_s: float = 0.0
    """Time that the turn waited for memory."""
    trial: Trial | None = None
    """The request is the one copy of its prompt that may be sent."""
    failure: InstanceFailure | None = None
    """The last one that it was, or is to be, tried again after."""
    drawn_reply: Drawn | DrawnReply | None = None
    """The store's reply to its draws, see ``drawn``."""
    is_limited: bool = False
    """A limit of its tenant kept it out."""
    registered: bool = False
    """The store has had a record of it that counts on no instance: it is passed on, or was parked."""
    disputed: tuple[tuple[str, InstanceFailure], ...] = ()
    """Answers that its instances are to blame for if another one answers it."""

    # The figures for people. ``…_s`` is its age at that time, unless it says otherwise.
    failures: tuple[tuple[str, InstanceFailure, float], ...] = ()
    """Each with its instance and the age at which it came."""
    continuations: tuple[tuple[str, int, float], ...] = ()
    """Every time that its answer was to go on elsewhere: the instance that had answered until then, the tokens that the
    client had of the whole answer, and the age."""
    placed_s: float | None = None
    held_s: float = 0.0
    """Time that it was held, until the last grant."""
    held_since_s: float | None = None
    """The start of its present hold, on the driver's clock."""
    dispatched_s: float = 0.0
    """The start of its present try, on the driver's clock."""
    answers_since_s: float | None = None
    """The first token of its present try, on the driver's clock."""
    former_tries: int = 0
    """Tries before it was continued last."""
    first_token_s: float | None = None
    on_time: bool | None = None
    """Whether its client got the first token within its SLO; None: that is open, or never judged. It is judged once, by
    what comes first of its first token, its deadline and its end. A request is late from the moment its deadline passes
    without a first token, and one that the fleet refuses or fails is not on time either. A client that leaves before
    the deadline, or is refused for what it does itself, is neither. Where the first token is not seen, as of an answer
    that does not stream, its prefill must be over at the deadline, as far as the fleet knows."""
    prefilled_s: float | None = None
    """The age of the request when its prefill leg had answered."""
    ended_s: float | None = None
    outcome: Outcome | None = None
    usage: Usage | None = None
    charged: Charge | None = None
    """The tokens that it is charged, where a tenant is; None: none."""

    evictions: int = 0
    """Times that it left an instance for a request of a higher class."""

    _evicts: bool = False
    """The request would be late, unless others leave an instance for it."""
    _continues: bool = False
    """The request is admitted once more for the rest of its answer."""
    presumed_s: float | None = None
    """When the prefill of its present try was presumed over, on the driver's clock."""
    _overdue_in: Phase | None = None
    """The phase on the instance when the request had taken longer than a request may; None: it has not."""

    def __init__(self, request_id: str, spec: RequestSpec, rules: RequestRules, now_s: float) -> None:
        self.request_id = request_id
        self.spec = spec
        self.rules = rules
        self.started_s = now_s
        self.searches: list[tuple[SearchCourse, int]] = []
        """The course of every search for an instance that came to an end, with its attempt."""
        self.searched: StoredRequest | None = None
        """The record that it was, or is, to be placed by last: nothing of it is said twice."""

    def on(self, event: Event, now_s: float) -> Effects:
        """Take in what happened; returns what is to be done.

        Raises:
            TransitionError: the event is not legal in this phase; nothing has changed.
        """
        handler = _TAKEN_IN[self.phase].get(type(event))
        if handler is not None:
            return handler(self, event, now_s)
        if self.phase is _DONE:
            return _NOTHING
        raise TransitionError(f"a request that is {self.phase} cannot take {event}")

    # what it is now --------------------------------------------------------------------------------------------
    @property
    def is_done(self) -> bool:
        return self.phase is _DONE

    @property
    def to_send(self) -> Leg:
        """The leg that is to be sent now, to ``target`` or to that of the decode leg; WHOLE for the request itself.

        PREFILL while PAIRED, too: its decode leg goes first then, and asks for that one.
        """
        return _DECODE if self.phase is _DECODING else self.leg

    @property
    def max_load_tokens(self) -> int | None:
        """Tokens that its instance may load from tiers for it; None: all that they have. One that was moved since it
        was placed has no limit: what the other one has is not known."""
        placed = self.placed
        if placed is None or placed.instance_id != self.instance_id:
            return None
        return placed.reply.chosen.loads.most_tokens

    @property
    def source(self) -> Source | None:
        """The instance that its own pulls a part of its prompt from. One that was moved since it was placed pulls
        nothing."""
        placed = self.placed
        source = None if placed is None else placed.reply.chosen.loads.source
        if source is None or placed is None or placed.instance_id != self.instance_id:
            return None
        return source

    @property
    def pulled_within_s(self) -> float | None:
        """Longest wait for the first token of a try that pulls: what is due later is sent once more, without a source.
        An engine that finds nothing at its source computes the prompt, and has time for that. None where nothing is
        pulled, or where its client waits for a whole answer of unknown length."""
        source, placed = self.source, self.placed
        if source is None or placed is None or self.target is None:
            return None
        load = placed.reply.seen.loads.get(self.instance_id)
        rate = self.target.prefill_tokens_per_s if load is None else load.prefill_tokens_per_s
        expected_s = max(0.0, placed.reply.chosen.ttft_s)
        unpulled_s = max(0.0, expected_s - placed.reply.chosen.loads.load_s) + source.tokens / rate
        limit_s = PULL_PATIENCE * max(expected_s, unpulled_s) + PULL_GRACE_S
        if self.spec.streams:
            return limit_s
        limit_tokens = self.spec.output_limit
        return None if limit_tokens is None else limit_s + limit_tokens * SLOWEST_TOKEN_S

    @property
    def shows_first_token(self) -> bool:
        """Whether the first byte of its answer comes with the first token, and not only with the last one."""
        return (self.spec.streams or self.leg is _PREFILL) and not self.spec.hides_first_token

    @property
    def is_decoded(self) -> bool:
        """Whether a decode instance answers it, or another one as such, which may give it back. What is passed on is
        not given back."""
        if self.spec.chain is None:
            return False
        return self.leg is _PREFILL or (self.target is not None and self.target.role is _DECODE_ROLE)

    @property
    def is_evictable(self) -> bool:
        """Whether it may have to leave its instance for a request of a higher class."""
        rule = self.rules.eviction
        return rule is not None and self.spec.can_go_on and rule.is_evictable(self.spec.claim.class_rank)

    def instance_for(self, leg: Leg) -> InstanceSpec:
        """The instance that has room for the leg; WHOLE: for the request itself. The caller knows that there is one."""
        target = self.target
        if leg is _DECODE:
            target = None if self.decode is None else self.decode.target
        assert target is not None
        return target

    @property
    def kv_within_s(self) -> float | None:
        """Longest wait for the first token of its decode leg. None where its client waits for the whole answer, which
        is of unknown length: the time to the first byte of such an answer bounds it."""
        limit_s = self.rules.transfer_timeout_s
        if self.spec.streams:
            return limit_s
        limit_tokens = self.spec.output_limit
        return None if limit_tokens is None else limit_s + limit_tokens * SLOWEST_TOKEN_S

    def stored_name(self) -> str:
        """See ``ClusterView.stored_name``. Where only one instance can answer, its name does not matter."""
        return "" if self.spec.pinned_to is not None else self.rules.fleet.sight.view.stored_name(self.spec.model)

    @property
    def expected_ttft_s(self) -> float | None:
        """The TTFT that its placement expected; None once it was placed again, or waited for the first instance: no
        estimate includes the time lost then."""
        if self.attempt > 1 or self.estimate is None or self.awaits_since_s is not None:
            return None
        return self.parked_s + self.estimate.decision.expected_ttft_s

    @property
    def was_kept(self) -> bool:
        """Whether its record was kept after a try, or while it was parked, so that it is metered even if no instance
        has it."""
        return (self.attempt > 1 or self.registered) and self.spec.claim.account != ""

    @property
    def is_kept(self) -> bool:
        """Whether no instance has its record, or is to have it, and it is not over."""
        if not self.spec.claim.account or self.spec.chain is None or self.phase is _DONE:
            return False
        if self.placed is None:
            return self.tries > 0 or self.attempt > 1 or self.registered
        return self.decode is not None and self.decode.answered

    def age_s(self, now_s: float) -> float:
        return now_s - self.started_s

    def queued_for_s(self, now_s: float) -> float:
        """The time since it asked for an instance: since its turn went, or since it was continued last."""
        return self.age_s(now_s) - (self.continuations[-1][2] if self.continuations else self.parked_s)

    def chain(self) -> Chain | None:
        """The chain of its prompt, with the tokens of the answer that its client has behind it."""
        chain, sent_tokens = self.spec.chain, self.sent_tokens
        if chain is None or not sent_tokens:
            return chain
        return replace(chain, prompt_tokens=chain.prompt_tokens + sent_tokens)

    @property
    def expected_output_tokens(self) -> int:
        """Tokens that its answer, or the rest of it, is expected to have."""
        expected = self.spec.expected_output_tokens
        return max(1, expected - self.sent_tokens) if self.sent_tokens else expected

    def parked_so_far_s(self, now_s: float) -> float:
        """Time that the turn waited for memory so far."""
        return self.age_s(now_s) if self.phase is Phase.PARKED else self.parked_s

    def held_so_far_s(self, now_s: float) -> float:
        """Time that it was held so far."""
        return self.held_s if self.held_since_s is None else self.held_s + now_s - self.held_since_s

    def _move(self, given: Input) -> None:
        try:
            self.phase = TRANSITIONS[self.phase, given]
        except KeyError:
            raise TransitionError(f"a request that is {self.phase} cannot be {given}") from None

    # from its arrival to an instance ---------------------------------------------------------------------------
    def _arrived(self, _: Arrived, now_s: float) -> Effects:
        spec, rules = self.spec, self.rules
        if rules.scheduling.admit_runs and spec.chain is not None:
            # A longer SLO of a client does not count: with it, its late turns would pass those of others.
            usual_s = slo_of(rules.scheduling, spec.chain.prompt_tokens, None, spec.claim.class_rank)
            self.turn = Turn(
                self.request_id,
                rules.replica_id,
                spec.run,
                spec.chain,
                WAITS_OF_SLO * min(spec.slo_s, usual_s),
                tenant=spec.claim.tenant,
                share=self._share(),
                stored_tokens=spec.stored_tokens,
            )
        return self._admit(now_s)

    def _share(self) -> Share | None:
        claim = self.spec.claim
        if claim.weight is None:
            return None
        return Share(self._shares_as(), claim.weight, len(self.rules.fleet.sight.view.ready))

    def _turn_goes(self, _: TurnGoes, now_s: float) -> Effects:
        self.parked_s = self.age_s(now_s)
        return self._admit(now_s)

    def _trial_over(self, _: TrialOver, now_s: float) -> Effects:
        return self._admit(now_s)

    def _admit(self, now_s: float) -> Effects:
        """Place it, for the first time or once more, as soon as its prompt may be sent."""
        failure, quarantine = self.failure, self.rules.evidence.quarantine
        # Without suspects no request has to wait, and one that is on trial itself does not wait for its own trial.
        if quarantine.suspects and self.trial is None:
            admission = quarantine.admit(self.spec.prompt_hash, now_s)
            if isinstance(admission, OtherTrial):
                self._move(Input.SUSPECTED)
                return (AwaitTrial(admission.trial, admission.within_s),)
            if isinstance(admission, Quarantined):
                return self._refuse(Refusal.QUARANTINED, now_s, quarantined=admission)
            self.trial = admission
        if failure is None:
            self._move(_ADMITTED)
            return self._search(now_s)
        evidence, continues = self.rules.evidence, self._continues
        if not (evidence.take_continuation(failure, now_s) if continues else evidence.take_retry(failure, now_s)):
            return self._refuse(Refusal.BUDGET_SPENT, now_s)
        self._move(_ADMITTED)
        self._continues = False
        counted = CountRetry(failure.kind, continues=continues)
        if self.spec.chain is None:
            return (counted, *self._search(now_s))
        released: tuple[Release, ...] = (self._try_over(draws_stand=True),)
        if self.decode is not None:
            released = (self._over(self.decode.request_id, self.decode_attempt), *released)
            self.decode, self.answering_id = None, self.instance_id
        self.attempt += 1
        return (counted, ReleaseFirst(released), *self._search(now_s))

    def _search(self, now_s: float) -> Effects:
        chain = self.chain()
        if chain is None:
            if self.spec.claim.account and not self.registered:
                return (Register(self.register_record(), self.spec.claim.draws),)
            return self._pick(now_s)
        search = self._new_search(chain)
        self.searched = search.request
        return (Reserve(search),)

    def _new_search(self, chain: Chain) -> Search:
        rules, spec, slo_s = self.rules, self.spec, self.spec.slo_s
        search, sight = rules.search_whole, rules.fleet.sight
        if spec.may_split:
            search, view = rules.search, sight.view
            if search.split is not None and view.decoding is not None:
                slo_s = search.split.prefill_slo_s(slo_s, chain.prompt_tokens, view, sight.learned)
        if spec.pinned_to is not None:
            search = replace(search, policy=Pinned(search.policy, spec.pinned_to))
        return Search(
            search,
            RouteQuery(chain, slo_s, 0, self.expected_output_tokens, self.excluded),
            self._unplaced(self.request_id, chain, slo_s, self.attempt),
            spec.claim,
            refuses=rules.refuses_late and self.attempt == 1 and not self._evicts,
            only=spec.only,
            pulls=spec.may_pull and not self.failures,  # what has failed once is computed
            adapter_share=spec.adapter_share,
            turn=self.turn if self.attempt == 1 and not self.parked_s else None,
            was_admitted=self.attempt > 1 or self.registered,
        )

    def _unplaced(self, request_id: str, chain: Chain, slo_s: float, attempt: int) -> StoredRequest:
        """The record of the request, or of a leg, before it is placed."""
        spec, claim = self.spec, self.spec.claim
        return StoredRequest(
            request_id,
            self.rules.replica_id,
            "",
            _STORED_HELD,
            attempt,
            uncached_tokens=0,
            prompt_tokens=chain.prompt_tokens,
            expected_output_tokens=self.expected_output_tokens,
            slo_ms=round(slo_s * 1000),
            enqueued_ms=self.enqueued_ms,
            pinned=spec.pinned_to is not None or spec.only is not None,
            stored_tokens=spec.stored_tokens,
            model=self.stored_name(),
            revision=spec.revision,
            tenant=claim.tenant,
            drawn=drawn_text(claim.draws) if claim.draws is not None else "",
            account=claim.account,
            shares_as=self._shares_as(),
            adapter=spec.adapter,
        )

    def register_record(self) -> StoredRequest:
        """The record of a request that is passed on: it counts on no instance."""
        nothing = Chain((), 1, 0)
        return replace(self._unplaced(self.request_id, nothing, self.spec.slo_s, 1), state=RequestState.DISPATCHED)

    def kept_record(self) -> StoredRequest:
        """The record that was kept of its last try, or as it was parked: like that of a request that is passed on it
        counts on no instance. Once its decode leg answers, that one has drawn."""
        kept = replace(self.register_record(), attempt=self.attempt)
        if self.attempt == 1 and not self.tries:
            kept = replace(kept, state=_STORED_HELD)
        return kept if self.placed is None else replace(kept, drawn="")

    def _was_registered(self, event: Registered, now_s: float) -> Effects:
        if self.spec.chain is not None:
            raise TransitionError("a request that is scheduled is not registered")
        self.registered, self.drawn_reply = True, event.drawn
        return self._pick(now_s)

    def _pick(self, now_s: float) -> Effects:
        """Send a request that is not scheduled to the less busy of two suitable instances."""
        rules = self.rules
        target = self._pick_outside(self.excluded)
        if target is None:
            return self._not_placed(NotPlaced(SearchFailed()), now_s)
        rules.evidence.breakers.sending(target.instance_id, now_s)
        rules.balancer.enter(target.instance_id)
        return self._dispatch(target, now_s)

    def _pick_outside(self, excluded: frozenset[str]) -> InstanceSpec | None:
        rules, spec = self.rules, self.spec
        if spec.only is not None:
            excluded |= rules.fleet.sight.view.instances.keys() - spec.only
        return pick_instance(rules.fleet, rules.balancer, (spec.model, spec.revision), excluded, spec.pinned_to)

    def _reserved(self, event: Reserved, now_s: float) -> Effects:
        course, breakers = event.course, self.rules.evidence.breakers
        placed = course.placed
        reply = placed.reply
        self.searches.append((course, self.attempt))
        self.placed = self.estimate = placed
        self.drawn_reply = reply.drawn_reply
        self.enqueued_ms, self.leg = reply.enqueued_ms, reply.chosen.leg
        if breakers.troubled:
            breakers.sending(placed.instance_id, now_s)
        if self.tries == 0:
            self.placed_s = now_s - self.started_s
        if reply.status is _PLACE_HELD:
            self._move(_QUEUED)
            self.held_since_s = now_s
            awaits = AwaitGrant(placed, self.attempt, max(0.0, self.rules.max_hold_s - self.held_s))
            return (awaits,) if self.rules.eviction is None else (*self._evicting(reply), awaits)
        if event.target is None:
            return self._removed(now_s)
        self.grant, self.uncached_tokens = None, reply.chosen.uncached_tokens
        dispatched = self._dispatch(event.target, now_s)
        return dispatched if self.rules.eviction is None else (*self._evicting(reply), *dispatched)

    def _may_evict(self) -> bool:
        rule = self.rules.eviction
        return (
            rule is not None and rule.may_evict(self.spec.claim.class_rank) and self.attempt == 1 and not self._evicts
        )

    def _evicting(self, reply: PlaceReply) -> Effects:
        """Have answers of lower classes leave the instance that it was placed on for the first time, if it would miss
        its SLO there."""
        rule, chain, chosen = self.rules.eviction, self.chain(), reply.chosen
        load = reply.seen.loads.get(chosen.instance_id or "")
        if rule is None or chain is None or load is None or self.attempt > 1:
            return _NOTHING
        shortage = rule.shortage(
            self.spec.claim.class_rank,
            load,
            ttft_s=chosen.ttft_s,
            slo_s=self.spec.slo_s,
            uncached_tokens=chosen.uncached_tokens,
            context_tokens=chain.prompt_tokens + self.expected_output_tokens,
        )
        return _NOTHING if shortage is None else (Evict(load.instance_id, shortage),)

    def under_way(self) -> AnswerUnderWay | None:
        """The answer that it has under way on its instance; None: it may not be evicted from there."""
        chain = self.chain()
        if chain is None or not self.is_evictable or self.leg is not _WHOLE or self.phase not in ON_AN_INSTANCE:
            return None
        prefill_tokens = 0 if self.phase is _ANSWERING else self.uncached_tokens
        context_tokens = chain.prompt_tokens + self.expected_output_tokens
        return AnswerUnderWay(
            self.request_id,
            self.spec.claim.class_rank,
            prefill_tokens,
            context_tokens,
            self.dispatched_s,
            self.evictions,
        )

    def _granted(self, event: Granted, now_s: float) -> Effects:
        self._hold_ends(now_s)
        if event.target is None:
            return self._removed(now_s)
        self.grant, self.uncached_tokens = event.grant, event.grant.uncached_tokens
        return self._dispatch(event.target, now_s)

    def _hold_ends(self, now_s: float) -> None:
        self.held_s, self.held_since_s = self.held_so_far_s(now_s), None

    def _dispatch(self, target: InstanceSpec, now_s: float) -> Effects:
        pairs = self.leg is _PREFILL and self.rules.decode_first
        self._move(_TAKEN_IN_PAIR if pairs else _TAKEN)
        self.target = target
        self.instance_id = self.answering_id = target.instance_id
        self.tries += 1
        self.dispatched_s, self.answers_since_s = now_s, None
        return self._search_decoder() if pairs else _SEND

    def _removed(self, now_s: float) -> Effects:
        why = Refusal.INSTANCE_REMOVED if self.failure is None else Refusal.NOBODY_LEFT
        return self._refuse(why, now_s)

    def _not_placed(self, event: NotPlaced, now_s: float) -> Effects:
        why = event.why
        if why.parked and self.turn is not None:
            self._move(Input.PARKS)
            self.registered = self.spec.claim.account != ""
            return (AwaitTurn(self.turn, self.rules.max_hold_s),)
        if why.course is not NO_COURSE:
            self.searches.append((why.course, self.attempt))
        if why.duplicate:
            self._move(Input.SEARCHES_AGAIN)
            return _RENAME
        if why.limited is not None:
            self.drawn_reply, self.is_limited = why.limited, True
            return self._refuse(Refusal.LIMITED, now_s, failed=why, reserved=False)
        if why.missed is not None:
            if self._may_evict():
                self._move(Input.SEARCHES_AGAIN)
                self._evicts = True  # it is placed where it would be late: what makes it late is to leave
                return self._search(now_s)
            return self._refuse(Refusal.WOULD_BE_LATE, now_s, failed=why, reserved=False)
        if why.full:
            return self._refuse(Refusal.QUEUE_FULL, now_s, failed=why, reserved=False)
        if self.failure is None:
            return self._await_instance(now_s)
        if self.failure.kind is FailureKind.RECOMPUTED and self.excluded:
            self._move(Input.SEARCHES_AGAIN)
            self.excluded = frozenset()  # the one that gave it back is better than none
            return self._search(now_s)
        return self._refuse(Refusal.NOBODY_LEFT, now_s, reserved=False)

    def _await_instance(self, now_s: float) -> Effects:
        """Wait for the first instance, where the pool may be without any and this one could take the request."""
        room, spec = self.rules.waiting_room, self.spec
        if room is None or self.rules.fleet.sight.view.ready or spec.pinned_to is not None or spec.only is not None:
            return self._refuse(Refusal.NO_INSTANCE, now_s, reserved=False)
        if room.is_full:
            return self._refuse(Refusal.TOO_MANY_WAIT, now_s, reserved=False)
        if self.awaits_since_s is None:
            self.awaits_since_s = now_s
        self._move(Input.PUT_OFF)
        room.enter()
        return (AwaitInstance(max(0.0, room.within_s - (now_s - self.awaits_since_s))),)

    def _instance_ready(self, _: InstanceReady, now_s: float) -> Effects:
        self._leave_room()
        self._move(Input.INSTANCE_CAME)
        return self._search(now_s)

    def _leave_room(self) -> None:
        if self.rules.waiting_room is not None:
            self.rules.waiting_room.leave()

    def _renamed(self, event: Renamed, now_s: float) -> Effects:
        self.request_id = event.request_id
        return self._search(now_s)

    def _reservation_lost(self, _: ReservationLost, now_s: float) -> Effects:
        self._move(Input.RESERVATION_LOST)
        self._hold_ends(now_s)
        self.placed = None
        self.attempt += 1
        # The store may have it after all: an older copy of the store may have said that it is lost.
        return (ReleaseFirst((self._try_over(draws_stand=True),)), *self._search(now_s))

    def _turned_away(self, event: TurnedAway, now_s: float) -> Effects:
        return self._refuse(event.why, now_s)

    # on an instance --------------------------------------------------------------------------------------------
    def _was_sent(self, _: Sent, now_s: float) -> Effects:
        before = self.phase
        self._move(_SENT)
        if self.decode is not None and before is _DECODING:
            self.decode.sends += 1
        if before not in TO_BE_SENT or self.spec.chain is None or self.shows_first_token:
            return _NOTHING
        return (StartTimer(self._prefill_delay_s()),)

    def _prefill_delay_s(self) -> float:
        """Return in how many seconds a request that is sent now is expected to have its first token. A held one waited
        for room in a full dispatch window, which is prefilled before it."""
        assert self.target is not None
        if self.grant is None and self.placed is not None:
            return self.placed.decision.expected_ttft_s
        return self.rules.fleet.window_delay_s(self.target, self.uncached_tokens)

    def _prefill_presumed(self, _: PrefillPresumed, now_s: float) -> Effects:
        """An answer that does not stream shows no first token: its expected time is taken instead, and nothing that
        judges the instance reads it."""
        before = self.phase
        self._move(Input.PREFILL_PRESUMED)
        if before not in PREFILL_UNDER_WAY:
            return _NOTHING
        self.presumed_s = now_s
        return (Post(Release(self.request_id, self.instance_id)),)

    def _first_token(self, _: FirstToken, now_s: float) -> Effects:
        before = self.phase
        self._move(_FIRST_TOKEN)
        if self.trial is not None:
            self.trial.passes()
        if before is not _ANSWERING:
            self.answers_since_s = now_s
        if self.first_token_s is None:
            self.first_token_s = age_s = now_s - self.started_s
            if self.on_time is None and self.spec.chain is not None:
                is_in_time = age_s <= self.spec.slo_s
                if is_in_time or self._sees_first_token:  # else it is the first byte alone that is late
                    self.on_time = is_in_time
        self.rules.evidence.began(self.answering_id, now_s)
        decode = self.decode
        if self.spec.chain is None:
            return _NOTHING
        if decode is None:  # a stream that was given back has another first token, and another reservation
            return (self._prefill_over(),) if before in PREFILL_UNDER_WAY else _NOTHING
        if decode.answered:
            return _NOTHING
        decode.answered = True
        return (Post(self._try_over(self._transfer_sample(decode, now_s))),)

    @property
    def _sees_first_token(self) -> bool:
        """Whether the first token that its client gets is seen."""
        return self.spec.streams and not self.spec.hides_first_token

    def _deadline_passed(self, _: DeadlinePassed, now_s: float) -> Effects:
        if self.on_time is None and self.spec.chain is not None:
            self.on_time = not self._sees_first_token and self.phase in _PREFILL_IS_OVER
        return _NOTHING

    def _prefill_over(self) -> Post:
        """The first token came, or the prefill leg has answered: no tokens of the request are pending any more."""
        seen = self.shows_first_token
        release = Release(self.request_id, self.instance_id, note="{}" if seen else "", seen=seen)
        return Post(release, teaches=seen and self._teaches_ttft())

    def _teaches_ttft(self) -> bool:
        """Return whether its TTFT says something of its instance: it went where it was placed, at the first try, and
        was not put off."""
        placed, grant = self.placed, self.grant
        if placed is None or self.attempt > 1 or placed.decision.instance_id != self.instance_id:
            return False
        return grant is None or not grant.deferred

    def _transfer_sample(self, decode: DecodeLeg, now_s: float) -> str:
        """The sample of its transfer, as JSON; "" where its decode leg was placed more than once."""
        if decode.staged_s is None or len(decode.rounds) != 1:
            return ""
        chain = self.chain()
        assert chain is not None
        return transfer_note(self.age_s(now_s) - decode.staged_s, chain.prompt_tokens - decode.cached_tokens)

    # the decode leg --------------------------------------------------------------------------------------------
    def _prefill_ended(self, _: PrefillEnded, now_s: float) -> Effects:
        before = self.phase
        if self.leg is not _PREFILL:
            raise TransitionError(f"a request that is {before}, and is not split, has no prefill leg")
        self._move(Input.PREFILL_ENDED)
        self.rules.evidence.breakers.succeeded(self.instance_id, now_s)
        effects: Effects = ()
        if before is not _ANSWERING:
            self.prefilled_s = self.age_s(now_s)
            effects = (self._prefill_over(),)
        if self.decode is None:
            effects += self._search_decoder()
        assert self.decode is not None
        if before is not _ANSWERING:
            self.decode.staged_s = self.age_s(now_s)
        return effects

    def _search_decoder(self) -> Effects:
        chain, rules = self.chain(), self.rules
        assert chain is not None
        if self.decode is None:
            self.decode = DecodeLeg(decode_leg_id(self.request_id), self.excluded, self._source())
        leg = self.decode
        self.decode_attempt += 1
        query = RouteQuery(chain, self.spec.slo_s, 0, self.expected_output_tokens, leg.failed | leg.avoided)
        record = self.decode_record(chain)
        search = Search(
            rules.decode_search,
            query,
            record,
            self.spec.claim,  # each leg draws and gives back on its own: whichever is lost, the books agree
            leg=_DECODE,
            adapter_share=self.spec.adapter_share,
        )
        return (ReserveDecoder(search),)

    def decode_record(self, chain: Chain) -> StoredRequest:
        """The record of its decode leg before it is placed. Nothing of what pins the request pins this leg."""
        return StoredRequest(
            decode_leg_id(self.request_id),
            self.rules.replica_id,
            "",
            _STORED_HELD,
            self.decode_attempt,
            uncached_tokens=0,
            prompt_tokens=chain.prompt_tokens,
            expected_output_tokens=self.expected_output_tokens,
            slo_ms=round(self.spec.slo_s * 1000),
            model=self.stored_name(),
            revision=self.spec.revision,
            tenant=self.spec.claim.tenant,
            drawn=drawn_text(self.spec.claim.draws) if self.spec.claim.draws is not None else "",
            account=self.spec.claim.account,
            shares_as=self._shares_as(),
        )

    def _shares_as(self) -> str:
        """The name of its tenant in the books of shares; empty where there are none."""
        return "" if self.spec.claim.weight is None else self.spec.claim.tenant or NO_TENANT

    def _source(self) -> frozenset[str]:
        spec = self.rules.fleet.sight.view.instances.get(self.instance_id)
        return frozenset() if spec is None or not serves(spec.role, _DECODE) else frozenset((spec.instance_id,))

    def _decoder_reserved(self, event: DecoderReserved, now_s: float) -> Effects:
        leg, placed, target = self.decode, event.placed, event.target
        if target is None:
            detail = f"instance {placed.instance_id!r} was just removed"
            return self._failed(Failed(InstanceFailure(FailureKind.NO_DECODER, detail)), now_s)
        self._move(Input.DECODER_TAKEN)
        chain = self.chain()
        assert leg is not None
        assert chain is not None
        leg.placed, leg.target = placed, target
        leg.last_id = self.answering_id = target.instance_id
        leg.rounds.append((placed, self.decode_attempt))
        leg.cached_tokens = max(0, chain.prompt_tokens - placed.reply.chosen.uncached_tokens)
        leg.placed_s = self.age_s(now_s)
        return _SEND

    def _no_decoder(self, _: NoDecoder, now_s: float) -> Effects:
        leg = self.decode
        if leg is not None and (leg.failed or leg.avoided):
            self._move(Input.DECODES_AGAIN)
            leg.failed = leg.avoided = frozenset()  # one that failed before, or has the KV, is better than none
            return self._search_decoder()
        return self._failed(Failed(InstanceFailure(FailureKind.NO_DECODER, "no instance takes the decode leg")), now_s)

    # failures --------------------------------------------------------------------------------------------------
    def _failed(self, event: Failed, now_s: float) -> Effects:
        before, decode = self.phase, None if event.leg is _PREFILL else self.decode
        failure = self._as_shown(event.failure, now_s)
        if self.source is not None and (failure.kind is FailureKind.TRANSFER or failure.lost_kv):
            failure = replace(failure, kind=FailureKind.PULL)
        if event.begun:
            self._move(Input.BROKE_OFF)
            self._note_overdue(failure, before)
            self._judge(self.answering_id, failure, now_s)
            self._note_loss(self.answering_id, failure, now_s)
            return _NOTHING
        failed_id = self.instance_id
        if decode is not None:
            failed_id = decode.last_id or failed_id
        # First what the failure shows, then what follows from it: whether another decoder or instance may try depends
        # on breakers, on the quarantine of the prompt and on its trial, which has to end before another one begins.
        self._judge_failed(decode, failure, now_s)
        self._note_loss(failed_id, failure, now_s)
        self._end_trial(completed=False)
        self.failures += ((failed_id, failure, self.age_s(now_s)),)
        if before is _DECODING and event.keeps_kv and self._admit_decode_again(failure, now_s):
            return self._decode_again(failure)
        if event.sent_tokens is not None and before is _ANSWERING:
            self._continue(failed_id, event.sent_tokens, now_s)
        else:
            self._move(Input.FAILED)
        if failure.kind is FailureKind.EVICTED:  # it may come back, and no try was lost
            self.evictions += 1
            self.former_tries = self.tries
        elif failure.kind is FailureKind.PULL:
            self.former_tries = self.tries  # its instance may compute what did not come
        elif not failure.lost_adapter:
            self._exclude(decode, failure)
        self.failure = failure
        self._note_overdue(failure, before)
        left: Effects = (self._leave(failure),)
        self.placed = None
        # From here on it is admitted again, or refused: the effects of leaving come first either way.
        if event.overdue:
            return left + self._refuse(Refusal.OVERDUE, now_s)
        if failure.kind in _TIMES_OUT and not self.spec.streams:
            # A complete answer was due: most likely it was being computed, and another instance would take as long.
            return left + self._refuse(Refusal.TOO_SLOW, now_s)
        if len(self.continuations) > MAX_CONTINUATIONS:
            return left + self._refuse(Refusal.CONTINUED_TOO_OFTEN, now_s)
        if self.tries - self.former_tries >= self.rules.max_tries:
            return left + self._refuse(Refusal.TRIES_SPENT, now_s)
        return left + self._admit(now_s)

    def _as_shown(self, failure: InstanceFailure, now_s: float) -> InstanceFailure:
        """The failure by what it shows. A whole answer that took too long shows nothing of its instance where it may be
        so long, or others were answered beside it. An instance that hangs is found by requests whose first tokens are
        seen, by short answers, and by the leader."""
        if failure.kind is not FailureKind.TIMEOUT or self.spec.streams or self.first_token_s is not None:
            return failure
        waited_s = now_s - self.dispatched_s
        since_s = now_s - waited_s / 2  # one that hangs since the middle of the wait has answered others before
        if self._may_answer_for(waited_s) or self.rules.evidence.has_answered(self.answering_id, since_s):
            return replace(failure, kind=FailureKind.OVERDUE)
        return failure

    def _may_answer_for(self, time_s: float) -> bool:
        """Whether its answer may be so long that an engine computes it for this time."""
        spec = self.spec
        if spec.chain is None:
            return spec.body_tokens > 0
        return spec.output_limit is None or spec.output_limit * spec.answers * SLOWEST_TOKEN_S >= time_s

    def _note_overdue(self, failure: InstanceFailure, before: Phase) -> None:
        if failure.kind is FailureKind.OVERDUE:
            self._overdue_in = before
        else:
            self.presumed_s = None

    def _continue(self, failed_id: str, sent_tokens: int, now_s: float) -> None:
        """Start again with what its client has of the answer as a part of its prompt. Instances that failed it before
        it began to answer may have recovered since, and its wait for the rest begins now."""
        self._move(Input.CONTINUES)
        self.continuations += ((failed_id, sent_tokens, self.age_s(now_s)),)
        self.sent_tokens, self.former_tries, self._continues = sent_tokens, self.tries, True
        self.excluded, self.enqueued_ms, self.held_s = frozenset(), 0, 0.0

    def _moved(self, event: Moved, now_s: float) -> Effects:
        """Book what has happened: it was not asked for, so no budget and no limit is asked either."""
        failure, target, failed_id, attempt = event.failure, event.target, self.instance_id, self.attempt
        self._move(Input.MOVED)
        self._judge(failed_id, failure, now_s)
        self.failures += ((failed_id, failure, self.age_s(now_s)),)
        self.excluded |= {failed_id}
        left = self._leave(failure)
        decision = None if self.placed is None else self.placed.decision
        self.target, self.instance_id, self.answering_id = target, target.instance_id, target.instance_id
        self.tries += 1
        self.dispatched_s = now_s
        if self.rules.evidence.breakers.troubled:
            self.rules.evidence.breakers.sending(target.instance_id, now_s)
        if self.spec.chain is None:
            self.rules.balancer.enter(target.instance_id)
            return (left, CountRetry(failure.kind))
        known = decision is not None and decision.alternative_id == target.instance_id
        self.uncached_tokens = (
            decision.alternative_uncached_tokens if known and decision else self.spec.chain.prompt_tokens
        )
        self.attempt += 1
        self.grant = None
        released = ReleaseFirst((self._over(self.request_id, attempt),))
        effects: Effects = (left, CountRetry(failure.kind), released, Enter())
        if self.shows_first_token:
            return effects
        return (*effects, StartTimer(self.rules.fleet.window_delay_s(target, self.uncached_tokens)))

    def second_choice(self) -> InstanceSpec | None:
        """The instance that may be sent it should its own not take it: its next best one. It is not reserved there.

        None where only one can answer it, and of a request that is split."""
        target, spec, view = self.target, self.spec, self.rules.fleet.sight.view
        if target is None or spec.pinned_to is not None or self.leg is not Leg.WHOLE:
            return None
        if spec.chain is None:
            return self._pick_outside(self.excluded | {target.instance_id})
        placed = self.placed
        if placed is None:
            return None
        decision = placed.decision
        second = decision.alternative_id if decision.instance_id == target.instance_id else decision.instance_id
        if second is None or second in self.excluded or (spec.only is not None and second not in spec.only):
            return None
        return (
            view.instances.get(second) if second in view.serving(self.stored_name(), self.spec.revision).ready else None
        )

    def _leave(self, failure: InstanceFailure | None) -> LeaveInstance:
        """End the try on the instance."""
        if self.spec.chain is None:
            self.rules.balancer.leave(self.instance_id)
        return LeaveInstance(self.instance_id, failure)

    def _judge_failed(self, decode: DecodeLeg | None, failure: InstanceFailure, now_s: float) -> None:
        """Judge the instance that failed it. None is to blame for a decode leg that no instance took."""
        if decode is None:
            self._judge(self.instance_id, failure, now_s)
        elif decode.target is not None:
            decode.failed |= {decode.target.instance_id}
            self._judge(decode.target.instance_id, failure, now_s)

    def _exclude(self, decode: DecodeLeg | None, failure: InstanceFailure) -> None:
        """Exclude what failed it from the next search."""
        if decode is None:
            self.excluded |= {self.instance_id}
            return
        # KV that is not found is computed on another instance: its source may have failed, and then no decoder is at
        # fault.
        lost_kv = decode.target is not None and failure.lost_kv and failure.kind is not FailureKind.RECOMPUTED
        stuck_again = failure.kind is FailureKind.TRANSFER and bool(self.excluded)
        self.excluded |= {self.instance_id} if lost_kv or stuck_again else decode.failed

    def _admit_decode_again(self, failure: InstanceFailure, now_s: float) -> bool:
        """Take a retry for another decoder of the same KV; False where there is none. A prompt that is suspected gets
        none: what may kill engines waits for its trial from the start."""
        leg, rules = self.decode, self.rules
        assert leg is not None
        if failure.kind in _NEEDS_PREFILL or leg.sends >= DECODES_PER_STAGING or leg.staged_s is None:
            return False
        if self.age_s(now_s) - leg.staged_s > rules.staged_timeout_s or len(leg.rounds) >= rules.max_tries:
            return False
        admission = rules.evidence.quarantine.admit(self.spec.prompt_hash, now_s)
        if isinstance(admission, OtherTrial | Quarantined):
            return False
        self.trial = admission
        return rules.evidence.take_retry(failure, now_s)

    def _decode_again(self, failure: InstanceFailure) -> Effects:
        self._move(Input.DECODES_AGAIN)
        leg = self.decode
        assert leg is not None
        released = self._over(leg.request_id, self.decode_attempt)
        leg.placed = leg.target = None
        self.answering_id = self.instance_id
        return (CountRetry(failure.kind, decodes=True), ReleaseFirst((released,)), *self._search_decoder())

    def _judge(self, instance_id: str, failure: InstanceFailure, now_s: float) -> None:
        """Record what the failure shows of its instance, or keep it until the request ends."""
        if failure.verdict is Verdict.DISPUTED:
            self.disputed += ((instance_id, failure),)
        else:
            self.rules.evidence.failed(instance_id, failure, now_s)

    def _note_loss(self, instance_id: str, failure: InstanceFailure, now_s: float) -> None:
        """Report a death. A request whose answer had gone on there for a while is no suspect."""
        began_s = self.answers_since_s
        prompt_hash = None if began_s is not None and now_s - began_s >= SURVIVED_S else self.spec.prompt_hash
        self.rules.evidence.note_loss(instance_id, failure, prompt_hash, self.request_id, self.dispatched_s, now_s)

    def _end_trial(self, *, completed: bool) -> None:
        trial, self.trial = self.trial, None
        if trial is not None:
            trial.end(completed=completed)

    # ends ------------------------------------------------------------------------------------------------------
    def _refuse(
        self,
        why: Refusal,
        now_s: float,
        *,
        failed: SearchFailed | None = None,
        quarantined: Quarantined | None = None,
        reserved: bool = True,
    ) -> Effects:
        """End it without an answer. Without ``reserved`` the store has said that it made no reservation."""
        before = self.phase
        self._move(Input.REFUSED)
        if self.on_time is None and self.spec.chain is not None and why not in _OF_ITS_OWN_DOING:
            failure = self.failure
            self.on_time = False if failure is None or not failure.blames_the_request else None
        ended = self._end(before, self._outcome_of(why), None, now_s, reserved=reserved)
        return (*ended, Refuse(why, failed, quarantined))

    def _outcome_of(self, why: Refusal) -> Outcome:
        if why in (Refusal.HELD_TOO_LONG, Refusal.OVERDUE, Refusal.TOO_SLOW):
            return Outcome.TIMED_OUT
        failure = self.failure
        if failure is None or why in _REFUSED_IN_ANY_CASE:
            return Outcome.REFUSED
        if failure.blames_the_request:
            return Outcome.CLIENT_ERROR
        timed_out = failure.kind in (FailureKind.TIMEOUT, FailureKind.TRANSFER)
        return Outcome.TIMED_OUT if timed_out else Outcome.UPSTREAM_FAILED

    def _ended(self, event: Ended, now_s: float) -> Effects:
        before = self.phase
        self._move(_ENDED)
        if event.outcome is Outcome.REFUSED and self.on_time is None and self.spec.chain is not None:
            self.on_time = False  # not by the machine: the store did not answer
        return self._end(before, event.outcome, event.usage, now_s, counted=event.counted)

    def _end(
        self,
        before: Phase,
        outcome: Outcome,
        usage: Usage | None,
        now_s: float,
        *,
        reserved: bool = True,
        counted: Counted | None = None,
    ) -> Effects:
        """Settle what is open with the instances, and release what may be reserved, and its turn."""
        effects = self._settle(before, outcome, usage, now_s, reserved=reserved, counted=counted)
        return effects if self.turn is None else self._with_turn_over(self.turn, effects)

    def _with_turn_over(self, turn: Turn, effects: Effects) -> Effects:
        """The last release says that the turn is over, too; where nothing else is released, one is made for it."""
        times, was_sent = self.turn_times_ms(), self.tries > 0
        over = TurnEnd(turn.turn_id, turn.replica_id, self._output_tokens(), *times, was_sent)
        *others, close = effects
        release, last = None, others[-1] if others else None
        if isinstance(last, Post) and last.last:
            release = last.release.ending(over)
            others.pop()
        else:
            release = Release(self.request_id, replica_id=self.rules.replica_id, turn=over)
        return (*others, Post(release, last=True), close)

    def turn_times_ms(self) -> tuple[int, int]:
        """How long its turn took from when it went to its first token, and from then to its end."""
        ended_s, first_s = self.ended_s or 0.0, self.first_token_s
        if not self.tries:
            return 0, 0
        prefilled_s = ended_s if first_s is None else first_s
        return round((prefilled_s - self.parked_s) * 1000), round((ended_s - prefilled_s) * 1000)

    def _output_tokens(self) -> int:
        """The tokens of its answer, as far as they are known."""
        usage = self.usage
        return (usage and usage.output_tokens) or self.sent_tokens

    def _settle(
        self,
        before: Phase,
        outcome: Outcome,
        usage: Usage | None,
        now_s: float,
        *,
        reserved: bool,
        counted: Counted | None,
    ) -> Effects:
        answered, evidence, spec = outcome is _COMPLETED, self.rules.evidence, self.spec
        if usage is not None and not is_plain(usage, self._answer_bound()):
            usage = possible(usage, self._expected())
        self.outcome, self.usage, self.ended_s = outcome, usage, now_s - self.started_s
        if self.on_time is None and spec.chain is not None:
            self.on_time = self._judged_by_end(outcome, self.ended_s)
        is_counted = spec.claim.account or spec.claim.draws is not None
        if is_counted:
            self.charged = self._charge(before, outcome, counted)
        if self.held_since_s is not None:
            self._hold_ends(now_s)
        elif before is _AWAITING:
            self._leave_room()
        if self.trial is not None:
            self._end_trial(completed=answered)
        if self.disputed:
            evidence.settle(self.disputed, now_s, answered=outcome in ANSWERED)
        left: Effects = ()
        if before in ON_AN_INSTANCE:  # else it has been judged, or never was on one
            evidence.ended(self.answering_id, outcome, now_s)
            left = (self._leave(None),)
        elif before is _BROKEN_OFF:
            left = (self._leave(None),)
        may_be_reserved = reserved and (self.tries or before not in _NEVER_RESERVED)
        if spec.chain is not None and (may_be_reserved or self.was_kept):
            if not is_counted:
                return (*left, *self._last_releases(answered, None, ""), _CLOSE)
            used = used_by(outcome, self.charged) if spec.claim.account else ""
            return (*left, *self._last_releases(answered, self._returned(outcome), used), _CLOSE)
        if self.registered or (reserved and before is _PLACING and spec.claim.account):
            used = used_by(outcome, self.charged) if spec.claim.account else ""
            over = self._over(self.request_id, 1, gives_back=self._returned(outcome), used=used)
            return (*left, Post(over, last=True), _CLOSE)
        return (*left, _CLOSE)

    def _judged_by_end(self, outcome: Outcome, age_s: float) -> bool | None:
        """Whether a request was on time that ended before anything else had judged it."""
        is_in_time = age_s <= self.spec.slo_s
        if outcome in ANSWERED:
            return is_in_time or not self._sees_first_token
        if outcome in FAILED_BY_THE_FLEET:
            return False
        return None if is_in_time or not self._sees_first_token else False

    def _last_releases(self, answered: bool, gives_back: Draws | None, used: str) -> Effects:
        """Only the last one meters it: whichever of them is lost, a record is left by which that is done later."""
        sample, decode = self._finished_sample(), self.decode
        if decode is None:
            return (Post(self._over(self.request_id, self.attempt, sample, answered, gives_back, used), False, True),)
        # Each leg has drawn, and one is charged: that of the answer, once it is placed.
        on_own = None if decode.placed is not None else gives_back
        on_decode = gives_back if on_own is None else None
        over = self._over(decode.request_id, self.decode_attempt, sample, answered, on_decode)
        if decode.answered and not used:
            return (Post(over, last=True),)
        own = self._over(self.request_id, self.attempt, "", answered, on_own, used)
        return Post(over), Post(own, last=True)

    def _answer_bound(self) -> int | None:
        """The most tokens that each of its answers may have; None: not known."""
        limit, target = self.spec.output_limit, self.target
        return target.kv_capacity_tokens if limit is None and target is not None else limit

    def _expected(self) -> Expected:
        """The tokens that the request is expected to use, and may use at most."""
        spec, target, answers = self.spec, self.target, self.spec.answers
        chain, limit = spec.chain, spec.output_limit
        return Expected(
            0 if chain is None else spec.stored_tokens + chain.prompt_tokens,
            spec.expected_output_tokens * answers,
            0 if spec.images or spec.stored_tokens else spec.text_bytes,
            None if limit is None else limit * answers,
            None if target is None else target.kv_capacity_tokens * answers,
        )

    def _charge(self, before: Phase, outcome: Outcome, counted: Counted | None) -> Charge | None:
        """The tokens that it is charged; None: none, as it was never sent, or an instance failed it."""
        sent_in = before if before in WAS_SENT else self._overdue_in
        # While the rest of its answer is looked for, its client has a part of it.
        if not (sent_in or (self.sent_tokens and before is not _BROKEN_OFF)):
            return None
        answered, usage = outcome in ANSWERED, self.usage
        if not (answered or keeps_tokens(outcome, begun=self.first_token_s is not None)):
            return None
        if counted is None and not answered and before is not _ANSWERING:
            is_unknown = self.spec.chain is None and self._overdue_in is not None  # it keeps what it drew
            counted = None if is_unknown else NOTHING_COUNTED  # its client had nothing of it
        if usage is not None:
            reported = reported_charge(usage, 0 if counted is None else counted.output_tokens + self.sent_tokens)
            if reported is not None:
                return reported
        spec = self.spec
        if usage is None and answered and counted is not None and spec.chain is not None and not counted.answer_bytes:
            # Its events were counted, and need no bound.
            return Charge(spec.stored_tokens + spec.chain.prompt_tokens, counted.output_tokens + self.sent_tokens)
        if counted is not None and (self.sent_tokens or spec.chain is None):
            # An answer of what is passed on may be anything: bytes are no tokens there.
            answer_bytes = 0 if spec.chain is None else counted.answer_bytes
            counted = Counted(counted.output_tokens + self.sent_tokens, answer_bytes)
        expected = self._expected()
        computes_unseen = not answered and not spec.streams and sent_in in _COMPUTES_UNSEEN
        if computes_unseen:
            expected = replace(expected, output_tokens=self._unseen_tokens(expected))
        return charge(
            usage,
            counted,
            expected if spec.chain is not None else replace(expected, prompt_tokens=spec.body_tokens),
            self.rules.fleet.sight.learned.bytes_per_token,
            computes_unseen=computes_unseen,
        )

    def _unseen_tokens(self, expected: Expected) -> int:
        """The tokens that its engine may have computed of its answers since its prefill was over."""
        since_s, tpot_s = self.presumed_s, self.rules.fleet.sight.learned.tpot_s
        if since_s is None:
            since_s = self.dispatched_s if self.prefilled_s is None else self.started_s + self.prefilled_s
        assert self.ended_s is not None
        answering_s = self.started_s + self.ended_s - since_s
        token_s = SLOWEST_TOKEN_S if tpot_s is None else max(tpot_s, FASTEST_TOKEN_S)
        by_time = round(answering_s / token_s) * self.spec.answers
        return min(max(expected.output_tokens, by_time), expected.most_output_tokens)

    @property
    def drawn(self) -> Drawn | None:
        """The budgets as it left them, or why it is kept out; None: it draws from none, or has not drawn."""
        drawn = self.drawn_reply
        return drawn.read() if isinstance(drawn, DrawnReply) else drawn

    def _returned(self, outcome: Outcome) -> Draws | None:
        """The part of its draws that it gives back to its budgets."""
        draws, charged = self.spec.claim.draws, self.charged
        if draws is None:
            return None
        if charged is not None:
            if charged.reported:
                return rest_of(draws, charged.prompt_tokens, charged.output_tokens)
            if charged.uncounted or draws.are_most:
                return returned(draws, None, None, answered=True)
            return returned(draws, charged.prompt_tokens, charged.output_tokens, answered=True)
        if outcome is Outcome.CLIENT_ERROR and self.tries:  # it was sent: a limit of requests counts it
            return returned(draws, 0, 0, answered=True)
        return returned(draws, None, None, answered=False)

    def _try_over(self, note: str = "", *, draws_stand: bool = False) -> Release:
        """The release of all that it has, up to this attempt, but for the record by which it is metered. Where its
        draws stand, the next try takes them over, and no other request gets between."""
        spec = self.spec
        stand = (
            nothing_of(spec.claim.draws)
            if draws_stand and spec.claim.account and spec.claim.draws is not None
            else None
        )
        return self._over(
            self.request_id, self.attempt, note, gives_back=stand, used=KEPT if self.spec.claim.account else ""
        )

    def _over(
        self,
        leg_id: str,
        attempt: int,
        note: str = "",
        seen: bool = False,
        gives_back: Draws | None = None,
        used: str = "",
    ) -> Release:
        """The release of whatever is left of the request, or of its decode leg, up to this attempt."""
        return Release(leg_id, "", self.rules.replica_id, attempt, note=note, seen=seen, returned=gives_back, used=used)

    # what it teaches -------------------------------------------------------------------------------------------
    def ttft_sample(self) -> str:
        """The sample of its first token: the features of its placement, as JSON."""
        assert self.placed is not None
        assert self.spec.chain is not None
        features = self.placed.features(self.spec.chain, self.rules.search.decode_stall_s)
        noted = None if features.slot_turns else features_to_note(features)
        return orjson.dumps({"features": noted}).decode()

    def _finished_sample(self) -> str:
        """The sample of how many tokens its prompt and its answer had; "" where neither is known."""
        usage, spec, began_s = self.usage, self.spec, self.first_token_s
        if usage is None or self.outcome not in ANSWERED:  # what a client has left is no whole answer
            return ""
        answer_ms = 0 if began_s is None or self.ended_s is None else round((self.ended_s - began_s) * 1000)
        tokens, answer_tokens = usage.prompt_tokens or 0, usage.output_tokens or 0
        return finished_note(
            spec.text_bytes,
            tokens,
            answer_tokens,
            spec.output_limit or 0,
            answer_ms,
            spec.images,
            disproved=self._disproved_tier(usage),
        )

    def _disproved_tier(self, usage: Usage) -> DisprovedTier | None:
        """The tier of its instance that had less of its prompt than its placement expected; None where its answer shows
        none, or it was not answered as it was placed."""
        placed, chain, cached = self.placed, self.spec.chain, usage.cached_tokens
        if placed is None or chain is None or cached is None or self.leg is not Leg.WHOLE or self.failures:
            return None
        found_blocks, loads = placed.reply.seen.hits.get(self.instance_id), placed.reply.chosen.loads
        if found_blocks is None or placed.instance_id != self.instance_id or self.spec.answers > 1:
            return None
        told_tokens = usage.prompt_tokens or 0
        if not self.spec.shows_prompt or not 0.5 <= told_tokens / chain.prompt_tokens <= 2.0:
            return None  # its engine has another prompt
        # In tokens of the estimate, where the prompt is cut by bytes.
        cached = round(cached * chain.prompt_tokens / told_tokens)
        lacking = loads.disproved_by(cached, found_blocks - loads.blocks, chain.block_tokens)
        return None if lacking is None else DisprovedTier(self.instance_id, lacking.tier, lacking.used_ms)


_REFUSED_IN_ANY_CASE: Final = frozenset(
    {Refusal.QUEUE_FULL, Refusal.TOO_MANY_TURNS, Refusal.WOULD_BE_LATE, Refusal.IS_LATE, Refusal.LATE_FOR_TOO_LONG}
)
"""These refusals end it as refused, whatever failed the request before."""

_OF_ITS_OWN_DOING: Final = frozenset({Refusal.LIMITED, Refusal.QUARANTINED, Refusal.TOO_MANY_TURNS})
"""Refusals for what a client, or its tenant, does itself: the fleet was not late."""
_TIMES_OUT: Final = frozenset({FailureKind.TIMEOUT, FailureKind.OVERDUE})

LEGAL_IN: Final[Mapping[type[Event], tuple[Phase, ...]]] = {
    Arrived: (Phase.NEW,),
    TurnGoes: (Phase.PARKED,),
    TrialOver: (Phase.ADMITTING,),
    Reserved: (Phase.PLACING,),
    Registered: (Phase.PLACING,),
    NotPlaced: (Phase.PLACING,),
    Renamed: (Phase.PLACING,),
    InstanceReady: (Phase.AWAITING,),
    Granted: (Phase.HELD,),
    ReservationLost: (Phase.HELD,),
    TurnedAway: (Phase.PARKED, Phase.HELD, Phase.AWAITING),
    Sent: phases_with(Input.SENT),
    PrefillPresumed: phases_with(Input.PREFILL_PRESUMED),
    DeadlinePassed: tuple(Phase),
    FirstToken: phases_with(Input.FIRST_TOKEN),
    PrefillEnded: phases_with(Input.PREFILL_ENDED),
    DecoderReserved: phases_with(Input.DECODER_TAKEN),
    NoDecoder: phases_with(Input.DECODER_TAKEN),
    Failed: phases_with(Input.FAILED),
    Moved: phases_with(Input.MOVED),
    Ended: phases_with(Input.ENDED),
}
"""The phases in which an event may come. One that is over takes none, and changes nothing by it."""

_HANDLERS: Final[Mapping[type[Any], Callable[[RequestMachine, Any, float], Effects]]] = {
    Arrived: RequestMachine._arrived,
    TurnGoes: RequestMachine._turn_goes,
    TrialOver: RequestMachine._trial_over,
    Reserved: RequestMachine._reserved,
    Registered: RequestMachine._was_registered,
    NotPlaced: RequestMachine._not_placed,
    Renamed: RequestMachine._renamed,
    InstanceReady: RequestMachine._instance_ready,
    Granted: RequestMachine._granted,
    ReservationLost: RequestMachine._reservation_lost,
    TurnedAway: RequestMachine._turned_away,
    Sent: RequestMachine._was_sent,
    PrefillPresumed: RequestMachine._prefill_presumed,
    DeadlinePassed: RequestMachine._deadline_passed,
    FirstToken: RequestMachine._first_token,
    PrefillEnded: RequestMachine._prefill_ended,
    DecoderReserved: RequestMachine._decoder_reserved,
    NoDecoder: RequestMachine._no_decoder,
    Failed: RequestMachine._failed,
    Moved: RequestMachine._moved,
    Ended: RequestMachine._ended,
}

_TAKEN_IN: Final[Mapping[Phase, Mapping[type[Any], Callable[[RequestMachine, Any, float], Effects]]]] = {
    phase: {kind: _HANDLERS[kind] for kind, phases in LEGAL_IN.items() if phase in phases and phase is not _DONE}
    for phase in Phase
}
"""The events that each phase takes, with what takes them in."""
