"""The rules of discovery, whatever finds the instances: which are entered, drained and removed. Pure.

Discovery owns the instances that it entered: these have an ``origin``. It never changes one without, which an operator
or the configuration entered. An operator who drains an instance that discovery entered is obeyed: it stays out until
its server is gone. The identity of a server is its uid: another one under the same id replaces it.

An instance leaves in three steps, so that what runs there may finish: it drains, with the reason noted in its origin;
the drainer parks it once it is empty; then it is removed. If its server serves again before that, it is resumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from enum import StrEnum

from dualmap.scheduling.state.instance import InstanceSpec, InstanceState, Role
from dualmap.scheduling.state.instance_lifecycle import InstanceEvent, next_state

_OUT = frozenset({InstanceState.DRAINING, InstanceState.STANDBY})
_GONE = "it is gone, or no longer selected"


@dataclass(frozen=True, slots=True)
class Found:
    """A server that was found, as an instance."""

    instance_id: str
    uid: str
    url: str
    role: Role = Role.MIXED
    _: KW_ONLY
    data_parallel_rank: int | None = None
    aliases: tuple[str, ...] = ()
    """Further names of the pool's model."""
    revision: str = ""
    """The label of its revision; empty: none."""
    not_serving: str = ""
    """Why it takes no new requests; empty while it serves."""
    is_ending: bool = False
    """The server shuts down, and will not serve again."""


class Act(StrEnum):
    """An action of discovery on an instance."""

    ENTER = "entered"
    REPLACE = "replaced"
    RESUME = "resumed"
    CHANGE_ROLE = "role changed"
    CHANGE_ALIASES = "aliases changed"
    CHANGE_REVISION = "revision changed"
    DRAIN = "drained"
    REMOVE = "removed"


@dataclass(frozen=True, slots=True)
class Action:
    """One change of one instance."""

    act: Act
    instance_id: str
    found: Found | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    actions: tuple[Action, ...] = ()
    left_out: tuple[str, ...] = ()
    """Pods that were found and cannot be entered, each with the reason."""


def plan_round(found: Mapping[str, Found], members: Mapping[str, InstanceSpec]) -> Plan:
    """The actions from the members towards what was found, by instance id."""
    by_hand = {(spec.url, spec.data_parallel_rank): name for name, spec in members.items() if spec.origin is None}
    actions: list[Action] = []
    left_out: list[str] = []
    for name, each in found.items():
        if each.not_serving:
            continue
        known = members.get(name)
        if known is not None and known.origin is None:
            left_out.append(f"{name}: an operator or the configuration entered an instance of this id")
        elif known is not None:
            act = _act_for(each, known)
            if act is not None:
                actions.append(Action(act, name, each))
        elif (same := by_hand.get((each.url, each.data_parallel_rank))) is not None:
            left_out.append(f"{name}: {each.url} is in the fleet as {same}, which discovery did not enter")
        else:
            actions.append(Action(Act.ENTER, name, each))
    for name, known in members.items():
        if known.origin is not None:
            leaving = _leaving(known, found.get(name))
            if leaving is not None:
                actions.append(leaving)
    return Plan(tuple(actions), tuple(left_out))


def _act_for(found: Found, known: InstanceSpec) -> Act | None:
    """The action that a known instance needs whose server serves."""
    assert known.origin is not None
    if not _is_same(found, known):
        return Act.REPLACE
    if known.origin.get("leaving"):
        return Act.RESUME
    if known.origin.get("role") != found.role.value:
        return Act.CHANGE_ROLE
    if known.aliases != found.aliases:
        return Act.CHANGE_ALIASES
    return Act.CHANGE_REVISION if known.revision != found.revision else None


def _is_same(found: Found, known: InstanceSpec) -> bool:
    assert known.origin is not None
    return (found.uid, found.url, found.data_parallel_rank) == (
        known.origin.get("uid"),
        known.url,
        known.data_parallel_rank,
    )


def _leaving(known: InstanceSpec, found: Found | None) -> Action | None:
    """The next action of an instance whose server does not serve; None where it does, or there is none to take."""
    assert known.origin is not None
    if found is not None and not found.not_serving:
        return None
    is_gone = found is None or found.is_ending or found.uid != known.origin.get("uid")
    if not known.origin.get("leaving"):
        if known.state in _OUT and not is_gone:
            return None  # an operator, or the autoscaler, took it out and may bring it back
        return Action(Act.DRAIN, known.instance_id, why=found.not_serving if found is not None else _GONE)
    if known.state is InstanceState.STANDBY:
        return Action(Act.REMOVE, known.instance_id, why=known.origin["leaving"])
    if known.state is not InstanceState.DRAINING:  # somebody resumed it meanwhile
        return Action(Act.DRAIN, known.instance_id, why=known.origin["leaving"])
    return None


def described_after(action: Action, known: InstanceSpec | None) -> InstanceSpec | None:
    """The instance after an action, from its description at that moment; None where that does not fit it any more: an
    operator has entered or removed it meanwhile, or the action was made already, after its members were read."""
    spec = _after(action, known)
    return None if spec == known else spec


def _after(action: Action, known: InstanceSpec | None) -> InstanceSpec | None:
    if known is None:
        return None if action.act is not Act.ENTER or action.found is None else _entered(action.found)
    if known.origin is None:
        return None
    if action.act is Act.DRAIN:
        state = next_state(known.state, InstanceEvent.DRAIN)
        return replace(known, state=state, origin={**known.origin, "leaving": action.why})
    found = action.found
    if found is None:
        return None
    if not _is_same(found, known):
        # The store keeps its counts: requests of the former server end by themselves.
        new = _entered(found)
        state = InstanceState.STANDBY if _is_held_out(known) else new.state
        return replace(
            known,
            url=new.url,
            role=new.role,
            revision=new.revision,
            data_parallel_rank=new.data_parallel_rank,
            origin=new.origin,
            state=state,
            models=None,
        )
    origin = {name: text for name, text in known.origin.items() if name not in ("leaving", "aliases")}
    origin |= _aliases_note(found)
    state = next_state(known.state, InstanceEvent.RESUME) if known.origin.get("leaving") else known.state
    if origin.get("role") != found.role.value:
        known, origin = replace(known, role=found.role), {**origin, "role": found.role.value}
    return replace(known, state=state, revision=found.revision, origin=origin)


def _is_held_out(known: InstanceSpec) -> bool:
    """Whether somebody else than discovery took it out of service."""
    return known.state in _OUT and not (known.origin or {}).get("leaving")


def _entered(found: Found) -> InstanceSpec:
    origin = {"uid": found.uid, "role": found.role.value, **_aliases_note(found)}
    return InstanceSpec(
        found.instance_id,
        found.url,
        role=found.role,
        revision=found.revision,
        data_parallel_rank=found.data_parallel_rank,
        origin=origin,
    )


def _aliases_note(found: Found) -> dict[str, str]:
    return {"aliases": " ".join(found.aliases)} if found.aliases else {}
