"""Hashes in C are those of Python, and read nothing beyond the text."""

from __future__ import annotations

from pathlib import Path

import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from dualmap.scheduling.prompts import hashes
from dualmap.scheduling.prompts.hashes import NATIVE, hashes_in_python
from tests.support.sanitized import ROOT, run_sanitized, sanitized

native = pytest.mark.skipif(NATIVE is None, reason="the native hashes are not built")


def test_the_hashes_of_a_build_with_a_compiler_are_native() -> None:
    assert hashes.prefix_hashes is (hashes_in_python if NATIVE is None else NATIVE.prefix_hashes)


@native
@pytest.mark.parametrize("seed", [0, 7, 2**64 - 1])
def test_a_text_of_every_length_has_the_hash_of_the_published_algorithm(seed: int) -> None:
    text = bytes(range(1, 252)) * 13

    for size in range(len(text)):
        expected = (xxhash.xxh3_64_intdigest(text[:size], seed),), None
        assert NATIVE.prefix_hashes(text[:size], seed, len(text)) == expected, size


@native
@given(st.binary(max_size=3000), st.integers(0, 2**64 - 1), st.integers(1, 1100))
@example(b"", 0, 1)
@example(b"x" * 512, 1, 512)
def test_native_hashes_are_those_of_python(data: bytes, seed: int, block_bytes: int) -> None:
    expected = hashes_in_python(data, seed, block_bytes)

    assert NATIVE.prefix_hashes(data, seed, block_bytes) == expected
    assert NATIVE.prefix_hashes(memoryview(data), seed, block_bytes) == expected


@native
@pytest.mark.parametrize("wrong", [(b"x", 1, 0), (b"x", 1, -1), (b"x", -1, 1), (b"x", 2**64, 1), ("x", 1, 1), (b"x",)])
def test_wrong_arguments_of_native_hashes_are_errors(wrong: tuple[object, ...]) -> None:
    with pytest.raises((TypeError, ValueError, OverflowError)):
        NATIVE.prefix_hashes(*wrong)


def test_native_hashes_read_nothing_beyond_the_text(tmp_path: Path) -> None:
    made = sanitized(ROOT / "dualmap/scheduling/prompts/hashes.c", tmp_path)

    assert run_sanitized("tests.scheduling.prompts.fuzz_hashes", str(made), "4000") == "4000\n"
