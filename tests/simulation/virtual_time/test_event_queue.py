from dualmap.simulation.virtual_time.event_queue import EventQueue, Priority


def test_events_come_by_time_then_priority_then_order_of_arrival() -> None:
    queue, order = EventQueue(), []  # type: tuple[EventQueue, list[str]]
    for time_s, priority, name in [
        (2.0, Priority.ARRIVAL, "later"),
        (1.0, Priority.ENGINE, "engine"),
        (1.0, Priority.ARRIVAL, "first arrival"),
        (1.0, Priority.ARRIVAL, "second arrival"),
        (1.0, Priority.MEMBERSHIP, "membership"),
    ]:
        queue.push(time_s, priority, lambda _, name=name: order.append(name))

    while len(queue):
        time_s, action = queue.pop()
        action(time_s)

    assert order == ["membership", "first arrival", "second arrival", "engine", "later"]
