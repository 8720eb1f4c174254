"""The names that one emulated server answers to: of its model, and of LoRA adapters, which come and go at run time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

from dualmap.simulation.emulator.connection import HttpRequest, Responder
from dualmap.simulation.emulator.errors import ApiError, bad_request, unknown_model
from dualmap.simulation.emulator.fields import Body, read_json, required, text
from dualmap.simulation.emulator.routes import Route, Routes, error_body

_PLAIN = "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter that is loaded."""

    name: str
    path: str
    number: int
    """The engine's own number of it: another one each time that it is loaded, unless it is replaced in place."""


class ServedNames:
    """Model names, shared by all engines of a server."""

    def __init__(
        self, model: str, aliases: Iterable[str] = (), adapters: Iterable[str] = (), *, at_run_time: bool = True
    ) -> None:
        """``at_run_time``: adapters may be loaded then, as with ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=1``."""
        self._at_run_time = at_run_time
        self.model = model
        self._names = (model, *aliases)
        self._from_the_start = tuple(adapters)
        self._adapters: dict[str, Adapter] = {}
        self._numbers = count(1)
        self._coming: dict[str, list[Callable[[], None]]] = {}
        """Adapters that are being loaded, each with the calls that wait for it."""
        self.restart()

    def restart(self) -> None:
        """A new process has only the adapters that it is started with."""
        self._numbers = count(1)
        self._coming = {}
        self._adapters = {
            name: Adapter(name, f"/adapters/{name}", next(self._numbers)) for name in self._from_the_start
        }

    def check(self, payload: Body) -> None:
        """A request may leave the model out. Raises ApiError: it names one that is not served."""
        model = text(payload, "model")
        if model is not None and model not in self._names and model not in self._adapters:
            raise unknown_model(model, self.model)

    def adapter_of(self, payload: Body) -> Adapter | None:
        """The adapter that a request names; None for the model itself."""
        model = payload.get("model")
        return self._adapters.get(model) if isinstance(model, str) else None

    def cards(self, created_s: int, max_model_len: int) -> list[dict[str, Any]]:
        """The entries of ``/v1/models``."""
        common = {"object": "model", "created": created_s, "owned_by": "vllm"}
        served = [
            {"id": name, **common, "root": self.model, "parent": None, "max_model_len": max_model_len}
            for name in self._names
        ]
        adapters = [
            {"id": each.name, **common, "root": each.path, "parent": self.model, "max_model_len": None}
            for each in self._adapters.values()
        ]
        return served + adapters

    def routes(self, loads: Callable[[str, bool], float]) -> Routes:
        """vLLM's, where it may load adapters at run time. ``loads`` has the engines load one, or replace it, and says
        how long that takes."""
        if not self._at_run_time:
            return {}
        return {
            "/v1/load_lora_adapter": {"POST": Route(partial(self._load, loads))},
            "/v1/unload_lora_adapter": {"POST": Route(self._unload)},
        }

    def _load(self, loads: Callable[[str, bool], float], request: HttpRequest, responder: Responder) -> None:
        payload = read_json(request.body)
        name, path = str(required(payload, "lora_name")), str(required(payload, "lora_path"))
        if not name or not path:
            raise bad_request("Both 'lora_name' and 'lora_path' must be provided.")
        replaces = bool(payload.get("load_inplace"))
        if name in self._coming:
            self._coming[name].append(lambda: self._load_later(loads, request, responder))
            return
        self._check_new(name, replaces)
        self._coming[name] = []
        taken_s = loads(name, name in self._adapters)
        if taken_s:
            loop = asyncio.get_running_loop()
            loop.call_later(taken_s, self._loaded, name, path, responder)
        else:
            self._loaded(name, path, responder)

    def _check_new(self, name: str, replaces: bool) -> None:
        if name in self._adapters and not replaces:
            raise bad_request(
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set"
                " 'load_inplace' to True."
            )

    def _load_later(self, loads: Callable[[str, bool], float], request: HttpRequest, responder: Responder) -> None:
        """A call for the same name waits for the one before."""
        try:
            self._load(loads, request, responder)
        except ApiError as error:
            responder.send(error.status, error_body(error))

    def _loaded(self, name: str, path: str, responder: Responder) -> None:
        if name not in self._coming:
            return  # the process that began to load it was killed
        former = self._adapters.get(name)
        self._adapters[name] = Adapter(name, path, next(self._numbers) if former is None else former.number)
        responder.send(200, f"Success: LoRA adapter '{name}' added successfully.".encode(), _PLAIN)
        for waiting in self._coming.pop(name, ()):
            waiting()

    def _unload(self, request: HttpRequest, responder: Responder) -> None:
        name = str(required(read_json(request.body), "lora_name"))
        if self._adapters.pop(name, None) is None:
            raise ApiError(404, "NotFoundError", f"The lora adapter '{name}' cannot be found.")
        responder.send(200, f"Success: LoRA adapter '{name}' removed successfully.".encode(), _PLAIN)
