"""The chains that a router makes of a replayed trace: to simulate a live run with the very same hash keys.

A simulated run usually hashes the trace's own block ids. A live router hashes the replay's text, in its own block
size, so the same prefixes fall elsewhere on the rings. With these chains (and the live instances' names) the
simulator's rings are the live ones, and remaining differences are not chance.
"""

from __future__ import annotations

from collections.abc import Iterator

import orjson

from dualmap.api_bodies.prompt import chat_prompt
from dualmap.scheduling.prompts.blocks import DEFAULT_BYTES_PER_TOKEN, BlockRule, cache_seed
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.settings import SchedulingSettings
from dualmap.simulation.replay.replay_bodies import Endpoint, RequestBodies
from dualmap.simulation.workload.traces import Trace


def routed_chains(trace: Trace, model: str, scheduling: SchedulingSettings, salt: str = "") -> Iterator[Chain]:
    """One chain a request of a replay as chat, in order; ``model`` is the name the instances serve."""
    rule, seed = BlockRule.of(scheduling), cache_seed(model)
    bodies = RequestBodies(trace, model, Endpoint.CHAT, salt)
    for place in range(len(trace.requests)):
        yield rule.chain(chat_prompt(orjson.loads(bodies.take(place))), seed, DEFAULT_BYTES_PER_TOKEN)
