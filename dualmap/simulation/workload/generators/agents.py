"""Long agent sessions: contexts that grow by every tool result to 128k tokens, sub-agents beside, and compaction.

Calibrated to what is published of coding agents:

* TraceLab (Zhu et al., arXiv 2606.30560): 357,161 steps of 4,265 sessions of Claude Code and Codex. Steps per session:
  P25 5, P50 16, P90 152. Tokens appended at contexts of 64k to 128k, the former answer included: P50 790, P90 3,700 to
  6,100, mean 1,600 to 2,700. Output tokens: mean 523. Of all input tokens 95.8 % were read from a cache.
* A production trace of agents (the public analysis "agentic-kvc", 783,000 gaps): from an answer to the next request
  P25 0.69 s, P50 1.6 s, P75 8.6 s, P90 44 s: tool calls, and people in the tail.
* Published Claude Code traces (SemiAnalysis, 2026): 12,400 to 13,000 tokens of tool descriptions before 2,800 to 4,200
  of system prompt, the same in all sessions.

Not published, hence plausible figures only: how often sub-agents are spawned and how long they work, what compaction
leaves, and the tails beyond the quantiles above, which are cut so that a session lasts hours rather than days.

The next step of a session comes the gap after the answer before it, a sub-agent begins after the step that spawned it,
and its parent goes on after the last sub-agent's answer. The times of the trace are those of answers at
``ANSWER_TOKENS_PER_S``.
"""

from __future__ import annotations

from random import Random

from dualmap.simulation.workload.generators.draft import Draft, Prompt, Turn
from dualmap.simulation.workload.generators.quantiles import QuantileTable, exponential, kind_at
from dualmap.simulation.workload.traces import MOONCAKE_BLOCK_TOKENS, Trace

RATE_PER_S = 4.0
WARM_UP_S = 20_000.0
COMPACTION_FROM_TOKENS = 120_000
# Share of sessions, and length of tool descriptions and system prompt in blocks, by kind of agent.
AGENT_KINDS = ((0.6, 32), (0.3, 26), (0.1, 40))
SUB_AGENT_BLOCKS = 12

SESSION_STEPS = QuantileTable(((0, 1), (0.25, 5), (0.5, 16), (0.75, 60), (0.9, 152), (0.98, 500), (1, 800)))
TASK_TOKENS = QuantileTable(((0, 60), (0.25, 400), (0.5, 1500), (0.75, 5000), (0.95, 16_000), (1, 30_000)))
OUTPUT_TOKENS = QuantileTable(((0, 10), (0.25, 90), (0.5, 210), (0.75, 520), (0.9, 1200), (0.99, 4500), (1, 7000)))
TOOL_RESULT_TOKENS = QuantileTable(
    ((0, 20), (0.25, 160), (0.5, 500), (0.75, 1400), (0.9, 3600), (0.99, 13_000), (1, 24_000))
)
GAP_S = QuantileTable(((0, 0.2), (0.25, 0.69), (0.5, 1.6), (0.75, 8.6), (0.9, 44), (0.99, 400), (1, 1800)))
ANSWER_TOKENS_PER_S = 40.0

SPAWN_SHARE = 0.006
"""Share of the steps of a session that start sub-agents."""
SUB_AGENTS = QuantileTable(((0, 2), (0.6, 3), (1, 5)))
SUB_AGENT_STEPS = QuantileTable(((0, 3), (0.5, 10), (1, 40)))
READ_REPORTS_S = AFTER_COMPACTION_S = 0.5
REPORT_TOKENS = QuantileTable(((0, 200), (0.5, 800), (1, 3000)))

COMPACTION_REQUEST_TOKENS = 400
SUMMARY_TOKENS = QuantileTable(((0, 1500), (0.5, 3000), (1, 6000)))
READ_AGAIN_TOKENS = QuantileTable(((0, 2000), (0.5, 8000), (1, 20_000)))

MEAN_SESSION_REQUESTS = 71.0
"""Mean requests of a session, with those of its sub-agents and its compactions."""


def agents(requests: int, seed: int) -> Trace:
    """Long agent sessions in a steady state, at a mean rate of about 4 requests a second."""
    rng, draft = Random(seed), Draft(MOONCAKE_BLOCK_TOKENS)
    systems = [draft.shared_prefix(blocks) for _, blocks in AGENT_KINDS]
    sub_agent = draft.shared_prefix(SUB_AGENT_BLOCKS)
    span_s = 1.5 * requests / RATE_PER_S + 900
    start_s = -WARM_UP_S
    while start_s < span_s:
        start_s += exponential(rng, MEAN_SESSION_REQUESTS / RATE_PER_S)
        session = _Session(draft, rng, systems[kind_at(rng.random(), AGENT_KINDS)], sub_agent, span_s)
        session.work(start_s, SESSION_STEPS.sample_int(rng))
    return draft.finish("agents", requests)


