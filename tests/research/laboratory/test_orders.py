from dataclasses import replace

from dualmap.research.laboratory.experiment import Experiment
from dualmap.research.laboratory.orders import by_order, order_tables
from dualmap.research.laboratory.variants import parse_variant
from dualmap.scheduling.settings import SchedulingSettings
from tests.research.laboratory.samples import FIGURES, experiment

NAMES = ("a deadline=dualmap-least-cost,queue_order=deadline", "a fifo=dualmap-least-cost,queue_order=fifo")
NAMES += ("b deadline=preble,queue_order=deadline", "b fifo=preble,queue_order=fifo", "c fifo=llm-d,queue_order=fifo")
VARIANTS = tuple(parse_variant(text, SchedulingSettings()) for text in NAMES)
GOODPUT = {
    "a deadline": (12.0, 12.0), "a fifo": (9.0, 9.0),
    "b deadline": (10.0, 10.0), "b fifo": (10.0, 10.0), "c fifo": (8.0, 8.0),
}  # fmt: skip


def crossed() -> Experiment:
    made = experiment()
    shares = {name: rate / 15 for name, (rate, _) in GOODPUT.items()}
    figures = {name: (replace(FIGURES, on_time=share),) * 2 for name, share in shares.items()}
    return replace(
        made,
        variants=VARIANTS,
        goodputs=(replace(made.goodputs[0], goodput_per_s=GOODPUT, further={"99": GOODPUT}),),
        rates=(replace(made.rates[0], figures=figures),),
    )


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
    assert order_tables(experiment()) == []
    assert list(by_order(VARIANTS[2:])) == ["fifo"], "b is alone by deadline"


def test_a_router_with_a_queue_of_its_own_is_in_no_order_but_among_all_others() -> None:
    own = parse_variant("d own=dynamo,queue_order=fifo,router_queue=dynamo-wspt", SchedulingSettings())
    made = crossed()
    goodput = replace(made.goodputs[0], goodput_per_s=GOODPUT | {"d own": (11.0, 11.0)}, further={})

    (table,) = order_tables(replace(made, variants=(*VARIANTS, own), goodputs=(goodput,), rates=()))

    assert by_order((*VARIANTS, own)) == by_order(VARIANTS)
    assert table.rows[0][-2:] == ("d own 11.00", "+9.1 ± 0.0 %")


def test_the_first_policys_own_order_comes_first() -> None:
    assert list(by_order(VARIANTS)) == ["deadline", "fifo"]
    assert by_order(VARIANTS)["fifo"] == ("a fifo", "b fifo", "c fifo")
