"""Conversation-like and Tool&Agent-like traces, calibrated to Mooncake's (FAST'25).

The tables below were measured on the released Conversation trace (12,031 requests in 3,537 s) and on the first
1,000 requests of Tool&Agent; the shares of Tool&Agent's three roots and its rate are the published ones.

Conversation: sessions start at random and go on turn by turn. Most turns extend the one before (its prompt, its
answer, a new message), some repeat it, some share only its head (an edited or re-cut context). The steady state
is reached before the trace begins, so that its first requests are in the middle of their sessions, as they are
in the real trace, whose hit rate rises from a cold start. Arrivals are released in bursts every 3 s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from random import Random

from dualmap.simulation.workload.generators.draft import Draft, Prompt
from dualmap.simulation.workload.generators.quantiles import QuantileTable, exponential
from dualmap.simulation.workload.traces import MOONCAKE_BLOCK_TOKENS, Trace

BURST_S = 3.0
WARM_UP_S = 3600.0
MAX_INPUT_TOKENS = 126_195

CONVERSATION_RATE_PER_S = 3.40
TOOLAGENT_RATE_PER_S = 6.67

FIRST_PROMPT_TOKENS = QuantileTable.of(891, 897, 904, 1287, 5000, 12300, 24600, 36500, 84000, 126195)
OUTPUT_TOKENS = QuantileTable.of(1, 10, 24, 156, 350, 472, 597, 698, 1118, 2000)
TOOLAGENT_CHAT_OUTPUT_TOKENS = QuantileTable.of(3, 35, 90, 250, 370, 490, 600, 665, 905, 2000)
TURN_GAP_S = QuantileTable.of(9, 30, 42, 66, 123, 267, 500, 680, 1500, 3000)
# Tokens of a new message beyond the former prompt and answer, after the first, second and any later turn;
# negative where the chat template drops some. Later messages are shorter.
NEW_MESSAGE_TOKENS = (
    QuantileTable.of(-150, -55, 2, 9, 30, 1176, 5392, 8469, 17500, 40000),
    QuantileTable.of(-120, -16, 3, 8, 20, 222, 3660, 6834, 16000, 40000),
    QuantileTable.of(-100, -8, 4, 10, 22, 111, 782, 3711, 12000, 30000),
)
BRANCH_TOKENS = QuantileTable.of(1500, 5214, 7000, 10425, 15106, 20968, 30163, 38897, 74330, 100000)
BRANCH_KEPT_SHARE = QuantileTable.of(0.02, 0.08, 0.1, 0.13, 0.23, 0.5, 0.8, 0.9, 0.98, 1.0)
REPEAT_SHARE = 0.025
# Chance that the next turn shares only the head of a prompt of so many tokens or more.
BRANCH_SHARE = ((32_000, 0.17), (16_000, 0.32), (8_000, 0.25), (2_000, 0.04), (0, 0.0))
# First prompts as short as this are fixed calls without a second turn.
ONE_SHOT_TOKENS = 910
# Chance that a session goes on after its first, second, ... turn; the last value holds from there on.
CONTINUE_SHARE = (0.365, 0.44, 0.54, 0.60, 0.63, 0.65, 0.68, 0.71, 0.74, 0.78)


@dataclass(frozen=True, slots=True)
class ToolPrompt:
    """A tool whose prompt is the same in every call, followed by a short argument and a short answer."""

    share: float
    prompt_blocks: int
    input_tokens: QuantileTable
    output_tokens: QuantileTable


TOOLS = (
    ToolPrompt(
        0.390,
        12,
        QuantileTable.of(6164, 6167, 6169, 6211, 6654, 7067, 7396, 7718, 9040, 9680),
        QuantileTable(((0, 3), (0.61, 3), (0.64, 23), (0.75, 27), (0.9, 33), (0.95, 38), (0.99, 51), (1, 190))),
    ),
    ToolPrompt(
        0.146,
        5,
        QuantileTable.of(2958, 3048, 3108, 3130, 3156, 3289, 4112, 4277, 4581, 4989),
        QuantileTable.of(14, 15, 17, 18, 20, 22, 23, 24, 29, 33),
    ),
)


def conversation(requests: int, seed: int) -> Trace:
    """Chat sessions that all share their first block, at the real trace's rate."""
    rng, draft = Random(seed), Draft(MOONCAKE_BLOCK_TOKENS)
    _draft_sessions(draft, rng, _span_s(requests, CONVERSATION_RATE_PER_S), CONVERSATION_RATE_PER_S, OUTPUT_TOKENS)
    return draft.finish("conversation", requests)


