"""Model names as servers list them at ``/v1/models``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import Any

from dualmap.scheduling.state.instance import InstanceSpec, InstanceState
from dualmap.scheduling.values import value

MAX_NAMES = 4096
"""Names of one server at most; further ones are left out."""


def listed_models(answer: object) -> dict[str, str] | None:
    """The names in a server's parsed answer: "" for a name of its model, for an adapter the name of the model that it
    adapts. None where there is none: a server that serves requests has a name for its model."""
    cards = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(cards, list):
        return None
    models: dict[str, str] = {}
    for card in cards[:MAX_NAMES]:
        name = card.get("id") if isinstance(card, dict) else None
        if isinstance(name, str) and name:
            parent = card.get("parent")
            models[name] = parent if isinstance(parent, str) else ""
    return models or None


def listed_paths(answer: object) -> dict[str, str]:
    """The paths of the adapters in a server's parsed answer, by name, as far as it says them."""
    cards = answer.get("data") if isinstance(answer, dict) else None
    found: dict[str, str] = {}
    for card in cards[:MAX_NAMES] if isinstance(cards, list) else ():
        name, root, parent = map(card.get, ("id", "root", "parent")) if isinstance(card, dict) else (None,) * 3
        if isinstance(name, str) and isinstance(root, str) and isinstance(parent, str) and name and parent:
            found[name] = root
    return found


_NO_SUCH_LIST = frozenset({404, 405, 501})


@value
class ModelList:
    """The model names that a server lists, by one reading."""

    models: Mapping[str, str] | None = None
    """See ``scheduling.state.instance.InstanceSpec.models``."""
    status: int = 0
    """Status of the answer; 0: there was none."""
    paths: Mapping[str, str] = field(default_factory=dict)
    """See ``listed_paths``."""

    @property
    def was_read(self) -> bool:
        """Whether the answer says what the server has."""
        return 200 <= self.status < 300 or self.status in _NO_SUCH_LIST

    @classmethod
    def of(cls, answer: object, status: int) -> ModelList:
        """The list in a server's parsed answer."""
        return cls(listed_models(answer), status, listed_paths(answer))

    def changes(self, spec: InstanceSpec, *, may_be_another: bool = False) -> dict[str, Any]:
        """The fields of an instance's description that are other ones by this reading. ``may_be_another``: what was
        known may be of another server."""
        models, adapters = (None, None) if may_be_another else (spec.models, spec.adapters)
        wanted = {"models": self.after(models), "adapters": (self.paths or None) if self.was_read else adapters}
        return {name: each for name, each in wanted.items() if each != getattr(spec, name)}

    def after(self, former: Mapping[str, str] | None) -> Mapping[str, str] | None:
        """The names that are known now, after the former ones: these stay where the server could not be reached, or
        refused to answer. A server that answers without names has none."""
        return self.models if self.was_read else former


def adapter_changes(former: InstanceSpec | None, now: InstanceSpec) -> tuple[list[str], list[str]]:
    """The adapters that a server lists newly or with another path, in its order, and those that it lists no more, by
    what was known of it before; None: it has just started. A server lists an adapter from its load on, so the former
    were just loaded. Of the latter it knows the names no more: one that comes again under such a name is loaded again.
    Nothing follows for a server in service of which no list was known."""
    if former is not None and former.models is None and former.state is not InstanceState.STARTING:
        return [], []
    listed, before = (_adapters_in(spec) if spec is not None else {} for spec in (now, former))
    loaded = [name for name, path in listed.items() if name not in before or _differ(path, before[name])]
    return loaded, [] if now.models is None else [name for name in before if name not in listed]


def _differ(path: str | None, former: str | None) -> bool:
    return path is not None and former is not None and path != former


def _adapters_in(spec: InstanceSpec) -> dict[str, str | None]:
    """The listed adapters of a server, with their paths where it says them."""
    paths = spec.adapters or {}
    return {name: paths.get(name) for name, parent in (spec.models or {}).items() if parent}


def merged_models(lists: Iterable[Mapping[str, str] | None]) -> dict[str, str]:
    """Every name that some instance lists; one that is an adapter somewhere is one."""
    merged: dict[str, str] = {}
    seen: list[Mapping[str, str]] = []
    for models in lists:
        if models is None or (seen and models == seen[-1]):
            continue
        seen.append(models)
        for name, parent in models.items():
            if not merged.get(name):
                merged[name] = parent
    return merged
