"""A turn of a run, as its replica reports it to the store's ledger of runs."""

from __future__ import annotations

from dataclasses import KW_ONLY

from xxhash import xxh3_64_hexdigest, xxh3_128_hexdigest

from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.tenants.shares import Share
from dualmap.scheduling.values import documented, value


@value
class RunName:
    """The names of a run that a turn has, as hashes of what its client sent and of its tenant; empty where it names
    none."""

    run: str = ""
    branch: str = ""
    """The agent or sub-agent of the run whose context the turn continues."""
    parent: str = ""
    """The run, or agent, that started it."""


UNNAMED = RunName()


def hashed_name(tenant: str, run: str, branch: str = "", parent: str = "") -> RunName:
    """The name of a tenant's run. Another tenant's run of the same name is another one. Names may be any that JSON
    holds."""
    scope = f"{tenant}\n{run}\n".encode("utf-8", "surrogatepass")
    return RunName(
        xxh3_128_hexdigest(scope),
        xxh3_64_hexdigest(scope + branch.encode("utf-8", "surrogatepass")),
        xxh3_64_hexdigest(scope + parent.encode("utf-8", "surrogatepass")) if parent else "",
    )


@value
class Turn:
    """A turn that has arrived."""

    turn_id: str
    replica_id: str
    name: RunName
    chain: Chain
    """Its prompt."""
    waits_s: float
    """The time for which it may wait and be on time."""
    _: KW_ONLY
    tenant: str = ""
    share: Share | None = None
    """Its tenant's share; None: nothing is shared among tenants."""
    stored_tokens: int = 0
    """Tokens of the conversation that its instance has stored, before its prompt."""


@value
class TurnEnd:
    """A turn is over, however it went."""

    turn_id: str
    replica_id: str
    output_tokens: int = 0
    prefill_ms: int = 0
    """From when it went to its first token, or to its end where that was not seen."""
    decode_ms: int = 0
    was_sent: bool = True
    """An instance had it, so its context may be in a cache."""

    @property
    def text(self) -> str:
        """The end as the script gets it."""
        times = f"{self.output_tokens} {self.prefill_ms} {self.decode_ms}"
        return f"{times} {int(self.was_sent)} {turn_key(self.replica_id, self.turn_id)}"


def turn_key(replica_id: str, turn_id: str) -> str:
    """The name of a turn in the ledger. Ids of replicas have no blank."""
    return f"{replica_id} {turn_id}"


@value
class AgentRecord:
    """An agent or sub-agent of a run as the store keeps it."""

    name: str
    tokens: int
    """Its working set: tokens of its last prompt and answer, less those it shares."""
    seen_ms: int
    busy: int
    """Its turns that are in flight."""


@value
class RunRecord:
    """A run as the store keeps it."""

    name: str
    tenant: str = documented("tenant whose run it is; empty: none", default="")
    parent: str = documented("run, or agent, that started it, as a hash; empty: none is known", default="")
    _: KW_ONLY
    home: str = documented("instance that its last turn was on", default="")
    active: bool = documented("1 while its working set counts in the ledger", default=False)
    tokens: int = documented("its working set: tokens of its last prompts and answers, less those it shares", default=0)
    busy: int = documented("its turns that are in flight", default=0)
    turns: int = documented("its turns that went", default=0)
    output_tokens: int = documented("tokens of its answers", default=0)
    service: float = documented("its attained service, token-seconds", default=0.0)
    charged_ms: int = documented("time up to which its service is counted", default=0)
    quantum_from: float = documented("its service when its quantum began", default=0.0)
    interrupted: bool = documented("1 where it gave way by silence before it had its quantum", default=False)
    begun_ms: int = documented("time of its first turn", default=0)
    seen_ms: int = documented("time of its last sign of life", default=0)
    level: int = documented("level of its tenant among others, while a turn of it waits", default=0)
    latest_ms: int = documented("time by which a turn of it that waits must go to be on time", default=0)
    parked_ms: int = documented("time that its turns have waited for memory, all together", default=0)
    prefill_ms: int = documented("time that they took to their first tokens from then on", default=0)
    decode_ms: int = documented("time from their first tokens to their ends", default=0)
    tool_ms: int = documented("time between the end of a turn of an agent and its next one", default=0)
    agents: tuple[AgentRecord, ...] = ()
    """Its agents, the one that was seen last first."""
    waiting: int = 0
    """Its turns that wait."""
    waits_since_ms: int = 0
    """The time since which the longest of them waits; 0: none does."""

    @property
    def state(self) -> str:
        """*parked*: a turn waits for memory; *active*: a turn is in flight; *at a tool*: none is, and its memory is
        kept; *ended*: it gave its memory up, and may come back."""
        if self.waiting:
            return "parked"
        if self.busy:
            return "active"
        return "at a tool" if self.active else "ended"
