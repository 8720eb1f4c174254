"""The calls that have no meaning without the shared store: they go to it and fail with it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from statestore.base import PoolStore

_Call = Callable[..., Coroutine[Any, Any, Any]]


def _shared(name: str) -> _Call:
    async def call(self: SharedCalls, *arguments: Any, **named: Any) -> Any:
        return await getattr(self._primary, name)(*arguments, **named)

    call.__name__ = name
    return call


class SharedCalls:
    """The operators' and the leader's share of ``PoolStore``, delegated."""

    def __init__(self, primary: PoolStore) -> None:
        self._primary = primary

    put_instance = _shared("put_instance")
    update_instance = _shared("update_instance")
    set_instance_state = _shared("set_instance_state")
    remove_instance = _shared("remove_instance")
    change_settings = _shared("change_settings")
    settings_history = _shared("settings_history")
    acquire_lease = _shared("acquire_lease")
    renew_lease = _shared("renew_lease")
    release_lease = _shared("release_lease")
    loads = _shared("loads")
    queue_head = _shared("queue_head")
    queue = _shared("queue")
    migrate = _shared("migrate")
    wanted_rebalances = _shared("wanted_rebalances")
    arrivals = _shared("arrivals")
    publish_tree = _shared("publish_tree")
    samples = _shared("samples")
    publish_learned = _shared("publish_learned")
    expired_replicas = _shared("expired_replicas")
    reap = _shared("reap")
    repair = _shared("repair")
    renew_subscriber = _shared("renew_subscriber")
    kv_event_records = _shared("kv_event_records")
    claim_kv_events = _shared("claim_kv_events")
    release_kv_events = _shared("release_kv_events")
    mark_kv_events = _shared("mark_kv_events")
    kv_names = _shared("kv_names")
    apply_kv_events = _shared("apply_kv_events")
    now_ms = _shared("now_ms")
    scaling = _shared("scaling")
    record_scaling = _shared("record_scaling")
    scaling_log = _shared("scaling_log")
    recent_blocks = _shared("recent_blocks")
