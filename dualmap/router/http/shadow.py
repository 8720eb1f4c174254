"""Copies of answered requests for a revision that answers nobody: what it would have done, beside what was done.

A copy is made once its request was answered to the end, so it delays nothing. It is sent straight to an instance of the
shadow revision: no queue, no budget and no account knows of it, and it goes only where nothing else is to be done. One
that finds no such instance is dropped. Some greedy requests are copied to another instance of their own revision as
well: two instances of one revision do not always give the same answer either, and a revision is judged by what it
differs beyond that. These copies are the only ones that can delay anybody, so most are of short prompts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY
from typing import Any, Final

import httpx
import orjson

from dualmap.api_bodies.json_body import read_json, write_json
from dualmap.router.answers.kept_stream import KeptStream
from dualmap.router.answers.so_far import AnswerSoFar
from dualmap.router.http.reading import read_so_far
from dualmap.router.pool.served_pool import ServedPool
from dualmap.router.prompts.inference_request import COMPLETIONS_PATHS
from dualmap.runtime.trust import InstanceTrust
from dualmap.scheduling.request.machine import RequestMachine
from dualmap.scheduling.revisions.figures import NO_FIGURES, Figures, Moments
from dualmap.scheduling.revisions.weights import point
from dualmap.scheduling.state.instance import InstanceLoad, InstanceSpec
from dualmap.scheduling.state.view import is_ready
from dualmap.scheduling.values import value
from dualmap.statestore.errors import StoreError

log = logging.getLogger(__name__)

MOST_AT_ONCE: Final = 2
"""Copies under way on one instance, of one replica."""
MOST_WAITING: Final = 64
"""Copies of one replica, on all instances."""
LONGEST_BODY: Final = 256 << 10
OWN_EVERY: Final = 4
"""One of so many greedy requests at most is copied to its own revision, if its prompt is short."""
OWN_EVERY_LONG: Final = 40
"""Greedy requests after which one of any length is copied to its own revision: there may be no short ones."""
SHORT_TOKENS: Final = 2048
"""Most tokens of a short prompt: an engine computes these in one step."""
BUSY_SHARE: Final = 0.5
"""An instance of whose most running requests so many run is not idle."""
TIMEOUT_S: Final = 300.0


@value
class Copied:
    """An answered request, as its copy is compared with it."""

    path: str
    body: bytes
    fields: bytes
    """The fields that the fleet sets in place of the client's, as a JSON object."""
    model: str
    session: str
    _: KW_ONLY
    revision: str
    instance_id: str
    figures: Figures
    slo_s: float
    version: int


def place_of_copies(session: str, among: Iterable[str]) -> str | None:
    """The instance that gets the copies of a session, so that they meet their own prefixes there."""
    return max(among, key=lambda each: (point(session, each), each), default=None)


def goes_to_its_own(greedy_since: int, prompt_tokens: int) -> bool:
    """Whether a greedy request is copied to its own revision too, so many of these after the last one that was."""
    return greedy_since >= (OWN_EVERY if prompt_tokens <= SHORT_TOKENS else OWN_EVERY_LONG)


def is_idle(load: InstanceLoad) -> bool:
    """Whether an instance has room for a copy: nothing waits, and no more than half of what may run there runs."""
    return not (load.pending_tokens or load.queued_requests or load.running_share > BUSY_SHARE)


