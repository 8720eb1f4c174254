"""The life of a request, independent of what carries its bytes."""

from __future__ import annotations

from typing import Protocol

from router.ask import Ask, InstanceFailure, Outcome
from statestore.base import FinishFacts


class Flight(Protocol):
    """One live request that its instance may be given now. Every transition is idempotent."""

    request_id: str
    """The ask's own, or that with a suffix when another live request of the fleet has the same."""
    model: str
    """The model name to send to the instance (an alias resolved)."""
    instance_id: str
    instance_url: str
    expected_cached_tokens: int
    attempts: int

    def first_token(self) -> None:
        """The instance produced its first token. Never waits; repetitions change nothing."""

    async def reroute(self, failure: InstanceFailure) -> None:
        """The instance failed before the first byte: move to another one, perhaps waiting for its grant.

        Afterwards ``instance_id``, ``instance_url`` and ``attempts`` name the new try. When this raises, or is
        cancelled, the flight is over and released.

        Raises:
            RouterError: no attempt, budget or instance is left.
        """

    def finish(self, outcome: Outcome, facts: FinishFacts | None = None) -> None:
        """The request is over, however it went: release everything. Never waits; only the first call counts."""


class Lifecycle(Protocol):
    async def place(self, ask: Ask) -> Flight:
        """Hash, route, reserve, and wait for the grant (bounded).

        The caller owes the flight a ``finish``. When this raises, or is cancelled, nothing is left behind.

        Raises:
            RouterError: the request is refused; nothing is left behind.
        """
