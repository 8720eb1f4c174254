"""The rules that are declared in Python and run by the scripts as well: the module ``rules`` of ``statestore/lua``.

``docs/contribute/scripts.md`` lists them, and those that stand in both languages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from dualmap.scheduling.estimates.adapters import adapter_disk_s, adapter_host_s, slot_turns
from dualmap.scheduling.estimates.kv_tiers import is_slow, load_time_s
from dualmap.scheduling.estimates.pulls import copy_s, pull_ends_s, pull_pays
from dualmap.scheduling.estimates.weights import Form, features_at, idle_features, rank_s
from dualmap.scheduling.queues.queue_order import finds_memory, is_calm
from dualmap.scheduling.runs import admission
from dualmap.scheduling.state.instance import overtaken_tokens, stalled_s
from dualmap.scheduling.state.request import REPORTED_FIELDS, context_tokens_of, counts_of, growth_at_prefill
from dualmap.statestore.pool.translated import Translation

RULES: Final[tuple[Callable[..., Any], ...]] = (
    features_at, idle_features, adapter_host_s, adapter_disk_s, slot_turns, rank_s, overtaken_tokens, stalled_s,
    finds_memory, is_calm, context_tokens_of, load_time_s, is_slow,
    admission.goes_as, admission.room_tokens, admission.missing_tokens, admission.silent_since_ms,
    admission.waiting_rank, admission.waiting_since, admission.has_had_quantum, admission.gives_way,
    admission.mean_service_with, admission.continues,
    copy_s, pull_ends_s, pull_pays,
)  # fmt: skip
"""Rules that scripts call under their own names."""
COUNTING: Final = {"count": counts_of, "count_prefill": growth_at_prefill}
"""Rules that give counts, by the names of the functions that add these to an instance, or with -1 take them away."""
_ATTRIBUTES: Final = {"prefill_tokens_per_s": "tokens_per_s"} | {name: f"told.{name}" for name in REPORTED_FIELDS}
"""Fields that the tables of scripts name otherwise: a record's learned rate, and what a replica reported of a
request."""


def _by_place(_: type[Any], given: Mapping[str, str]) -> str:
    """The figures of a form by their places: a weighted sum goes through the few that count."""
    return "return { " + ", ".join([given.get(name, "0") for name in Form._fields]) + " }\n"


def _added(_: type[Any], given: Mapping[str, str]) -> str:
    """Figures that are added to those of an instance, or with -1 taken from them."""
    grown = [f"instance.{name} = instance.{name} + sign * {code}\n" for name, code in given.items()]
    return "".join(grown) + "return\n"


def rules_module() -> str:
    """The text of the module."""
    functions = [Translation(_ATTRIBUTES, _by_place).function(each) for each in RULES]
    counting = Translation(_ATTRIBUTES, _added, RULES)
    functions += [counting.function(each, name, ("instance", "sign")) for name, each in COUNTING.items()]
    returned = ", ".join([f"{name} = {name}" for name in (*(rule.__name__ for rule in RULES), *COUNTING)])
    return f"local max, min = math.max, math.min\n{''.join(functions)}return {{ {returned} }}\n"
