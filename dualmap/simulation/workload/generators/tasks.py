"""Short tasks of agents: one of three system prompts, 5 to 14 turns, short answers, a think time between them.

Every turn sends the context again, with the answer and a tool's result. The load of such sessions is a number of agents
at work (``--concurrency``), and its measure is turns a second. The figures are plausible ones, not a measured trace's.
"""

from __future__ import annotations

from random import Random

from dualmap.simulation.workload.generators.draft import Draft, Turn
from dualmap.simulation.workload.generators.quantiles import QuantileTable, exponential
from dualmap.simulation.workload.traces import MOONCAKE_BLOCK_TOKENS, Trace

RATE_PER_S = 25.0
SYSTEM_BLOCKS = (4, 8, 12)
TURNS = (5, 14)
RESULT_TOKENS = (100, 1500)
THINK_S = 3.0
"""Mean of an exponential distribution."""
OUTPUT_TOKENS = QuantileTable(((0, 8), (0.25, 24), (0.5, 45), (0.75, 85), (0.95, 260), (1, 600)))
ANSWER_S = 2.0
"""Time of an answer, as the times of the trace have it."""


def tasks(requests: int, seed: int) -> Trace:
    """Short sessions of agents, about 25 requests a second at the trace's own times."""
    rng, draft = Random(seed), Draft(MOONCAKE_BLOCK_TOKENS)
    systems = [draft.shared_prefix(blocks) for blocks in SYSTEM_BLOCKS]
    mean_turns = sum(TURNS) / 2
    span_s = 1.3 * requests / RATE_PER_S + 60
    start_s = -mean_turns * (ANSWER_S + THINK_S)
    while start_s < span_s:
        start_s += exponential(rng, mean_turns / RATE_PER_S)
        _draft_session(draft, rng, systems[int(rng.random() * len(systems))], start_s)
    return draft.finish("tasks", requests)


def _draft_session(draft: Draft, rng: Random, system: tuple[int, ...], at_s: float) -> None:
    turn = Turn(draft.new_session())
    prompt = draft.extended(system, len(system) * draft.block_tokens + _between(rng, RESULT_TOKENS))
    for _ in range(_between(rng, TURNS)):
        output_tokens = OUTPUT_TOKENS.sample_int(rng)
        draft.add(at_s, prompt, output_tokens, turn)
        tokens = prompt.tokens + output_tokens + _between(rng, RESULT_TOKENS)
        prompt = draft.extended(prompt.full_ids(draft.block_tokens), tokens)
        think_s = exponential(rng, THINK_S)
        turn = Turn(turn.session, think_s)
        at_s += ANSWER_S + think_s


def _between(rng: Random, bounds: tuple[int, int]) -> int:
    """A whole number between the bounds, both included."""
    first, last = bounds
    return first + int(rng.random() * (last - first + 1))
