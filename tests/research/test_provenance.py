import re

from dualmap.research.provenance import Provenance


def test_it_names_the_commit_the_day_and_what_the_command_ran() -> None:
    words = (
        "laboratory",
        "--trace",
        "my trace.jsonl",
        "--out",
        "lab",
        "--workers",
        "2",
        "--quiet",
        "--cache=x",
        "--seeds",
        "3",
    )

    made = Provenance.here(words)

    assert made.command == "dualmap laboratory --trace 'my trace.jsonl' --seeds 3"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", made.date)
    assert made.commit
    assert made.commit in made.sentence
    assert made.command in made.sentence