def toolagent(requests: int, seed: int) -> Trace:
    """Chat sessions (46 %) among calls of two tools with prompts of 12 (39 %) and 5 blocks (15 %)."""
    rng, draft = Random(seed), Draft(MOONCAKE_BLOCK_TOKENS)
    span_s = _span_s(requests, TOOLAGENT_RATE_PER_S)
    chat_share = 1 - sum(tool.share for tool in TOOLS)
    _draft_sessions(draft, rng, span_s, TOOLAGENT_RATE_PER_S * chat_share, TOOLAGENT_CHAT_OUTPUT_TOKENS)
    for tool in TOOLS:
        _draft_tool_calls(draft, rng, tool, span_s)
    return draft.finish("toolagent", requests)


def thinking(requests: int, seed: int, answers: int = 4) -> Trace:
    """Tool&Agent's requests with answers ``answers`` times as long, of which no more comes back in later prompts: a
    model that thinks before it answers. Nothing about it was measured."""
    trace = toolagent(requests, seed)
    longer = tuple(replace(request, output_tokens=answers * request.output_tokens) for request in trace.requests)
    return replace(trace, name="thinking", requests=longer)


def _span_s(requests: int, rate_per_s: float) -> float:
    """Long enough that the wanted number of requests has arrived with any seed."""
    return 1.3 * requests / rate_per_s + 300


def _burst(arrival_s: float) -> float:
    """The burst an arrival is released with."""
    return arrival_s // BURST_S * BURST_S


def _mean_turns() -> float:
    """Mean number of turns of a session."""
    one_shot_share = 0.10 + 0.15 * math.log(ONE_SHOT_TOKENS / 904) / math.log(1287 / 904)
    turns, alive = 1.0, 1.0 - one_shot_share
    for share in CONTINUE_SHARE[:-1]:
        alive *= share
        turns += alive
    return turns + alive * CONTINUE_SHARE[-1] / (1 - CONTINUE_SHARE[-1])


def _draft_sessions(draft: Draft, rng: Random, span_s: float, rate_per_s: float, outputs: QuantileTable) -> None:
    root = draft.shared_prefix(1)
    start_s = -WARM_UP_S
    while start_s < span_s:
        start_s += exponential(rng, _mean_turns() / rate_per_s)
        _draft_session(draft, rng, root, start_s, span_s, outputs)


def _draft_session(
    draft: Draft, rng: Random, root: tuple[int, ...], start_s: float, span_s: float, outputs: QuantileTable
) -> None:
    at_s, turn = start_s, 0
    prompt = draft.extended(root, FIRST_PROMPT_TOKENS.sample_int(rng))
    while at_s < span_s:
        output_tokens = outputs.sample_int(rng)
        draft.add(_burst(at_s), prompt, output_tokens)
        goes_on = rng.random() < CONTINUE_SHARE[min(turn, len(CONTINUE_SHARE) - 1)]
        if not goes_on or prompt.tokens <= ONE_SHOT_TOKENS:
            return
        prompt = _next_prompt(draft, rng, prompt, output_tokens, turn)
        at_s += TURN_GAP_S.sample(rng)
        turn += 1


def _next_prompt(draft: Draft, rng: Random, prompt: Prompt, output_tokens: int, turn: int) -> Prompt:
    kind = rng.random()
    if kind < REPEAT_SHARE:
        return prompt
    full = prompt.full_ids(draft.block_tokens)
    branch_share = next(share for tokens, share in BRANCH_SHARE if prompt.tokens >= tokens)
    if kind < REPEAT_SHARE + branch_share:
        kept = max(2, round(BRANCH_KEPT_SHARE.sample(rng) * len(full)))
        tokens = max(BRANCH_TOKENS.sample_int(rng), kept * draft.block_tokens + 1)
        return draft.extended(full[:kept], min(tokens, MAX_INPUT_TOKENS))
    message_tokens = NEW_MESSAGE_TOKENS[min(turn, len(NEW_MESSAGE_TOKENS) - 1)].sample_int(rng)
    tokens = prompt.tokens + output_tokens + message_tokens
    return draft.extended(full, min(max(tokens, len(full) * draft.block_tokens + 1), MAX_INPUT_TOKENS))


def _draft_tool_calls(draft: Draft, rng: Random, tool: ToolPrompt, span_s: float) -> None:
    prefix = draft.shared_prefix(tool.prompt_blocks)
    at_s = 0.0
    while at_s < span_s:
        at_s += exponential(rng, 1 / (TOOLAGENT_RATE_PER_S * tool.share))
        prompt = draft.extended(prefix, tool.input_tokens.sample_int(rng))
        draft.add(_burst(at_s), prompt, tool.output_tokens.sample_int(rng))
