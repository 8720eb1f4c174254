from simulation.short_span import short_span_note


def test_a_run_that_ends_before_what_was_put_off_comes_due_is_flagged() -> None:
    note = short_span_note([1000.0, 141.6, 870.0], max_hold_s=300.0)

    assert note.startswith("Short: 142 to 870 s of counted arrivals, less than 3 × scheduling.max_hold_s (900 s).")


def test_long_runs_and_runs_without_deadline_order_are_not() -> None:
    assert short_span_note([900.0, 5000.0], max_hold_s=300.0) == ""
    assert short_span_note([], max_hold_s=300.0) == ""
