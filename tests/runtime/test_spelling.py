"""Suggestions for words that are not known."""

from __future__ import annotations

from dualmap.runtime.spelling import did_you_mean


def test_the_known_word_that_is_most_like_it_is_suggested() -> None:
    assert did_you_mean("tokens_per_minut", ["requests_per_minute", "tokens_per_minute"]) == (
        "; did you mean tokens_per_minute?"
    )


def test_nothing_is_suggested_where_nothing_is_like_it() -> None:
    assert did_you_mean("x", ["requests_per_minute"]) == ""
