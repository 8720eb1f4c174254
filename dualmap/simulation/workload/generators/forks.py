"""Runs of agents that fork into sub-agents and wait for them all: many short turns, most of them seconds apart.

Calibrated to what is published of coding agents:

* 393 sessions of Claude Code, 68,266 requests (the public analysis "agentic-kv-cache"): a median session has 43 turns,
  and 44 % of sessions fork into sub-agents.
* Returns after an answer (a public analysis of vllm-router's users): 86.5 % within 1 s, 95.1 % within 10 s.

Not published, hence plausible figures only: where a session forks, how many sub-agents it starts and how long they
work, and what a turn adds. Contexts are small for their number of turns, so that a fleet has hundreds of runs at once.
Half of the forks continue the context of their parent, the others begin with a system prompt of sub-agents.
"""

from __future__ import annotations

from random import Random

from dualmap.simulation.workload.generators.draft import Draft, Prompt, Turn
from dualmap.simulation.workload.generators.quantiles import QuantileTable, exponential
from dualmap.simulation.workload.traces import MOONCAKE_BLOCK_TOKENS, Trace

RATE_PER_S = 25.0
SYSTEM_BLOCKS = (4, 8, 12)
SUB_AGENT_BLOCKS = 6
TURNS = QuantileTable(((0, 3), (0.25, 16), (0.5, 43), (0.75, 70), (0.95, 110), (1, 150)))
TASK_TOKENS = QuantileTable(((0, 50), (0.5, 500), (1, 3000)))
RESULT_TOKENS = QuantileTable(((0, 10), (0.25, 60), (0.5, 180), (0.75, 400), (0.95, 1200), (1, 3000)))
OUTPUT_TOKENS = QuantileTable(((0, 8), (0.25, 24), (0.5, 45), (0.75, 85), (0.95, 260), (1, 600)))
GAP_S = QuantileTable(((0, 0.05), (0.5, 0.3), (0.865, 1.0), (0.951, 10.0), (0.99, 40.0), (1, 120.0)))
FORKING_SHARE = 0.44
"""Share of the runs that fork."""
FORKS = (1, 3)
"""Times that such a run forks."""
SUB_AGENTS = (2, 4)
SUB_AGENT_TURNS = QuantileTable(((0, 2), (0.5, 6), (1, 20)))
REPORT_TOKENS = QuantileTable(((0, 100), (0.5, 400), (1, 1500)))
CONTINUING_SHARE = 0.5
"""Share of the forks whose sub-agents begin with the context of their parent."""
READ_REPORTS_S = 0.3
ANSWER_S = 2.0
"""Time of an answer, as the times of the trace have it."""
MEAN_TURNS = 62.0
"""Mean turns of a run, with those of its sub-agents."""


def forks(requests: int, seed: int) -> Trace:
    """Runs of agents with sub-agents, about 25 requests a second at the trace's own times."""
    rng, draft = Random(seed), Draft(MOONCAKE_BLOCK_TOKENS)
    systems = [draft.shared_prefix(blocks) for blocks in SYSTEM_BLOCKS]
    sub_agent = draft.shared_prefix(SUB_AGENT_BLOCKS)
    span_s = 1.3 * requests / RATE_PER_S + 120
    start_s = -MEAN_TURNS * (ANSWER_S + 1.5)
    while start_s < span_s:
        start_s += exponential(rng, MEAN_TURNS / RATE_PER_S)
        system = systems[int(rng.random() * len(systems))]
        _Run(draft, rng, sub_agent).work(start_s, system, TURNS.sample_int(rng))
    return draft.finish("forks", requests)


class _Run:
    """A run in the making."""

    def __init__(self, draft: Draft, rng: Random, sub_agent: tuple[int, ...]) -> None:
        self._draft = draft
        self._rng = rng
        self._sub_agent = sub_agent

    def work(self, at_s: float, system: tuple[int, ...], turns: int) -> None:
        rng, draft = self._rng, self._draft
        forking = rng.random() < FORKING_SHARE
        at = {1 + int(rng.random() * max(1, turns - 1)) for _ in range(_between(rng, FORKS))} if forking else set()
        turn = Turn(draft.new_session())
        prompt = draft.extended(system, len(system) * draft.block_tokens + TASK_TOKENS.sample_int(rng))
        for number in range(turns):
            output_tokens = OUTPUT_TOKENS.sample_int(rng)
            draft.add(at_s, prompt, output_tokens, turn)
            at_s += ANSWER_S
            if number in at:
                added, at_s, names = self._fork(at_s, prompt, turn.session)
                turn = Turn(turn.session, READ_REPORTS_S, names)
                at_s += READ_REPORTS_S
            else:
                added, gap_s = RESULT_TOKENS.sample_int(rng), GAP_S.sample(rng)
                turn = Turn(turn.session, gap_s)
                at_s += gap_s
            tokens = prompt.tokens + output_tokens + added
            prompt = draft.extended(prompt.full_ids(draft.block_tokens), tokens)

    def _fork(self, at_s: float, parent: Prompt, spawned_by: str) -> tuple[int, float, tuple[str, ...]]:
        """Sub-agents at work; returns the tokens of their reports, when the last one ends, and their sessions."""
        rng, draft = self._rng, self._draft
        prefix = parent.full_ids(draft.block_tokens) if rng.random() < CONTINUING_SHARE else self._sub_agent
        added, last_s, names = 0, at_s, []
        for _ in range(_between(rng, SUB_AGENTS)):
            turn = Turn(draft.new_session(), READ_REPORTS_S, (spawned_by,))
            names.append(turn.session)
            own_s = at_s + READ_REPORTS_S
            prompt = draft.extended(prefix, len(prefix) * draft.block_tokens + TASK_TOKENS.sample_int(rng))
            for _ in range(SUB_AGENT_TURNS.sample_int(rng)):
                output_tokens = OUTPUT_TOKENS.sample_int(rng)
                draft.add(own_s, prompt, output_tokens, turn)
                gap_s = GAP_S.sample(rng)
                turn = Turn(turn.session, gap_s)
                own_s += ANSWER_S + gap_s
                tokens = prompt.tokens + output_tokens + RESULT_TOKENS.sample_int(rng)
                prompt = draft.extended(prompt.full_ids(draft.block_tokens), tokens)
            last_s = max(last_s, own_s)
            added += REPORT_TOKENS.sample_int(rng)
        return added, last_s, tuple(names)


def _between(rng: Random, bounds: tuple[int, int]) -> int:
    """A whole number between the bounds, both included."""
    first, last = bounds
    return first + int(rng.random() * (last - first + 1))
