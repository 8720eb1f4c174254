"""How long the KV of split requests takes in a run: what the leader learns from."""

from __future__ import annotations

from scheduling.learning import transfer_note


class TransferTimes:
    """Of decode legs without a first token."""

    def __init__(self) -> None:
        self._under_way: dict[str, tuple[float, int]] = {}

    def began(self, request_id: str, now_s: float, tokens: int) -> None:
        """The KV is staged, and so many tokens of it are to move."""
        self._under_way[request_id] = now_s, tokens

    def note(self, request_id: str, now_s: float) -> str:
        """At the first token of the decode leg: what to note of it."""
        staged_s, tokens = self._under_way.pop(request_id)
        return transfer_note(now_s - staged_s, tokens)
