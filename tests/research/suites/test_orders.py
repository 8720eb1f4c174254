from dataclasses import replace

from dualmap.research.suites.orders import by_order, order_tables
from dualmap.research.variant import parse_variant
from dualmap.scheduling.settings import SchedulingSettings
from tests.research.suites.samples import CROSSED_GOODPUT, CROSSED_VARIANTS, crossed, outcome


def test_a_lead_is_split_into_what_the_order_and_what_the_placement_gives() -> None:
    table = order_tables(crossed())[0]

    assert table.title == "Order and placement: goodput with 90 % on time"
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert row["deadline: ours"] == "12.00"
    assert table.rows[0][2:4] == ("b 10.00", "+20.0 ± 0.0 %")
    assert table.rows[0][4:7] == ("9.00", "b 10.00", "-10.0 ± 0.0 %"), "first come, first served for all, it is behind"
    assert row["order, deadline for fifo"] == "+33.3 ± 0.0 %"
    assert (row["best of all others"], row["lead"]) == ("b deadline 10.00", "+20.0 ± 0.0 %")


def test_every_target_and_rate_has_its_table() -> None:
    titles = [table.title for table in order_tables(crossed())]

    assert titles == [
        "Order and placement: goodput with 90 % on time",
        "Order and placement: goodput with 99 % on time",
        "Order and placement: on time at 1.5 × saturation",
    ]


def test_without_the_first_policy_in_two_orders_there_is_nothing_to_split() -> None:
    assert order_tables(outcome()) == []
    assert list(by_order(CROSSED_VARIANTS[2:])) == ["fifo"], "b is alone by deadline"


def test_a_router_with_a_queue_of_its_own_is_in_no_order_but_among_all_others() -> None:
    own = parse_variant("d own=dynamo,queue_order=fifo,router_queue=dynamo-wspt", SchedulingSettings())
    made = crossed()
    goodput = replace(made.goodputs[0], goodput_per_s=CROSSED_GOODPUT | {"d own": (11.0, 11.0)}, further={})

    (table,) = order_tables(replace(made, variants=(*CROSSED_VARIANTS, own), goodputs=(goodput,), rates=()))

    assert by_order((*CROSSED_VARIANTS, own)) == by_order(CROSSED_VARIANTS)
    assert table.rows[0][-2:] == ("d own 11.00", "+9.1 ± 0.0 %")


def test_the_first_policys_own_order_comes_first() -> None:
    assert list(by_order(CROSSED_VARIANTS)) == ["deadline", "fifo"]
    assert by_order(CROSSED_VARIANTS)["fifo"] == ("a fifo", "b fifo", "c fifo")
