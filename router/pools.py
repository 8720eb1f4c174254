"""Which pool serves a model: names, aliases and LoRA adapters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from router.errors import InvalidRequestError, UnknownModelError
from statestore.settings import PoolSettings


class Named(Protocol):
    """Any object with the settings of a pool."""

    @property
    def settings(self) -> PoolSettings: ...


P = TypeVar("P", bound=Named)


class DuplicateModelError(ValueError):
    """Two pools claim the same model name; the configuration must say which one serves it."""


@dataclass(frozen=True, slots=True)
class Route(Generic[P]):
    """The pool of a model name."""

    pool: P
    model: str
    """The name to send to the instance: an alias is resolved, a LoRA name stays."""
    lora: str | None = None


class PoolDirectory(Generic[P]):
    """The pools of a replica by the names that clients may use."""

    def __init__(self, pools: Iterable[P]) -> None:
        self.pools: Mapping[str, P] = {pool.settings.name: pool for pool in pools}
        self.routes: dict[str, Route[P]] = {}
        """By the name that a request may have for its model: "" where there is one pool only."""
        for pool in self.pools.values():
            settings = pool.settings
            for name in dict.fromkeys((settings.model, *settings.aliases)):
                self._add(name, Route(pool, settings.model))
            for lora in dict.fromkeys(settings.loras):
                self._add(lora, Route(pool, lora, lora))
        if len(self.pools) == 1:
            self.routes[""] = Route(pool, pool.settings.model)

    def _add(self, name: str, route: Route[P]) -> None:
        taken = self.routes.setdefault(name, route)
        if taken is not route:
            pools = f"{taken.pool.settings.name!r} and {route.pool.settings.name!r}"
            raise DuplicateModelError(f"model name {name!r} is claimed twice, by pools {pools}: rename one")

    def resolve(self, model: str) -> Route[P]:
        """The route of a model name; "" means the only pool there is.

        Raises:
            InvalidRequestError: no model is named and there are several pools.
            UnknownModelError: no pool serves it.
        """
        route = self.routes.get(model)
        if route is not None:
            return route
        if model:
            raise UnknownModelError(
                f"the model {model!r} does not exist; GET /v1/models lists those that do", param="model"
            )
        raise InvalidRequestError("name a model: this fleet serves several", param="model")

    def model_cards(self, created_s: int, lengths: Mapping[str, int]) -> dict[str, Any]:
        """The answer of ``GET /v1/models``: every name that ``resolve`` knows, in OpenAI's shape.

        ``created_s`` is a Unix time, ``lengths`` the longest context by pool, in tokens, where it is known; aliases and
        adapters name their model as ``root``.
        """
        cards: list[dict[str, Any]] = [
            {
                "id": name,
                "object": "model",
                "created": created_s,
                "owned_by": "dualmap",
                "root": route.model,
                "parent": route.pool.settings.model if route.lora else None,
                "pool": route.pool.settings.name,
            }
            for name, route in self.routes.items()
            if name
        ]
        for card in cards:
            if card["pool"] in lengths:
                card["max_model_len"] = lengths[card["pool"]]
        return {"object": "list", "data": cards}
