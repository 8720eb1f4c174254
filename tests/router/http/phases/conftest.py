"""A router in front of scripted instances."""

from __future__ import annotations

from typing import Any

import pytest

from dualmap.scheduling.state.hotness import HotnessTree
from dualmap.scheduling.state.instance import InstanceSpec, InstanceState
from dualmap.scheduling.state.view import ClusterView
from tests.router.http import kit
from tests.router.http.kit import Script, StartInstance, StartRouter
from tests.router.http.phases.answers import StartFleet


@pytest.fixture
def fleet(start_instance: StartInstance, start_router: StartRouter) -> StartFleet:
    """A router in front of scripted instances, and a connected client."""

    async def start(
        *scripts: Script, settings: Any = None, must_be_asked: Any = False, sends_unasked: Any = False, **intake: Any
    ) -> Any:
        """``must_be_asked``: the instances are known to send usage on request alone; ``sends_unasked``: to send it in
        any case."""
        instances = [await start_instance(script) for script in scripts]
        placed = kit.Intake([instance.url for instance in instances], **intake)
        router = await start_router(placed, **(settings or {}))
        for instance in instances if must_be_asked or sends_unasked else ():
            router.plane.usage_requests.saw(instance.url, sends_unrequested=sends_unasked)
        return placed, instances, await router.connect()

    return start


@pytest.fixture
def down_view() -> Any:
    """The view in which the first instance was taken down and another one is ready."""
    states = {"i0": InstanceState.DOWN, "i1": InstanceState.READY}
    instances = {name: InstanceSpec(name, f"http://{name}", state=state) for name, state in states.items()}
    return ClusterView.build(epoch=2, tree_version=0, instances=instances, tree=HotnessTree(), virtual_nodes=4)
