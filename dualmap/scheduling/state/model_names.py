"""Model names as servers list them at ``/v1/models``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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


_NO_SUCH_LIST = frozenset({404, 405, 501})


@value
class ModelList:
    """The model names that a server lists, by one reading."""

    models: Mapping[str, str] | None = None
    """See ``scheduling.state.instance.InstanceSpec.models``."""
    status: int = 0
    """Status of the answer; 0: there was none."""

    def after(self, former: Mapping[str, str] | None) -> Mapping[str, str] | None:
        """The names that are known now, after the former ones: these stay where the server could not be reached, or
        refused to answer. A server that answers without names has none."""
        unread = not (200 <= self.status < 300 or self.status in _NO_SUCH_LIST)
        return former if unread else self.models


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