class _Session:
    """One agent at work, from its task to its last answer."""

    def __init__(
        self, draft: Draft, rng: Random, system: tuple[int, ...], sub_agent: tuple[int, ...] | None, span_s: float
    ) -> None:
        self._draft = draft
        self._rng = rng
        self._system = system
        self._sub_agent = sub_agent
        """The system prompt of those that it spawns; None: it spawns none."""
        self._span_s = span_s
        self._prompt = Prompt(0, ())
        self._turn = Turn(draft.new_session())
        """The place of the next request in its session."""

    @property
    def name(self) -> str:
        return self._turn.session

    def work(self, at_s: float, steps: int, spawned_by: tuple[str, ...] = (), think_s: float | None = None) -> float:
        """Draft the requests of a session that starts at ``at_s``; returns when its last answer ends.

        A sub-agent starts ``think_s`` after the last answer of the session that it was spawned by.
        """
        rng = self._rng
        self._turn = Turn(self.name, think_s, spawned_by)
        self._say(at_s, self._system, self._system_tokens + TASK_TOKENS.sample_int(rng))
        for step in range(steps):
            at_s, output_tokens = self._answer(at_s, OUTPUT_TOKENS.sample_int(rng))
            if step == steps - 1 or at_s >= self._span_s:
                break
            added, at_s = self._tools(at_s)
            tokens = self._prompt.tokens + output_tokens + added
            if tokens > COMPACTION_FROM_TOKENS:
                at_s = self._compact(at_s, added)
            else:
                self._say(at_s, self._prompt.full_ids(self._draft.block_tokens), tokens)
        return at_s

    @property
    def _system_tokens(self) -> int:
        return len(self._system) * self._draft.block_tokens

    def _say(self, at_s: float, prefix: tuple[int, ...], tokens: int) -> None:
        """The next prompt. What is sent before the trace begins needs no blocks of its own yet."""
        self._prompt = self._draft.extended(prefix, tokens) if at_s >= 0 else Prompt(tokens, self._system)

    def _answer(self, at_s: float, output_tokens: int) -> tuple[float, int]:
        """Send the prompt; returns when its answer ends, as far as can be known, and how long it is."""
        if at_s >= 0:
            self._draft.add(at_s, self._prompt, output_tokens, self._turn)
        return at_s + 1.0 + output_tokens / ANSWER_TOKENS_PER_S, output_tokens

    def _tools(self, at_s: float) -> tuple[int, float]:
        """Tokens that tools, people or sub-agents add, and when they have."""
        rng = self._rng
        if self._sub_agent is None or rng.random() >= SPAWN_SHARE:
            added, gap_s = TOOL_RESULT_TOKENS.sample_int(rng), GAP_S.sample(rng)
            self._turn = Turn(self.name, gap_s)
            return added, at_s + gap_s
        added, last_s, spawned_names = 0, at_s, []
        for number in range(SUB_AGENTS.sample_int(rng)):
            spawned = _Session(self._draft, rng, self._sub_agent, None, self._span_s)
            steps = SUB_AGENT_STEPS.sample_int(rng)
            last_s = max(last_s, spawned.work(at_s + 0.2 * number, steps, (self.name,), 0.2 * number))
            spawned_names.append(spawned.name)
            added += REPORT_TOKENS.sample_int(rng)
        self._turn = Turn(self.name, READ_REPORTS_S, tuple(spawned_names))
        return added, last_s + READ_REPORTS_S

    def _compact(self, at_s: float, added: int) -> float:
        """Ask for a summary of the whole context; go on with it, and with what is read again."""
        full = self._prompt.full_ids(self._draft.block_tokens)
        self._say(at_s, full, self._prompt.tokens + COMPACTION_REQUEST_TOKENS)
        at_s, summary_tokens = self._answer(at_s, SUMMARY_TOKENS.sample_int(self._rng))
        kept = summary_tokens + min(added, 8000) + READ_AGAIN_TOKENS.sample_int(self._rng)
        at_s += AFTER_COMPACTION_S
        self._turn = Turn(self.name, AFTER_COMPACTION_S)
        self._say(at_s, self._system, self._system_tokens + kept)
        return at_s
