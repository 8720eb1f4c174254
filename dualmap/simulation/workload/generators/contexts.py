"""Long contexts that are used again and again: what it costs when they have to move to another instance.

``contexts`` are agents that each go on with a context of their own, one turn after the other. ``newdocument`` is
traffic of short requests, in which from some moment on many ask about one long document that nothing has computed yet.
"""

from __future__ import annotations

from random import Random

from dualmap.simulation.workload.generators.draft import Draft, Turn
from dualmap.simulation.workload.generators.quantiles import QuantileTable, exponential
from dualmap.simulation.workload.traces import MOONCAKE_BLOCK_TOKENS, Trace

AGENTS, LEAST_TOKENS, MOST_TOKENS = 40, 30_000, 140_000
START_WITHIN_S = 600.0
"""Agents begin one after the other: all their first contexts are computed."""
THINK_S = 20.0
TURN_TOKENS = QuantileTable(((0, 50), (0.5, 300), (1, 1000)))
ANSWER_TOKENS = QuantileTable(((0, 30), (0.5, 150), (1, 500)))
ANSWER_TOKENS_PER_S = 25.0
"""By which the trace assumes when a turn may come; in a run it comes a while after the answer before it."""

RATE_PER_S = 10.0
DOCUMENT_TOKENS, SHARE, FROM_S = 30_000, 30, 60
QUESTION_TOKENS = QuantileTable(((0, 20), (0.5, 150), (1, 500)))
SHORT_TOKENS = QuantileTable(((0, 200), (0.5, 1000), (1, 3000)))
SHORT_ANSWER_TOKENS = QuantileTable(((0, 10), (0.5, 80), (1, 300)))


def contexts(
    requests: int, seed: int, agents: int = AGENTS, least: int = LEAST_TOKENS, most: int = MOST_TOKENS
) -> Trace:
    """``agents`` with contexts of ``least`` to ``most`` tokens, which grow with every turn up to that."""
    rng, draft = Random(seed), Draft(MOONCAKE_BLOCK_TOKENS)
    for number in range(agents):
        turn, at_s = Turn(draft.new_session()), START_WITHIN_S * number / agents
        tokens = round(least + (most - least) * rng.random())
        prompt = draft.extended((), tokens)
        for _ in range(2 * requests // agents + 1):
            answer = ANSWER_TOKENS.sample_int(rng)
            draft.add(at_s, prompt, answer, turn)
            think_s = exponential(rng, THINK_S)
            at_s += 1.0 + answer / ANSWER_TOKENS_PER_S + think_s
            tokens = min(most, tokens + answer + TURN_TOKENS.sample_int(rng))
            prompt = draft.extended(prompt.full_ids(draft.block_tokens), tokens)
            turn = Turn(turn.session, think_s)
    return draft.finish(f"contexts-{agents}", requests)


def newdocument(
    requests: int, seed: int, tokens: int = DOCUMENT_TOKENS, share: int = SHARE, start: int = FROM_S
) -> Trace:
    """From second ``start`` on, ``share`` % of the requests ask about one document of ``tokens``."""
    rng, draft, at_s = Random(seed), Draft(MOONCAKE_BLOCK_TOKENS), 0.0
    document = draft.shared_prefix(max(1, tokens // draft.block_tokens))
    for _ in range(requests):
        if at_s >= start and rng.random() * 100 < share:
            length = len(document) * draft.block_tokens + QUESTION_TOKENS.sample_int(rng)
            draft.add(at_s, draft.extended(document, length), SHORT_ANSWER_TOKENS.sample_int(rng))
        else:
            draft.add(at_s, draft.extended((), SHORT_TOKENS.sample_int(rng)), SHORT_ANSWER_TOKENS.sample_int(rng))
        at_s += exponential(rng, 1 / RATE_PER_S)
    return draft.finish(f"newdocument-{tokens}", requests)
