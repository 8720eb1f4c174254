"""Admission of agents' runs: as many are active as fit into the fleet's KV memory, and the others wait for a turn.

A *run* is the work of one agent, with the sub-agents that it starts. It sends one turn after the other, and each
continues the context of the turn before it. Past the point where the contexts of all runs fit into the memory, an
engine evicts what the next turn needs: every run slows down, and none ends sooner. More turns are then served by fewer
runs at once.

The ledger has the context of every active run, which is what its last prompts and answers hold, less what it shares
with other runs:

- A turn of an active run goes at once. So does that of another run which fits beside the active ones, unless others
  wait.
- Any other turn waits. Nothing is held back between two tokens: a run pauses where its agent has used a tool.
- A run that was silent for ``SILENT_S`` may have ended. It stays active while no other needs its memory, and gives way
  to a run that waits.
- A run that has had a *quantum* of service since it became active gives way to one that waits with less attained
  service: its own turn waits then. So short runs pass long ones. The quantum is the mean service of runs up to the
  moment when they gave way by silence. So most runs are never interrupted, and long ones seldom.
- Of those that wait, any that has waited for ``AGED_S`` goes first, then those that can still meet their SLO, then the
  others, since a turn that is late is late in any case. Among them runs go first that gave way by their silence before
  they had their quantum, as they were begun, and then the one with the least attained service.

Service is the memory that a run held, over the time that it was active, in token-seconds: memory is what runs compete
for. While everything fits nothing waits, and nothing differs from a fleet without admission.

Nothing here does I/O or reads a clock. Each method returns the turns that may go now, in their order.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from math import inf

from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.values import value

MEMORY_SHARE = 0.8
"""The part of the KV memory that active runs may fill. The rest is for answers under way, shared prefixes, and copies
that a run left on another instance. From 0.9 on the gain shrinks in simulated fleets of agents."""
SILENT_S = 10.0
"""A run that is silent for longer gives way: 95 % of the turns of coding agents come within this time of the answer
before them."""
AGED_S = 180.0
QUANTUM_FROM = 20
"""Runs that must have given way by silence before a quantum is known. Until then no run gives way while it works."""
QUANTUM_WINDOW = 200
"""Runs over which the quantum is a mean."""
MAX_RUNS = 65_536
"""Runs that are remembered. The longest silent one is forgotten first."""
MAX_PREFIXES = 65_536
"""Blocks of first prompts that are remembered, to find what runs share."""


@value
class Turn:
    """A turn that has arrived."""

    turn_id: str
    run: str
    branch: str
    """The agent or sub-agent of the run whose context it continues."""
    chain: Chain
    """Its prompt."""
    latest_s: float = inf
    """The time by which it has to go to meet its SLO."""


@dataclass(slots=True)
class Branch:
    """The context of an agent or a sub-agent."""

    shared_tokens: int
    """Tokens of its first prompt that other agents' first prompts begin with, too."""
    tokens: int = 0
    """Tokens of its last prompt, and answer, less those that it shares."""
    seen_s: float = 0.0
    in_flight: int = 0


@dataclass(slots=True)
class Run:
    """A run, as far as it is known."""

    branches: dict[str, Branch] = field(default_factory=dict)
    active: bool = False
    service: float = 0.0
    """Attained service in token-seconds."""
    charged_s: float = 0.0
    """The time up to which its service is counted."""
    _: KW_ONLY
    quantum_from: float = 0.0
    """Its service when its quantum began."""
    interrupted: bool = False
    """It gave way by its silence: its quantum continues where it returns."""
    seen_s: float = 0.0
    waiting: dict[str, float] = field(default_factory=dict)
    """Its turns that wait, with the times of their arrival."""

    @property
    def tokens(self) -> int:
        return sum(branch.tokens for branch in self.branches.values())

    @property
    def is_at_work(self) -> bool:
        return any(branch.in_flight for branch in self.branches.values())


