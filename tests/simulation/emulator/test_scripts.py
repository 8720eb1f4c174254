"""Texts of answers, and where they end."""

from __future__ import annotations

import pytest

from dualmap.simulation.emulator.scripts import TOKEN_CHARS, GivenText, MadeUpText, Script, begun_answer
from dualmap.simulation.workload.prompts import WORDS


def test_an_answer_s_text_does_not_depend_on_how_it_is_cut() -> None:
    script = Script(MadeUpText(12345), 9000, "length")
    whole = script.text(0, 9000)
    assert len(whole) == 36_000
    assert whole == "".join(script.text(start, 90) for start in range(0, 9000, 90))
    assert whole.isascii()


def test_answers_with_other_seeds_differ() -> None:
    assert MadeUpText(1).slice(0, 200) != MadeUpText(2).slice(0, 200)


def test_a_given_text_has_a_token_for_every_four_characters() -> None:
    text = GivenText('{"a":"ü🙂"}')
    assert text.tokens == 3
    script = Script(text, text.tokens, "stop")
    assert script.text(0, 3) == '{"a":"ü🙂"}'
    assert script.token_texts(0, 3) == ['{"a"', ':"ü🙂', '"}']


@pytest.mark.parametrize(
    ("stop", "include", "visible", "tokens"),
    [
        ("ef", False, "abcd", 2),
        ("ef", True, "abcdef", 2),
        ("d", False, "abc", 1),
        ("defgh", False, "abc", 2),
        ("ghi", True, "abcdefghi", 3),
    ],
)
def test_a_stop_string_ends_the_answer_with_the_token_that_completes_it(
    stop: str, include: bool, visible: str, tokens: int
) -> None:
    script = Script(GivenText("abcdefghijkl"), 3, "length").stopped([stop], include_stop=include, min_tokens=0)
    assert (script.tokens, script.finish_reason, script.stop_reason) == (tokens, "stop", stop)
    assert script.text(0, tokens) == visible
    assert "".join(script.text(at, 1) for at in range(tokens)) == visible


def test_the_stop_string_that_is_complete_first_wins_but_not_within_the_first_tokens() -> None:
    script = Script(GivenText("abcdabcdxyz"), 3, "length")
    assert script.stopped(["xy", "cd"], include_stop=False, min_tokens=0).text(0, 3) == "ab"
    assert script.stopped(["xy", "cd"], include_stop=False, min_tokens=1).text(0, 3) == "abcdab"
    held = script.stopped(["nowhere"], include_stop=False, min_tokens=0)
    assert [held.text(at, 1) for at in range(3)] == ["", "ab", "cdabcdxyz"]


def test_a_stop_string_is_found_in_an_endless_text_however_long_the_answer() -> None:
    source = MadeUpText(7)
    stop = source.slice(4000, 4012)
    script = Script(source, 1_000_000, "length").stopped([stop], include_stop=True, min_tokens=0)
    assert script.text(0, script.tokens).endswith(stop)
    assert script.tokens <= 1003


@pytest.mark.parametrize("said", [0, 1, 2, 3, 7, 500])
def test_an_answer_goes_on_in_a_prompt_that_ends_with_its_begin(said: int) -> None:
    prompt = b"a prompt, of no whole number of tokens"
    seed, none = begun_answer(prompt, 5)
    text = MadeUpText(seed).slice(0, 600 * TOKEN_CHARS)

    found, known = begun_answer(prompt + text[: said * TOKEN_CHARS].encode(), 5)

    assert (none, found, known) == (0, seed, said)
    assert MadeUpText(found, known).slice(0, 80) == text[said * TOKEN_CHARS :][:80]


def test_a_prompt_that_ends_with_words_of_its_own_begins_an_answer() -> None:
    words = "".join(WORDS[number * 7 % len(WORDS)].decode() for number in range(40)).encode()

    assert begun_answer(words, 5)[1] == 0
