"""LoRA adapters that operators or tenants registered for a pool: what they are, and where each is to be loaded.

The store keeps one record a name. An engine knows an adapter by its name and names its KV by name and path (vLLM 0.33,
``v1/core/kv_cache_utils.py``), so weights that replace others at the same path would be answered from the former ones'
KV. Each registration of a name therefore has a generation, and its engines get the path in a spelling of its own: the
same folder, another text. What a server lists as the ``root`` of an adapter shows the generation that it has.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, asdict, dataclass, fields
from enum import StrEnum
from posixpath import normpath
from typing import Any, Final

import orjson

from dualmap.scheduling.prompts.blocks import cache_seed
from dualmap.scheduling.state.instance import InstanceSpec, InstanceState
from dualmap.scheduling.state.legs import Leg
from dualmap.scheduling.state.view import ClusterView

LONGEST_NAME: Final = 200
LONGEST_PATH: Final = 1000
MOST_ADAPTERS: Final = 2000
"""Registered adapters of a pool: an engine's list of names is read up to ``model_names.MAX_NAMES``."""
MOST_FORGOTTEN: Final = 2000
"""Unloaded adapters of a pool whose generations are remembered; those that were unloaded first are dropped."""
LARGEST_RANK: Final = 4096


class AdapterState(StrEnum):
    REGISTERED = "registered"
    """Served: loaded where it is needed."""
    UNLOADED = "unloaded"
    """Served no more, and unloaded wherever it is found. Kept for its generation."""


@dataclass(frozen=True, slots=True)
class RegisteredAdapter:
    path: str
    """The folder of its weights on the engines' hosts, or a repository that engines download."""
    _: KW_ONLY
    base: str = ""
    """The model that it adapts; empty: the pool's."""
    rank: int = 0
    """0: not known."""
    tenant: str = ""
    """The tenant that may use it; empty: everyone."""
    generation: int = 0
    """Grows whenever the name gets weights again."""
    since_ms: int = 0
    """Time of the last change of its record, by the store's clock."""
    state: AdapterState = AdapterState.REGISTERED
    is_3d: bool = False
    """vLLM's ``is_3d_lora_weight``."""

    @property
    def is_registered(self) -> bool:
        return self.state is AdapterState.REGISTERED

    @property
    def engine_path(self) -> str:
        """The path as engines get it: a spelling for each generation where that can be."""
        return spelled(self.path, self.generation)

    @property
    def has_own_spelling(self) -> bool:
        """Whether its engines can tell its weights from those of former generations at the same path."""
        return is_folder(self.path) or not self.generation

    def text(self) -> bytes:
        return orjson.dumps(asdict(self))

    @classmethod
    def parse(cls, text: bytes) -> RegisteredAdapter:
        """Raises ValueError, or the like, where it cannot be read. Fields of a newer version are dropped."""
        values: dict[str, Any] = orjson.loads(text)
        known = {each.name: values[each.name] for each in fields(cls) if each.name in values}
        found = cls(**known | {"state": AdapterState(known.get("state", AdapterState.REGISTERED))})
        texts, figures = (found.path, found.base, found.tenant), (found.rank, found.generation, found.since_ms)
        if not (found.path and all(isinstance(each, str) for each in texts)):
            raise ValueError(f"no adapter: {text!r}")
        if not all(isinstance(each, int) and not isinstance(each, bool) and 0 <= each < 2**53 for each in figures):
            raise ValueError(f"no adapter: {text!r}")
        return found


def is_folder(path: str) -> bool:
    """Whether a path names a folder; a repository that engines download has no other spelling."""
    return path.startswith("/")


def spelled(path: str, generation: int) -> str:
    """A spelling of the path of a folder that is the generation's own: each binary digit is a slash, with a dot behind
    it where it is 1, which names the same folder."""
    if not (generation and is_folder(path)):
        return path
    return path + "".join("/." if digit == "1" else "/" for digit in f"{generation:b}")


def normal_path(path: str) -> str:
    """The plain spelling of a path.

    Raises:
        ValueError: it climbs out of a folder, or is no path.
    """
    if not path or len(path) > LONGEST_PATH or not path.isprintable() or path != path.strip() or "\\" in path:
        raise ValueError(f"must be a path of 1 to {LONGEST_PATH} printable characters, without blanks at its ends")
    if ".." in path.split("/"):
        raise ValueError("must not have '..' in it: name the folder itself")
    plain = normpath(path)
    return "/" + plain.lstrip("/") if path.startswith("/") else plain


def lies_in(path: str, folders: Iterable[str]) -> bool:
    """Whether a plain path lies in one of the folders; neither is followed through links, which only engines see."""
    return any(path.startswith(normpath(each).rstrip("/") + "/") for each in folders)


def cache_name(name: str, adapter: RegisteredAdapter | None) -> str:
    """The name that the KV of an adapter's present weights has in the fleet: requests before and after its weights were
    replaced share none. No name of a model has a line break."""
    return f"{name}\n{adapter.generation}" if adapter is not None and adapter.generation else name


def model_of(cached_as: str) -> str:
    """The name by which instances know the adapter of a ``cache_name``."""
    return cached_as.partition("\n")[0]


def homes_of(view: ClusterView, model: str, name: str) -> frozenset[str]:
    """The instances that an adapter is to be on before requests need it: the candidate pair of its hash key, and where
    requests are split that of their decode legs."""
    root = cache_seed(model, name)
    return frozenset(each for leg in (Leg.PREFILL, Leg.DECODE) for each in view.of(leg).rings.pair(root))


class Step(StrEnum):
    """The call that an instance lacks for an adapter."""

    LOAD = "load"
    REPLACE = "replace"
    """It has other weights under the name."""
    UNLOAD = "unload"


def step_for(spec: InstanceSpec, name: str, adapter: RegisteredAdapter) -> Step | None:
    """The call that makes an instance have the adapter, or not have it any more; None: none, or it does not say what it
    has."""
    if spec.models is None:
        return None
    if not adapter.is_registered:
        loaded = (spec.adapters or {}).get(name)
        return Step.UNLOAD if loaded is not None and normpath(loaded) == adapter.path else None
    if not spec.lists(name):
        return Step.LOAD
    loaded = (spec.adapters or {}).get(name)
    return None if loaded is None or loaded == adapter.engine_path else Step.REPLACE


@dataclass(frozen=True, slots=True)
class DueStep:
    instance_id: str
    name: str
    step: Step


def due_steps(
    instances: Mapping[str, InstanceSpec],
    adapters: Mapping[str, RegisteredAdapter],
    homes: Mapping[str, Collection[str]],
    order: Mapping[str, int],
) -> Iterator[DueStep]:
    """The calls that instances in service lack: of one after the other, first what must go or is wrong, then what an
    instance should have as a home, in the ``order`` of use, no more of it than it has room for. An instance that is not
    a home gets an adapter with the first request that needs it."""
    for instance_id, spec in instances.items():
        if spec.state is not InstanceState.READY:
            continue
        lacking: list[DueStep] = []
        for name, adapter in adapters.items():
            step = step_for(spec, name, adapter)
            if step is Step.LOAD:
                if instance_id in homes.get(name, ()):
                    lacking.append(DueStep(instance_id, name, step))
            elif step is not None:
                yield DueStep(instance_id, name, step)
        room = max(spec.adapter_slots, spec.adapter_host_slots) or len(lacking)
        has = sum(name in adapters and adapters[name].is_registered for name in spec.adapters or ())
        lacking.sort(key=lambda due: (order.get(due.name, len(order)), due.name))
        yield from lacking[: max(0, room - has)]
