"""The adapters of an instance by their last use, as scripts keep them (``statestore/lua/shared/adapters.lua``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from dualmap.scheduling.estimates.adapters import Residency
from dualmap.scheduling.state.instance import InstanceSpec
from dualmap.scheduling.state.request import StoredRequest
from dualmap.scheduling.values import value
from dualmap.statestore.pool.calls import Command

RUNNING_SCORE: Final = 1 << 52
"""The score of an adapter with running requests is their number above this; that of another is its last use in ms."""


@value
class AdapterUse:
    """An adapter in an instance's order."""

    adapter: str
    running: int
    """Its requests that run there."""
    used_ms: int
    """Time of its last use; 0 while some run."""


def uses_from(flat: Sequence[bytes]) -> tuple[AdapterUse, ...]:
    """An instance's adapters, the last used first, from what the store lists in the order of their scores."""
    found = []
    for name, score in zip(flat[::2], map(float, flat[1::2]), strict=True):
        running = running_of(score)
        found.append(AdapterUse(name.decode(errors="replace"), running, 0 if running else int(score)))
    return tuple(reversed(found))


def adapters_used(key: bytes, spec: InstanceSpec, used_ms: Mapping[str, int]) -> list[Command]:
    """The commands that enter when adapters were used, in an instance's order; those with running requests are used
    by every step anyway."""
    most = max(spec.adapter_slots, spec.adapter_host_slots)
    scores = [word for name, each_ms in used_ms.items() for word in (each_ms, name)]
    return [("ZADD", key, "GT", *scores), ("ZREMRANGEBYRANK", key, 0, -1 - most)]


SETTLED_MS: Final = 5000
"""An adapter that was used in the time before a report is where its last use says: the report may be older."""


def residency_changes(
    uses: Sequence[AdapterUse], resident: Residency | None, now_ms: int
) -> tuple[dict[str, int], list[str]]:
    """The changes of an instance's order by what its engine reports to have: adapters with times of use, and adapters
    that are gone. What is on the device was used after all that is in host memory alone; what is loaded and not known
    there comes last of its kind. What runs, or was used a moment ago, is left as it is."""
    if resident is None:
        return {}, []
    idle = [use for use in reversed(uses) if not use.running and use.used_ms < now_ms - SETTLED_MS]
    gone = [use.adapter for use in idle if use.adapter not in resident.loaded]
    in_host = [use.used_ms for use in idle if use.adapter in resident.loaded - resident.device]
    last_ms, known = max(in_host, default=0), {use.adapter for use in uses}
    late = [*sorted(resident.device - known)]
    late += [use.adapter for use in idle if use.adapter in resident.device and use.used_ms <= last_ms]
    used_ms = dict.fromkeys(sorted(resident.loaded - resident.device - known), 1)
    return used_ms | {name: last_ms + place for place, name in enumerate(late, 1)}, gone


def running_of(score: float) -> int:
    """Requests of an adapter that run, by its score."""
    return max(0, int(score) - RUNNING_SCORE)


def mended_uses(scores: Mapping[bytes, bytes], sent: Iterable[StoredRequest], now_ms: int) -> dict[bytes, int]:
    """The adapters whose number of running requests is wrong, by the requests that an instance was sent, each with its
    right score. One that runs and is not listed was forgotten by its instance, or is not followed there."""
    runs = Counter(each.adapter.encode() for each in sent if each.adapter)
    wrong = {name: runs[name] for name, score in scores.items() if running_of(float(score)) != runs[name]}
    return {name: RUNNING_SCORE + count if count else now_ms for name, count in wrong.items()}