class RunAdmission:
    """The ledger of a fleet's runs, and those that wait."""

    def __init__(self, capacity_tokens: Callable[[], int]) -> None:
        """``capacity_tokens`` returns the KV memory of the ready instances."""
        self._capacity_tokens = capacity_tokens
        self._runs: OrderedDict[str, Run] = OrderedDict()
        """The longest silent one first."""
        self._used_tokens = 0
        self._waiting: dict[str, Run] = {}
        """Runs that wait, by name."""
        self._prefixes: OrderedDict[int, None] = OrderedDict()
        """Blocks of first prompts, the one that none had for longest first."""
        self._turns: dict[str, Turn] = {}
        """Turns that wait or are in flight."""
        self._ended_runs = 0
        self._mean_service = 0.0

    @property
    def waiting_turns(self) -> int:
        return sum(len(run.waiting) for run in self._waiting.values())

    @property
    def used_tokens(self) -> int:
        """Tokens of the contexts of active runs."""
        return self._used_tokens

    # what happens ------------------------------------------------------------------------------------------------
    def arrives(self, turn: Turn, now_s: float) -> tuple[str, ...]:
        """A turn has come. It is among those returned if it goes at once."""
        run = self._seen(turn.run, now_s)
        self._turns[turn.turn_id] = turn
        self._drop_silent_branches(run, now_s)
        branch = run.branches.get(turn.branch)
        if branch is None:
            branch = run.branches[turn.branch] = Branch(self._shared_tokens(turn.chain))
        branch.seen_s = now_s
        self._set_tokens(run, branch, max(0, turn.chain.prompt_tokens - branch.shared_tokens))
        if run.active and not self._gives_way(run, now_s):
            return (self._send(run, turn.turn_id),)
        self._deactivate(run)
        run.waiting[turn.turn_id] = now_s
        self._waiting[turn.run] = run
        return self.due(now_s)

    def ends(self, turn_id: str, output_tokens: int, now_s: float) -> tuple[str, ...]:
        """A turn that went is over, however it went."""
        turn = self._turns.pop(turn_id)
        run = self._seen(turn.run, now_s)
        branch = run.branches[turn.branch]
        branch.seen_s = now_s
        branch.in_flight -= 1
        self._set_tokens(run, branch, branch.tokens + output_tokens)
        return self.due(now_s)

    def due(self, now_s: float) -> tuple[str, ...]:
        """The turns that wait and may go now; to be called now and then, as silence changes with time alone."""
        goes: list[str] = []
        while self._waiting:
            name = self._next(now_s)
            run = self._waiting[name]
            if not self._makes_room(run.tokens, now_s):
                break
            del self._waiting[name]
            self._activate(name, run, now_s)
            goes += [self._send(run, turn_id) for turn_id in run.waiting]
            run.waiting.clear()
        return tuple(goes)

    # rules -------------------------------------------------------------------------------------------------------
    def _next(self, now_s: float) -> str:
        """The run that goes next, of those that wait."""

        def place(name: str) -> tuple[int, bool, float, float]:
            run = self._waiting[name]
            since_s = min(run.waiting.values())
            if now_s - since_s > AGED_S:
                return 0, False, since_s, since_s
            late = all(self._turns[turn_id].latest_s < now_s for turn_id in run.waiting)
            return 2 if late else 1, not run.interrupted, run.service, since_s

        return min(self._waiting, key=place)

    def _gives_way(self, run: Run, now_s: float) -> bool:
        """Whether an active run, of which a turn has come, leaves its memory to one that waits."""
        if not self._waiting or run.is_at_work or run.service - run.quantum_from < self._quantum:
            return False
        first = self._waiting[self._next(now_s)]
        return first.service < run.service and not self._fits(first.tokens)

    @property
    def _quantum(self) -> float:
        return self._mean_service if self._ended_runs >= QUANTUM_FROM else inf

    def _fits(self, tokens: int) -> bool:
        """Whether so much fits beside the active runs. One run alone always does."""
        return not self._used_tokens or self._used_tokens + tokens <= MEMORY_SHARE * self._capacity_tokens()

    def _makes_room(self, tokens: int, now_s: float) -> bool:
        """Have silent runs give way, as far as that makes room for so much; False if it does not."""
        if self._fits(tokens):
            return True
        missing = self._used_tokens + tokens - MEMORY_SHARE * self._capacity_tokens()
        silent: list[Run] = []
        for run in self._runs.values():
            if missing <= 0 or now_s - run.seen_s <= SILENT_S:
                break
            if run.active and not run.is_at_work:
                silent.append(run)
                missing -= run.tokens
        if missing > 0 and sum(run.tokens for run in silent) < self._used_tokens:
            return False
        for run in silent:
            self._learn(run)
            run.interrupted = True
            self._deactivate(run)
        return True

    def _learn(self, run: Run) -> None:
        self._ended_runs += 1
        self._mean_service += (run.service - self._mean_service) / min(self._ended_runs, QUANTUM_WINDOW)

    def _shared_tokens(self, chain: Chain) -> int:
        """The length of the longest prefix that the first prompt of a new branch shares with those of others."""
        shared, known = 0, True
        for block in chain.hashes:
            known = known and block in self._prefixes
            shared += known
            self._prefixes[block] = None
            self._prefixes.move_to_end(block)
        while len(self._prefixes) > MAX_PREFIXES:
            self._prefixes.popitem(last=False)
        return shared * chain.block_tokens

    # books -------------------------------------------------------------------------------------------------------
    def _seen(self, name: str, now_s: float) -> Run:
        """The run, charged for its memory until now."""
        run = self._runs.get(name)
        if run is None:
            run = self._runs[name] = Run(charged_s=now_s)
            self._forget()
        self._runs.move_to_end(name)
        if run.active:
            run.service += run.tokens * (now_s - run.charged_s)
        run.charged_s = run.seen_s = now_s
        return run

    def _forget(self) -> None:
        name, run = next(iter(self._runs.items()))
        if len(self._runs) > MAX_RUNS and not run.waiting and not run.is_at_work:
            self._deactivate(run)
            del self._runs[name]

    def _drop_silent_branches(self, run: Run, now_s: float) -> None:
        """Sub-agents that are done, and an agent that waits for its own, no longer count."""
        for branch in run.branches.values():
            if not branch.in_flight and now_s - branch.seen_s > SILENT_S and branch.tokens and len(run.branches) > 1:
                self._set_tokens(run, branch, 0)

    def _set_tokens(self, run: Run, branch: Branch, tokens: int) -> None:
        if run.active:
            self._used_tokens += tokens - branch.tokens
        branch.tokens = tokens

    def _send(self, run: Run, turn_id: str) -> str:
        run.branches[self._turns[turn_id].branch].in_flight += 1
        return turn_id

    def _activate(self, name: str, run: Run, now_s: float) -> None:
        self._runs.move_to_end(name)
        run.active, run.charged_s, run.seen_s = True, now_s, now_s
        if not run.interrupted:
            run.quantum_from = run.service
        run.interrupted = False
        self._used_tokens += run.tokens

    def _deactivate(self, run: Run) -> None:
        if run.active:
            run.active = False
            self._used_tokens -= run.tokens
