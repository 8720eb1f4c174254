"""Agentic coding sessions: a long shared system prompt, a context that grows with every tool call.

An agent sends its whole context again after every tool result, seconds after the last answer; sometimes a person
reads and types. At the context limit the agent compacts: the next prompt is the system prompt and a
summary. A few agent kinds share the traffic unevenly, so their system prompts are hot prefixes of many blocks.
The figures are plausible ones, not a measured trace's; the context limit is Qwen2.5's native 32,768 tokens.
"""

from __future__ import annotations

from random import Random

from dualmap.simulation.workload.generators.draft import Draft, Turn
from dualmap.simulation.workload.generators.quantiles import QuantileTable, exponential, kind_at
from dualmap.simulation.workload.traces import MOONCAKE_BLOCK_TOKENS, Trace

RATE_PER_S = 4.0
WARM_UP_S = 1200.0
CONTEXT_LIMIT_TOKENS = 32_768
# Share of sessions and length of the system prompt with tool descriptions, in blocks, by kind of agent.
AGENT_KINDS = ((0.5, 16), (0.3, 9), (0.2, 22))

TASK_TOKENS = QuantileTable(((0, 40), (0.25, 200), (0.5, 600), (0.75, 2000), (0.95, 5000), (1, 8000)))
OUTPUT_TOKENS = QuantileTable(((0, 20), (0.25, 60), (0.5, 120), (0.75, 280), (0.9, 700), (0.99, 1800), (1, 2500)))
TOOL_RESULT_TOKENS = QuantileTable(((0, 15), (0.25, 80), (0.5, 300), (0.75, 1100), (0.9, 2800), (1, 7000)))
TOOL_GAP_S = QuantileTable(((0, 1.5), (0.25, 4), (0.5, 8), (0.75, 15), (0.95, 45), (1, 120)))
PERSON_GAP_S = QuantileTable(((0, 15), (0.25, 40), (0.5, 90), (0.75, 200), (1, 600)))
PERSON_SHARE = 0.12
ANSWER_TOKENS_PER_S = 40
MEAN_TURNS = 18.0
SUMMARY_TOKENS = 1500


def coding(requests: int, seed: int) -> Trace:
    """Agentic coding sessions in a steady state, at a mean rate of about 4 requests a second."""
    rng, draft = Random(seed), Draft(MOONCAKE_BLOCK_TOKENS)
    systems = [draft.shared_prefix(blocks) for _, blocks in AGENT_KINDS]
    span_s = 1.5 * requests / RATE_PER_S + 600
    start_s = -WARM_UP_S
    while start_s < span_s:
        start_s += exponential(rng, MEAN_TURNS / RATE_PER_S)
        _draft_session(draft, rng, systems[kind_at(rng.random(), AGENT_KINDS)], start_s, span_s)
    return draft.finish("coding", requests)


def _draft_session(draft: Draft, rng: Random, system: tuple[int, ...], start_s: float, span_s: float) -> None:
    at_s, system_tokens, turn = start_s, len(system) * draft.block_tokens, Turn(draft.new_session())
    prompt = draft.extended(system, system_tokens + TASK_TOKENS.sample_int(rng))
    while at_s < span_s:
        output_tokens = OUTPUT_TOKENS.sample_int(rng)
        draft.add(at_s, prompt, output_tokens, turn)
        if rng.random() < 1 / MEAN_TURNS:
            return
        by_person = rng.random() < PERSON_SHARE
        added = (TASK_TOKENS if by_person else TOOL_RESULT_TOKENS).sample_int(rng)
        tokens = prompt.tokens + output_tokens + added
        if tokens > CONTEXT_LIMIT_TOKENS:
            prompt = draft.extended(system, system_tokens + SUMMARY_TOKENS + added)
        else:
            prompt = draft.extended(prompt.full_ids(draft.block_tokens), tokens)
        gap_s = (PERSON_GAP_S if by_person else TOOL_GAP_S).sample(rng)
        turn = Turn(turn.session, gap_s)
        at_s += output_tokens / ANSWER_TOKENS_PER_S + gap_s
