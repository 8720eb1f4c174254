"""Settings that former versions had, and what answers each of their questions now.

One table for all rooms, in the lowest of those that refuse an unknown name: it serves the start of every command and
``dualmap settings set``.
"""

from __future__ import annotations

_OPTIONS = "the policy's own parameters are scheduling.policy_options, by the same names"

REMOVED = {
    "scheduling.least_cost": _OPTIONS,
    "scheduling.preble": _OPTIONS,
    "scheduling.dynamo": _OPTIONS,
    "scheduling.sglang": _OPTIONS,
    "scheduling.llm_d": _OPTIONS,
}
"""What answers a removed setting, or all settings of a removed section, by dotted name without the numbers of lists."""


def removed(name: str) -> str | None:
    """What to tell those who set this; None where no former version had it."""
    parts = [part for part in name.split(".") if not part.isdecimal()]
    for length in range(len(parts), 0, -1):
        if answer := REMOVED.get(".".join(parts[:length])):
            return f"this setting was removed: {answer}"
    return None