class Shadows:
    """The copies of one replica."""

    def __init__(
        self,
        authorization: bytes | None,
        trust: InstanceTrust,
        *,
        now_s: Callable[[], float] = time.monotonic,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """``transport`` replaces the network in tests."""
        self._headers = {} if authorization is None else {"authorization": authorization.decode()}
        self._trust = trust
        self._transport = transport
        self._now_s = now_s
        self._under_way: set[asyncio.Task[None]] = set()
        self._on = Counter[str]()
        self._greedy_since = 0
        """Greedy requests since one was copied to its own revision."""

    def offer(
        self,
        pool: ServedPool,
        machine: RequestMachine,
        path: str,
        body: bytes,
        kept: KeptStream,
        *,
        fields: Sequence[bytes] = (),
    ) -> None:
        """Copy a request that was answered to its end, if there is room for it; ``kept`` is released in any case.
        ``fields`` are those that the fleet sets in place of its client's (``body_edits.added_fields``). Never waits."""
        usage, first_s, ended_s = machine.usage, machine.first_token_s, machine.ended_s
        spec, version = machine.spec, pool.view.revisions.version
        fits = path in COMPLETIONS_PATHS and len(body) <= LONGEST_BODY and len(self._under_way) < MOST_WAITING
        fits = fits and not pool.shadow_counts.has_enough_copies(version, spec.shadowed)
        if not fits or usage is None or first_s is None or ended_s is None or kept.lost:
            kept.release()
            return
        waited_s = machine.dispatched_s - machine.started_s
        copied = Copied(
            path,
            body,
            b"{%b}" % b",".join(fields),
            spec.model,
            spec.shadowed,
            revision=spec.revision,
            instance_id=machine.instance_id,
            figures=_figures(
                first_s - waited_s,
                ended_s - waited_s,
                (usage.prompt_tokens or 0, usage.cached_tokens or 0, usage.output_tokens or 0),
                spec.slo_s,
                pool.scheduling.split.slo_tpot_s,
            ),
            slo_s=spec.slo_s,
            version=version,
        )
        task = asyncio.get_running_loop().create_task(self._copy(pool, copied, kept))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def _copy(self, pool: ServedPool, copied: Copied, kept: KeptStream) -> None:
        try:
            so_far = await read_so_far(kept)
        finally:
            kept.release()
        try:
            body = read_json(copied.body)
            is_greedy = body.get("temperature") == 0 and not so_far.unfit
            compared = so_far if is_greedy else None
            sent = _body_of({**body, **orjson.loads(copied.fields)}, copied.model)
            shadow, shown = pool.view.revisions.shadow, dict[str, Figures]()
            figures = await self._shown_by(shadow, pool, copied, sent, compared)
            if figures is not None:
                shown = {copied.revision: copied.figures, shadow: figures}
            result = "dropped" if figures is None else "failed" if figures.failed else "sent"
            if shadow and self._goes_to_its_own(copied, is_greedy=is_greedy):
                own = await self._shown_by(copied.revision, pool, copied, sent, compared)
                if own is not None:  # it shows how one revision differs from itself, and no more
                    shown[copied.revision] = shown.get(copied.revision, NO_FIGURES).plus(own.of_differing)
            if shown and copied.version == pool.view.revisions.version:  # else it shows nothing of the weights in force
                pool.shadow_counts.add_copy(copied.version, copied.session, shown)
            pool.metrics.shadows[result].value += 1
        except ValueError as error:
            log.debug("a request was not copied: %s", error)
            pool.metrics.shadows["dropped"].value += 1

    def _instance_for(self, pool: ServedPool, copied: Copied, revision: str) -> InstanceSpec | None:
        """The instance of the revision on which the session's copies meet their own prefixes."""
        if not revision:
            return None
        instances = pool.view.view.instances
        ready = [
            name
            for name, spec in instances.items()
            if spec.revision_name == revision and is_ready(spec) and name != copied.instance_id
        ]
        name = place_of_copies(copied.session, ready)
        return None if name is None else instances[name]

    def _goes_to_its_own(self, copied: Copied, *, is_greedy: bool) -> bool:
        if not is_greedy:
            return False
        self._greedy_since += 1
        goes = goes_to_its_own(self._greedy_since, copied.figures.prompt_tokens)
        if goes:
            self._greedy_since = 0
        return goes

    async def _shown_by(
        self, revision: str, pool: ServedPool, copied: Copied, body: bytes, so_far: AnswerSoFar | None
    ) -> Figures | None:
        """Return the figures of a copy on an instance of the revision; None: no instance is known to be idle."""
        target = self._instance_for(pool, copied, revision)
        if target is None or self._on[target.instance_id] >= MOST_AT_ONCE:
            return None
        self._on[target.instance_id] += 1  # before the store is read: others that ended at once would find it idle, too
        try:
            load = (await pool.store.loads_of(target.instance_id)).get(target.instance_id)
            if load is None or not is_idle(load):
                return None
            answer, figures = await self._answer(pool, copied, target, body)
        except StoreError as error:
            log.debug("a request was not copied: %s", error)
            return None
        finally:
            self._on[target.instance_id] -= 1
        if so_far is not None and answer is not None:
            figures = figures.plus(_compared(so_far, answer))
        return figures

    async def _answer(
        self, pool: ServedPool, copied: Copied, target: InstanceSpec, body: bytes
    ) -> tuple[AnswerSoFar | None, Figures]:
        """The answer to a copy, and its figures; None for one that failed."""
        answer, first_s, ended = AnswerSoFar(), None, False
        cached = 0
        began_s = self._now_s()

        async def on_event(event: str, _: object) -> None:
            # The original went over a connection that was open already.
            nonlocal began_s
            if event == "http11.send_request_body.complete":
                began_s = self._now_s()

        headers = {**self._headers, "content-type": "application/json"}
        if target.data_parallel_rank is not None:
            headers["x-data-parallel-rank"] = str(target.data_parallel_rank)
        try:
            async with (
                asyncio.timeout(TIMEOUT_S),
                httpx.AsyncClient(
                    headers=headers, verify=self._trust.context, trust_env=False, transport=self._transport, timeout=60
                ) as client,
                client.stream(
                    "POST", f"{target.url}{copied.path}", content=body, extensions={"trace": on_event}
                ) as reply,
            ):
                reply.raise_for_status()
                async for line in reply.aiter_lines():
                    if not line.startswith("data: "):
                        continue
                    ended = line == "data: [DONE]"
                    answer.read(copied.path, line.encode() + b"\n\n")
                    cached = _cached_in(line) or cached
                    if first_s is None and answer.events:
                        first_s = self._now_s()
        except (httpx.HTTPError, OSError, ValueError) as error:  # TimeoutError is an OSError
            log.debug("a copy failed on %s: %s", target.instance_id, error)
        if not ended or first_s is None:
            return None, Figures(1, 1)
        ended_s = self._now_s() - began_s
        tokens = (answer.counted_prompt or 0, cached, answer.tokens)
        slo_tpot_s = pool.scheduling.split.slo_tpot_s
        return answer, _figures(first_s - began_s, ended_s, tokens, copied.slo_s, slo_tpot_s)

    def close(self) -> None:
        """End the copies that are under way."""
        for task in self._under_way:
            task.cancel()


def _cached_in(line: str) -> int:
    """The cached tokens in the usage of an event; 0 where it has none."""
    if '"cached_tokens"' not in line:
        return 0
    details = ((read_json(line[6:].encode()).get("usage") or {}).get("prompt_tokens_details")) or {}
    found = details.get("cached_tokens")
    return found if isinstance(found, int) else 0


def _body_of(body: Mapping[str, Any], model: str) -> bytes:
    """The body of a copy: it streams with its usage and the ids of its tokens, and takes part in no transfer."""
    kept = {name: each for name, each in body.items() if name not in ("kv_transfer_params", "user", "request_id")}
    asked = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    return write_json({**kept, **asked, **({"model": model} if model else {})})


def _figures(ttft_s: float, ended_s: float, tokens: tuple[int, int, int], slo_s: float, slo_tpot_s: float) -> Figures:
    prompt_tokens, cached_tokens, output_tokens = tokens
    tpot, slow = Moments(), False
    if output_tokens > 1:
        each_s = (ended_s - ttft_s) / (output_tokens - 1)
        tpot, slow = Moments.of(each_s), each_s > slo_tpot_s
    return Figures(
        1,
        0,
        1,
        int(ttft_s > slo_s),
        tpot.count,
        int(slow),
        ttft=Moments.of(ttft_s),
        tpot=tpot,
        prompt_tokens=prompt_tokens,
        hit_tokens=cached_tokens,
        output_tokens=output_tokens,
    )


def _compared(one: AnswerSoFar, other: AnswerSoFar) -> Figures:
    """Whether two answers are the same, and else the tokens before they part: by their ids, where both have these."""
    by_ids = one.has_ids and other.has_ids and one.token_ids and other.token_ids
    agreed = agreeing(one.token_ids, other.token_ids) if by_ids else agreeing(one.text, other.text)
    length = max(len(one.token_ids), len(other.token_ids)) if by_ids else max(len(one.text), len(other.text))
    if agreed == length:
        return Figures(compared=1)
    tokens = agreed if by_ids else round(agreed * max(1, one.tokens) / max(1, len(one.text)))
    return Figures(compared=1, differing=1, agreed_tokens=tokens)


def agreeing(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How long two sequences are the same."""
    for place, (mine, theirs) in enumerate(zip(one, other, strict=False)):
        if mine != theirs:
            return place
    return min(len(one), len(other))
