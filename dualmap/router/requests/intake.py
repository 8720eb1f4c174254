"""Taking requests in: which pool serves them, how their prompts are read, and who drives them from then on."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import replace
from functools import partial
from math import ceil
from typing import Final

from dualmap.router.errors import (
    InvalidRequestError,
    NotFoundError,
    ReplicaFullError,
    UnknownModelError,
    from_exception,
)
from dualmap.router.pool.model_lengths import ModelLengths
from dualmap.router.pool.pool_directory import PoolDirectory, Route
from dualmap.router.pool.revision_choice import Session
from dualmap.router.pool.served_pool import ServedPool
from dualmap.router.prompts.inference_request import (
    MESSAGES_PATH,
    RESPONSES_PATH,
    SALTED_PATHS,
    InferenceRequest,
    SentPrompt,
    TokenBounds,
)
from dualmap.router.prompts.prompt import ReadPrompt, read_prompt, read_text, unsalted_seed
from dualmap.router.prompts.session import is_under_way, session_of
from dualmap.router.prompts.token_bounds import MOST_TOKENS, answer_bound, prompt_bound
from dualmap.router.requests.context import ReplicaContext
from dualmap.router.requests.live_request import LiveRequest
from dualmap.router.requests.tenant_budgets import KeyTerms, TenantBudgets, drawn_by
from dualmap.router.tenants.directory import TenantDirectory, check_model, may_use
from dualmap.scheduling.estimates.answer_length import expected_answer_tokens
from dualmap.scheduling.placing.placement import NO_CLAIM, Claim
from dualmap.scheduling.prompts.blocks import uncached
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.request.machine import RequestMachine, RequestSpec
from dualmap.scheduling.request.metering import account_text
from dualmap.scheduling.request.outcome import Outcome
from dualmap.scheduling.request.slo import slo_s
from dualmap.scheduling.revisions.weights import Assigned
from dualmap.scheduling.runs.turn import UNNAMED, RunName, hashed_name
from dualmap.scheduling.settings import PriorityClassSettings, SchedulingSettings
from dualmap.scheduling.tenants.budgets import Measure
from dualmap.scheduling.tenants.classes import class_rank
from dualmap.scheduling.tenants.shares import NO_TENANT_WEIGHT
from dualmap.scheduling.tenants.tenant import Caller

PRIORITY_PATHS: Final = SALTED_PATHS - {MESSAGES_PATH}
"""The paths whose bodies vLLM takes a ``priority`` in: those that take a ``cache_salt``, but messages."""
_ESTIMATE_FACTOR: Final = 1.5
"""A prompt whose tokens are estimated hardly has more than so many times as many."""


class Intake:
    """Takes requests in and places them, on one replica."""

    def __init__(
        self,
        pools: PoolDirectory[ServedPool],
        context: ReplicaContext,
        tenants: TenantDirectory | None = None,
        lengths: ModelLengths | None = None,
    ) -> None:
        """``lengths`` knows how long contexts are, which bound answers without a limit."""
        self.pools = pools
        self._lengths = lengths
        self._context = context
        self._tenants = tenants
        self._budgets = TenantBudgets(pools, begins=context.settings.limits_without_store == "open")

    def tenants_changed(self) -> None:
        """Some may have been removed: what their requests drew from is kept no more."""
        if self._tenants is not None:
            self._budgets.keep(self._tenants.tenants.keys())

    async def place(self, request: InferenceRequest) -> LiveRequest:
        """Hash, route, reserve, and wait for the grant (bounded).

        The caller must call ``finish`` of the request. When this raises, or is cancelled, nothing is left behind.

        Raises:
            RouterError: the request is refused.
        """
        live: LiveRequest | None = None
        began_s = self._context.clock.monotonic_s()  # its client waits from now on, also while its prompt is read
        try:
            sent, caller, terms = request.prompt, request.caller, None
            if caller is not None and request.pinned_to is None:
                terms = self._budgets.known_terms(caller, request.model)
            route = terms.route if terms is not None else self._known_route(request) or await self._new_route(request)
            if chooses := route.pool.chooses:
                route = self._served_route(request, route)
            # It draws all that it asks for where its tenant wants that, or where it runs on behind its answer.
            draws_most = caller is not None and (caller.tenant.draws_asked or request.in_background)
            if sent is None:
                bounds, most = request.token_bounds, None
                if bounds is not None and draws_most:
                    most = await self._most_output_tokens(request, route, 0, bounds.output_limit, bounds.answers)
                spec = self._passed_on(request, route, most)
                if chooses and (assigned := await self._assigned(request, route.pool)) is not None:
                    spec = replace(spec, revision=assigned.revision)
                live = self._taken_in(request, route, None, spec, began_s)
            else:
                # Read before anything is entered: a bad body touches no state.
                pool, read = route.pool, sent
                if request.path == RESPONSES_PATH and pool.view.view.has_ranks:
                    # The server chooses the rank, and looks at no cache for that: nothing is known to be found there.
                    read = replace(sent, pooled=True)
                model, adapter = pool.settings.model, route.cached_as
                rule, learned = pool.blocks, pool.view.learned
                prompt = None
                if pool.tokenizer is None:
                    prompt = read_text(read, model=model, lora=adapter, rule=rule, learned=learned)
                if prompt is None:
                    prompt = await read_prompt(
                        read, model=model, lora=adapter, rule=rule, learned=learned, tokenizer=pool.tokenizer
                    )
                if request.continues is not None:
                    stored = await pool.stored_responses.conversation(request.continues)
                    prompt, request.continued_run = replace(prompt, stored_tokens=stored.tokens), stored.run
                if request.truncates_to is not None and _most_tokens(prompt) > request.truncates_to:
                    prompt = replace(prompt, chain=uncached(prompt.chain))
                asked = None
                if draws_most:
                    counted = prompt.tokens if prompt.count is not None else 0
                    output_tokens = await self._most_output_tokens(
                        request, route, counted, prompt.output_limit, request.computed_answers
                    )
                    asked = prompt_bound(sent, prompt), output_tokens
                request.prompt = None
                spec = self._scheduled(request, route, prompt, asked, terms)
                if chooses and (assigned := await self._assigned(request, route.pool, sent, prompt.chain)) is not None:
                    spec = replace(
                        spec,
                        revision=assigned.revision,
                        cohort=assigned.cohort,
                        session=assigned.session,
                        shadowed=assigned.shadowed,
                    )
                live = self._taken_in(request, route, prompt, spec, began_s)
            await live.place()
            return live
        except Exception as error:
            refusal = from_exception(error)
            if live is not None and live.prompt is not None:
                refusal.request_id = live.request_id
            if refusal is error:
                raise
            raise refusal from error

    def _served_route(self, request: InferenceRequest, route: Route[ServedPool]) -> Route[ServedPool]:
        """The route to the pool that stands in for one without a ready instance, where the sender may use that; else
        the route itself. Where a pool starts instances on demand, its requests wait for them."""
        pool = route.pool
        is_bound = request.pinned_to is not None or route.lora is not None or pool.waiting_room is not None
        other = self.pools.pools.get(pool.settings.fallback or "")
        if other is None or is_bound or pool.view.view.ready or not other.view.view.ready:
            return route
        settings, caller = other.settings, request.caller
        if caller is not None and not may_use(caller.tenant, settings.model, settings.name, ""):
            return route
        pool.metrics.fallbacks.value += 1
        return Route(other, settings.model)

    async def _assigned(
        self, request: InferenceRequest, pool: ServedPool, sent: SentPrompt | None = None, chain: Chain | None = None
    ) -> Assigned | None:
        """The revision that serves a request; None: any may, as revisions have no weights, or one instance alone
        can."""
        tenant, asked = request.tenant, request.asked_revision
        if request.pinned_to is not None or not pool.view.revisions.in_force:
            return None
        if sent is None or chain is None:
            return pool.revision_choice.at_random(tenant=tenant, asked=asked, request_id=request.request_id)
        session = Session(partial(session_of, request, sent), partial(is_under_way, sent), chain)
        return await pool.revision_choice.of(tenant=tenant, asked=asked, session=session)

    async def find_route(self, request: InferenceRequest) -> Route[ServedPool]:
        """The route of a request, which its sender may use. A name that is not known here may have just been made known
        to the fleet: it is looked for in the store before it is refused.

        Raises:
            RouterError: there is none.
        """
        return self._known_route(request) or await self._new_route(request)

    def _known_route(self, request: InferenceRequest) -> Route[ServedPool] | None:
        """The route of a request, which its sender may use; None where the store may know one that is new."""
        caller = request.caller
        try:
            return self.route_of(request) if caller is None else self._usable_route(request, caller)
        except UnknownModelError:
            return None

    async def _new_route(self, request: InferenceRequest) -> Route[ServedPool]:
        """The route of a request whose model was not known here, by what the store knows now."""
        # Also where the model is hidden from the sender: to it, that takes as long as one that does not exist.
        await asyncio.gather(*(pool.view.look_again() for pool in self.pools.pools.values()))
        caller = request.caller
        return self.route_of(request) if caller is None else self._usable_route(request, caller)

    def _usable_route(self, request: InferenceRequest, caller: Caller) -> Route[ServedPool]:
        route = self.route_of(request)
        if caller.tenant.models or caller.tenant.pools or route.adapter is not None:
            settings = route.pool.settings
            check_model(caller, request.model, settings.model, settings.name, route.owner)
        return route

    def route_of(self, request: InferenceRequest) -> Route[ServedPool]:
        """The pool of the model that it names; of a request for what an instance has stored, that of the instance.

        Raises:
            RouterError: there is none.
        """
        if request.pinned_to is None or request.path == RESPONSES_PATH:
            return self.pools.routes.get(request.model) or self.pools.resolve(request.model, request.unread)
        for pool in self.pools.pools.values():
            if request.pinned_to in pool.view.view.instances:
                return Route(pool, pool.settings.model)
        raise NotFoundError(f"instance {request.pinned_to!r}, which stored this response, is not in the fleet any more")

    def _taken_in(
        self,
        request: InferenceRequest,
        route: Route[ServedPool],
        prompt: ReadPrompt | None,
        spec: RequestSpec,
        began_s: float,
    ) -> LiveRequest:
        """Enter it among the live requests. Raises ReplicaFullError."""
        context, pool = self._context, route.pool
        request_id = request.request_id
        if not context.live.is_free(request_id):  # the reservation finds those of other replicas
            request_id = f"{request_id}-{secrets.token_hex(4)}"
        machine = RequestMachine(request_id, spec, pool.rules, began_s)
        live = LiveRequest(machine, request, pool, prompt, context)
        pool.metrics.arrived.value += 1
        try:
            context.live.enter(live)
        except ReplicaFullError:
            if spec.chain is not None:
                pool.metrics.count_on_time(False, Outcome.REFUSED)
            raise
        pool.metrics.in_flight.value += 1
        if spec.chain is not None:
            live.watch_deadline()
        return live

    async def _most_output_tokens(
        self, request: InferenceRequest, route: Route[ServedPool], prompt_tokens: int, limit: int | None, answers: int
    ) -> int:
        """The most tokens that the answers may have of a request that draws what it asks for. One without a limit may
        have the rest of the context; ``prompt_tokens`` are taken of it for certain.

        Raises:
            InvalidRequestError: it sets no limit, and the length of the context is not known.
        """
        assert request.caller is not None
        if all(each.measure is Measure.REQUESTS for each in request.caller.tenant.limits):
            return 0
        length = None if limit or self._lengths is None else await self._lengths.of(route.pool)
        bound = answer_bound(limit, answers, None if length is None else max(1, length - prompt_tokens))
        if bound is None:
            raise InvalidRequestError(
                "your tenant's limits count what this request asks for, and no instance says how long the context of"
                f" {route.pool.settings.model!r} is: limit the answer (max_tokens), or try again when one is ready",
                param="max_tokens",
            )
        return bound

    def _scheduled(
        self,
        request: InferenceRequest,
        route: Route[ServedPool],
        prompt: ReadPrompt,
        asked: tuple[int, int] | None,
        terms: KeyTerms | None,
    ) -> RequestSpec:
        """``asked`` are the most tokens of its prompt and its answers, of a tenant whose requests draw these."""
        chain, caller, scheduling = prompt.chain, request.caller, route.pool.scheduling
        tokens, each = prompt.tokens, prompt.expected_output_tokens
        if route.lora is not None:
            chain = replace(chain, root=unsalted_seed(route.pool.settings.model, route.lora))
        rank, class_name = 0, ""
        if scheduling.classes:
            rank = _class_rank(request, scheduling)
            its_class = scheduling.classes[rank]
            class_name = its_class.name
            _set_engine_priority(request, scheduling, its_class)
        claim = NO_CLAIM
        if caller is not None:
            tenant, draws = caller.tenant, None
            if terms is None or terms.route is not route:
                terms = self._budgets.terms(caller, request.model, route)
            if (group := terms.group) is not None:
                if asked is not None:
                    draws = group.draws(*asked, are_most=True)
                else:
                    # Answers that cannot be counted keep what they draw: the most that the request allows.
                    most = prompt.output_limit if request.hides_usage else None
                    draws = group.draws(tokens, (each if most is None else most) * request.computed_answers)
            account = terms.account
            if class_name:
                account = account_text(tenant.name, caller.key, class_name, route.model)
            claim = Claim(tenant.name, account, draws, tenant.weight, rank)
        elif self._tenants is not None and self._tenants.has_tenants:
            claim = Claim(weight=NO_TENANT_WEIGHT, class_rank=rank)  # those without a tenant share as one of their own
        elif rank:
            claim = Claim(class_rank=rank)
        return RequestSpec(
            chain.hashes[-1] if chain.tail_hash is None else chain.tail_hash,
            chain,
            slo_s(scheduling, tokens, request.slo_s, rank),
            route.model,
            claim,
            expected_output_tokens=each,
            output_limit=prompt.output_limit,
            stored_tokens=prompt.stored_tokens,
            text_bytes=prompt.text_bytes or 0,
            images=prompt.images,
            streams=request.stream,
            may_split=request.may_split,
            pinned_to=request.pinned_to,
            only=request.only,
            hides_first_token=request.hides_first_token,
            can_go_on=not (request.not_continued or request.hides_first_token),
            may_pull=request.may_pull,
            shows_prompt=request.shows_prompt,
            answers=request.computed_answers,
            run=_run_name(request) if scheduling.admit_runs else UNNAMED,
            adapter=route.lora or "",
            adapter_share=route.adapter_share,
        )

    def _passed_on(self, request: InferenceRequest, route: Route[ServedPool], asked: int | None) -> RequestSpec:
        """A request that is passed to any suitable instance. Whether its answer streams is not known, and does not
        matter but for how long its first byte may take. Its tokens are estimated by the bytes of its body; ``asked``
        are the most tokens of its answers, of a tenant whose requests draw these. What computes nothing draws as a
        request alone."""
        scheduling, caller = route.pool.scheduling, request.caller
        slo_ttft_s = scheduling.slo_ttft_s
        if scheduling.engine_priorities and scheduling.classes:
            _set_engine_priority(request, scheduling, scheduling.classes[_class_rank(request, scheduling)])
        claim = NO_CLAIM
        if caller is not None:
            budgets, bounds = self._budgets.of(caller.tenant, route.pool.settings.name), request.token_bounds
            group = (budgets.requests if bounds is None else budgets.all).of(drawn_by(caller, request.model, route))
            draws = None
            if group is not None:
                tokens = (0, 0) if bounds is None else _tokens_of(request, bounds, asked, route.pool)
                draws = group.draws(*tokens, are_most=asked is not None)
            account = account_text(caller.tenant.name, caller.key, "", route.model)
            claim = Claim(caller.tenant.name, account, draws)
        return RequestSpec(
            request.body_hash, None, slo_ttft_s, route.model, claim, streams=request.stream,
            pinned_to=request.pinned_to, only=request.only,
            body_tokens=0 if request.token_bounds is None else _body_tokens(request.token_bounds, route.pool),
            adapter=route.lora or "",
        )  # fmt: skip


def _set_engine_priority(
    request: InferenceRequest, scheduling: SchedulingSettings, its_class: PriorityClassSettings
) -> None:
    """Have the engine go by the class of a request in place of what its client says. On paths whose bodies are not
    known to have a ``priority`` that is so where the client sent one."""
    if scheduling.engine_priorities and (request.names_priority or request.path in PRIORITY_PATHS):
        request.engine_priority = its_class.engine_priority


def _most_tokens(prompt: ReadPrompt) -> float:
    """The most tokens that a prompt is likely to have."""
    return prompt.chain.prompt_tokens * (_ESTIMATE_FACTOR if prompt.count is None else 1.0)


def _run_name(request: InferenceRequest) -> RunName:
    """The name of its run: the client's, or that of the conversation which it continues. Where the first response of a
    conversation was of no run, its id names one."""
    sent = request.run
    if sent is not None:
        return hashed_name(request.tenant, sent.run, sent.agent, sent.parent)
    if request.continues is None:
        return UNNAMED
    return RunName(request.continued_run or hashed_name(request.tenant, request.continues).run)


def _class_rank(request: InferenceRequest, scheduling: SchedulingSettings) -> int:
    classes, caller = scheduling.classes, request.caller
    asked = request.asked_class, request.service_tier, request.sent_priority
    if caller is None:
        return class_rank(classes, *asked)
    rank = class_rank(classes, *asked, caller.tenant.priority_class)
    # A class that a token or the gateway names is no higher than the tenant's.
    return max(rank, class_rank(classes, *asked, caller.priority_class)) if caller.priority_class else rank


def _tokens_of(request: InferenceRequest, bounds: TokenBounds, asked: int | None, pool: ServedPool) -> tuple[int, int]:
    """The tokens of prompt and answers that a request draws which is passed on."""
    if asked is not None:
        return min(MOST_TOKENS, bounds.prompt_bytes), asked
    expected = expected_answer_tokens(pool.view.learned.answer_tokens, bounds.output_limit)
    if request.hides_usage and bounds.output_limit is not None:  # it keeps them, see ``Intake._scheduled``
        expected = bounds.output_limit
    return _body_tokens(bounds, pool), min(MOST_TOKENS, expected * bounds.answers)


def _body_tokens(bounds: TokenBounds, pool: ServedPool) -> int:
    return min(MOST_TOKENS, ceil(bounds.prompt_bytes / pool.view.learned.bytes_per_token))
