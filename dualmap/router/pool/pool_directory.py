"""The directory of which pool serves a model: names, aliases and LoRA adapters."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

from dualmap.router.errors import InvalidRequestError, unknown_model
from dualmap.router.pool.view import GivenNames
from dualmap.runtime.pool_settings import PoolSettings
from dualmap.scheduling.estimates.adapters import load_share
from dualmap.scheduling.state.registered_adapters import RegisteredAdapter, cache_name


class Named(Protocol):
    """Any object with the settings of a pool."""

    @property
    def settings(self) -> PoolSettings: ...


log = logging.getLogger(__name__)

_NOTHING: tuple[GivenNames, Mapping[str, str]] = (GivenNames(), {})

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
    adapter: RegisteredAdapter | None = None
    """The record of a registered adapter."""

    @property
    def adapter_share(self) -> float:
        """The time of the adapter's loads, as a multiple of what instances' descriptions say."""
        return 1.0 if self.adapter is None else load_share(self.adapter.rank)

    @property
    def cached_as(self) -> str | None:
        """The name that the KV of the adapter has in the fleet; None without an adapter."""
        return None if self.lora is None else cache_name(self.lora, self.adapter)

    @property
    def owner(self) -> str:
        """The tenant that alone may use it; empty: everyone."""
        return "" if self.adapter is None else self.adapter.tenant


class PoolDirectory(Generic[P]):
    """The pools of a replica by the names that clients may use."""

    def __init__(self, pools: Iterable[P]) -> None:
        self.pools: Mapping[str, P] = {pool.settings.name: pool for pool in pools}
        self.routes: dict[str, Route[P]] = {}
        """Routes by the name that a request may have for its model: "" where there is one pool only. Configured names
        come first, then those that operators added, then those that instances list."""
        for pool in self.pools.values():
            settings = pool.settings
            for name in dict.fromkeys((settings.model, *settings.aliases)):
                self._add(name, Route(pool, settings.model))
            for lora in dict.fromkeys(settings.loras):
                self._add(lora, Route(pool, lora, lora))
        if len(self.pools) == 1:
            self.routes[""] = Route(pool, pool.settings.model)
        self._configured = self.routes
        self._has_owned = False
        self._learned: dict[str, tuple[GivenNames, Mapping[str, str]]] = {}
        """Names that the running fleet was given and names that are listed, by pool."""
        self.contested: dict[str, tuple[str, ...]] = {}
        """Names without a setting that several pools have, and these, the one first that serves it."""

    def _add(self, name: str, route: Route[P]) -> None:
        taken = self.routes.setdefault(name, route)
        if taken is not route:
            pools = f"{taken.pool.settings.name!r} and {route.pool.settings.name!r}"
            raise DuplicateModelError(f"model name {name!r} is claimed twice, by pools {pools}: rename one")

    def learn(self, pool_name: str, given: GivenNames, listed: Mapping[str, str]) -> None:
        """The names of a pool beside the configured ones: those that the running fleet was given, and those that
        instances list; "" is another name of the pool's model, anything else an adapter's. An adapter that was
        registered and unloaded is served no more, also where an instance lists it still.

        A name that several pools have is served by the one that is configured first, which the log says once.
        """
        if self._learned.get(pool_name) == (given, listed):
            return
        self._learned[pool_name] = (given, listed)
        routes, former = dict(self._configured), self.contested
        self.contested = {}
        for name, pool in self.pools.items():
            its = self._learned.get(name, _NOTHING)[0]
            for each, adapter in its.adapters.items():
                if adapter.is_registered:
                    self._offer(routes, each, Route(pool, each, each, adapter))
            for each, kind in its.added.items():
                self._offer(routes, each, Route(pool, each, each) if kind else Route(pool, pool.settings.model))
        for name, pool in self.pools.items():
            its, listed_there = self._learned.get(name, _NOTHING)
            for each, parent in listed_there.items():
                if each not in its.adapters:
                    self._offer(routes, each, Route(pool, each, each if parent else None))
        self.routes = routes
        self._has_owned = any(route.owner for route in routes.values())
        for each, pools in self.contested.items():
            if each not in former:
                log.warning(
                    "the model name %r is listed by instances of the pools %s: %s serves it; to choose, name it in"
                    " pools[].aliases or pools[].loras of one of them",
                    each,
                    ", ".join(pools),
                    pools[0],
                )

    @property
    def has_owned(self) -> bool:
        """Whether some adapter is one tenant's alone."""
        return self._has_owned

    def source_of(self, name: str) -> Literal["configured", "registered", "added", "listed"]:
        """The origin of a name; for an unknown one, the origin that it would have."""
        if name in self._configured:
            return "configured"
        given = [each for each, _ in self._learned.values()]
        if any(name in each.adapters and each.adapters[name].is_registered for each in given):
            return "registered"
        return "added" if any(name in each.added for each in given) else "listed"

    def _offer(self, routes: dict[str, Route[P]], name: str, route: Route[P]) -> None:
        taken = routes.setdefault(name, route)
        if taken.pool is not route.pool and name not in self._configured:
            others = self.contested.get(name, (taken.pool.settings.name,))
            self.contested[name] = tuple(dict.fromkeys((*others, route.pool.settings.name)))

    def resolve(self, model: str, unread: str = "") -> Route[P]:
        """The route of a model name; "" means the only pool there is. ``unread``: why the name is not known.

        Raises:
            InvalidRequestError: no model is named and there are several pools.
            UnknownModelError: no pool serves it.
        """
        route = self.routes.get(model)
        if route is not None:
            return route
        if model:
            raise unknown_model(model)
        why = f"{unread}, so its model is not known; " if unread else ""
        raise InvalidRequestError(f"{why}name a model: this fleet serves several", param="model")

    def _parent(self, route: Route[P]) -> str | None:
        """The model that an adapter adapts."""
        if route.lora is None:
            return None
        if route.adapter is not None and route.adapter.base:
            return route.adapter.base
        _, listed = self._learned.get(route.pool.settings.name, _NOTHING)
        return listed.get(route.lora) or route.pool.settings.model

    def model_cards(self, created_s: int, lengths: Mapping[str, int]) -> dict[str, Any]:
        """The answer of ``GET /v1/models``: every name that ``resolve`` knows, in OpenAI's shape.

        ``created_s`` is a Unix time, ``lengths`` the longest context by pool, in tokens, where it is known; aliases and
        adapters name their model as ``root``. An adapter with an owner names that ``tenant``.
        """
        cards: list[dict[str, Any]] = [
            {
                "id": name,
                "object": "model",
                "created": created_s,
                "owned_by": "dualmap",
                "root": route.model,
                "parent": self._parent(route),
                "pool": route.pool.settings.name,
                "tenant": route.owner,
            }
            for name, route in self.routes.items()
            if name
        ]
        for card in cards:
            if card["pool"] in lengths:
                card["max_model_len"] = lengths[card["pool"]]
        return {"object": "list", "data": cards}
