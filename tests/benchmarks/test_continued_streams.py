"""The comparison of streams that were cut with the same answers uncut."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from continued_streams import (
    Compared,
    Cut,
    Prompt,
    Results,
    Stream,
    Verdict,
    first_difference,
    is_as_wanted,
    rows,
    verdict_of,
)

from dualmap.research.chaos.answers import Api

ROOT = Path(__file__).resolve().parents[2]
PROMPT = Prompt(3, Api.COMPLETIONS, {})
ENVELOPE = {"id": "a", "object": "text_completion", "created": 1, "model": "m"}
GOES_ON = b": dualmap: goes on at instance-2 after 2 tokens, by text\n\n"


def event(**said: object) -> bytes:
    return b"data: " + json.dumps(ENVELOPE | said).encode() + b"\n\n"


def word(text: str, finish_reason: str | None = None) -> bytes:
    return event(choices=[{"index": 0, "text": text, "finish_reason": finish_reason}])


def answer(*parts: bytes, ends: bool = True) -> Stream:
    usage = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
    stream = Stream(PROMPT)
    for part in (*parts, *([event(choices=[], usage=usage), b"data: [DONE]\n\n"] if ends else [])):
        stream.take(part)
    stream.end(200)
    return stream


WHOLE = answer(word("one"), word(" two"), word(" three", "length"))


def test_a_stream_is_read_with_the_places_at_which_it_goes_on_however_its_bytes_are_cut() -> None:
    wire = b"".join([word("one"), word(" two"), GOES_ON, word(" three", "length")])

    stream = answer(*(wire[at : at + 7] for at in range(0, len(wire), 7)))

    assert (stream.text, stream.problem, stream.finish_reason, stream.tokens) == ("one two three", "", "length", 3)
    ((chars, tokens, by, gap_s),) = [(cut.chars, cut.tokens, cut.by, cut.gap_s) for cut in stream.cuts]
    assert (chars, tokens, by) == (7, 2, "text")
    assert gap_s is not None and gap_s >= 0


@pytest.mark.parametrize(
    ("last", "verdict"),
    [
        ((word(" two"), GOES_ON, word(" three", "length")), Verdict.EQUAL),
        ((word(" two"), GOES_ON, word(" tree", "length")), Verdict.AFTER),
        ((word(" two"), GOES_ON, word(" three", "stop")), Verdict.AFTER),
        ((word(" two"), GOES_ON, word(" three four", "length")), Verdict.AFTER),
        ((word(" too"), GOES_ON, word(" three", "length")), Verdict.BEFORE),
    ],
)
def test_a_difference_is_placed_before_the_cut_or_from_it_on(last: tuple[bytes, ...], verdict: Verdict) -> None:
    assert verdict_of(WHOLE, answer(word("one"), *last)) is verdict


@pytest.mark.parametrize(
    "last", [(word(" two"), event(error={"message": "no"})), (word(" two"), GOES_ON, word(" three"))]
)
def test_a_stream_without_its_end_or_with_an_error_is_broken_off(last: tuple[bytes, ...]) -> None:
    assert verdict_of(WHOLE, answer(word("one"), *last, ends=False)) is Verdict.BROKEN


def test_texts_are_compared_to_the_character_and_to_their_ends() -> None:
    assert first_difference("same", "same") is None
    assert first_difference("same", "sane") == 2
    assert first_difference("same", "same and more") == first_difference("same and more", "same") == 4


def compared(verdict: Verdict, cut: Cut | None) -> Compared:
    return Compared(PROMPT, cut, verdict, "", usage_differs=False)


def test_a_row_counts_what_was_cut_and_one_stream_in_a_hundred_may_differ_from_its_cut_on() -> None:
    equal = [compared(Verdict.EQUAL, Cut(7, 2, "tokens", 0.2)) for _ in range(99)]
    results = Results(signal.SIGTERM, cut=[*equal, compared(Verdict.AFTER, Cut(7, 2, "text", 0.9))])

    assert rows(results).splitlines()[0] == (
        "| SIGTERM, completions | 100 | 99 | 1 | 99 (99.0%) | 1 | 0 | 0 | 0.20 | 0.90 | 0.90 |"
    )
    assert is_as_wanted(results)
    for wrong in (compared(Verdict.BROKEN, None), compared(Verdict.BEFORE, Cut(7, 2, "tokens", 0.2))):
        assert not is_as_wanted(Results(signal.SIGTERM, cut=[*equal, *equal, wrong]))


def test_emulated_engines_that_are_ended_by_either_signal_cut_streams_that_come_out_equal() -> None:
    words = ("--emulated", "--signals", "KILL", "TERM", "--streams", "2", "--at-once", "4", "--tokens", "120")
    command = [sys.executable, "benchmarks/continued_streams.py", *words]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("SIGKILL", "SIGTERM"):
        found = re.search(rf"\| {name}, all \| (\d+) \| \d+ \| \d+ \| (\d+) \(100.0%\) \| 0 \| 0 \| 0 \|", done.stdout)
        assert found is not None, done.stdout
        assert int(found[1]) == int(found[2]) >= 2
    assert "Commit " in done.stdout
