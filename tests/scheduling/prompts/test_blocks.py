from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualmap.api_bodies.prompt import chat_prompt
from dualmap.scheduling.prompts.blocks import (
    BlockRule,
    TextPrompt,
    TokenPrompt,
    cache_seed,
    chain_of_trace,
    continued_chain,
    with_images,
)
from dualmap.scheduling.prompts.chain import Chain
from dualmap.scheduling.prompts.engine_blocks import engine_chain
from dualmap.scheduling.settings import SchedulingSettings

SEED = cache_seed("model")


def chain_of(data: bytes, seed: int, block_bytes: int, bytes_per_token: float) -> Chain:
    """The chain of a rendered prompt."""
    return BlockRule(round(block_bytes / bytes_per_token), block_bytes).chain(TextPrompt(data), seed, bytes_per_token)


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common prefix."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (left, right) in pairs if left != right), min(len(first), len(second)))


def test_hashes_are_the_same_in_every_process_and_version() -> None:
    assert cache_seed("model") == 490923320790739803
    assert chain_of(b"ab" * 8, 7, 8, 4.0).hashes == (14591442237107986248, 1913185345540596600)
    assert chain_of_trace([0, 1, 2], 1536, 7).hashes == (5133589608643455977, 4592413713819919387, 14908592475083991467)


@given(st.binary(max_size=200), st.binary(max_size=200), st.binary(max_size=200))
def test_prompts_share_exactly_the_blocks_that_lie_within_their_common_prefix(
    head: bytes, left: bytes, right: bytes
) -> None:
    first, second = head + left, head + right

    blocks = common(chain_of(first, 1, 16, 4.0).hashes, chain_of(second, 1, 16, 4.0).hashes)

    if min(len(first), len(second)) >= 16:
        assert blocks == common(first, second) // 16
    else:  # one partial block stands for the whole of a short prompt
        assert blocks == (1 if first == second else 0)


@pytest.mark.parametrize("blocks", [0, 1, 2047, 2048, 2049, 4096, 5000])
@pytest.mark.parametrize("rest", [0, 1, 7])
def test_a_chain_made_in_steps_is_the_same(blocks: int, rest: int) -> None:
    rule = BlockRule(block_tokens=2, block_bytes=8)
    data = bytes(index * 7 % 251 for index in range(blocks * 8 + rest))
    prompt = TextPrompt(data)
    steps, count = rule.chain_in_steps(prompt, 5, 4.0), 0
    while True:
        try:
            next(steps)
        except StopIteration as made:
            assert made.value == rule.chain(prompt, 5, 4.0)
            break
        count += 1
    assert (count > 0) is (blocks * 8 + rest > 2048 * 8)


def test_only_full_blocks_are_listed_unless_there_is_none() -> None:
    assert [len(chain_of(b"x" * size, 1, 10, 4.0).hashes) for size in (0, 9, 10, 19, 20, 25)] == [1, 1, 1, 1, 2, 2]


def test_what_follows_the_full_blocks_is_told_apart_by_the_tail_alone() -> None:
    first, second, even = (chain_of(data, 1, 4, 4.0) for data in (b"abcdefgh-x", b"abcdefgh-y", b"abcdefgh"))

    assert first.hashes == second.hashes == even.hashes
    assert len({first.tail_hash, second.tail_hash, None}) == 3
    assert even.tail_hash is None
    assert chain_of(b"abc", 1, 4, 4.0).tail_hash is None


def test_the_learned_ratio_changes_estimates_but_never_hashes() -> None:
    rule, prompt = BlockRule(128, 512), TextPrompt(b"x" * 2048)

    english, chinese = rule.chain(prompt, SEED, 4.0), rule.chain(prompt, SEED, 2.0)

    assert english.hashes == chinese.hashes
    assert (english.block_tokens, english.prompt_tokens) == (128, 512)
    assert (chinese.block_tokens, chinese.prompt_tokens) == (256, 1024)


def test_token_ids_are_counted_not_estimated() -> None:
    chain = BlockRule(4, 16).chain(TokenPrompt(array("I", range(11))), SEED, 3.3)

    assert (len(chain.hashes), chain.block_tokens, chain.prompt_tokens) == (2, 4, 11)


def test_block_bytes_follow_from_the_configuration_alone() -> None:
    assert BlockRule.of(SchedulingSettings(block_tokens=128)) == BlockRule(128, 512)
    assert BlockRule.of(SchedulingSettings(block_tokens=1)) == BlockRule(1, 4)


def test_whatever_separates_kv_caches_separates_chains() -> None:
    seeds = {
        cache_seed("m"),
        cache_seed("n"),
        cache_seed("m", lora="a"),
        cache_seed("m", cache_salt="a"),
        cache_seed("m", lora="a", cache_salt="a"),
        cache_seed("ma"),
    }

    assert len(seeds) == 6
    assert len({chain_of(b"same", seed, 512, 4.0).hashes for seed in seeds}) == 6


def test_text_and_token_ids_of_the_same_bytes_do_not_meet() -> None:
    text = chain_of(array("I", [1, 2]).tobytes(), SEED, 8, 4.0)

    assert text.hashes != engine_chain([1, 2], 2).hashes


def test_a_trace_record_lists_its_full_blocks_and_counts_its_tokens() -> None:
    partial = chain_of_trace([0, 1, 2], 1100, SEED)
    short = chain_of_trace([0], 100, SEED)

    assert (len(partial.hashes), partial.block_tokens, partial.prompt_tokens) == (2, 512, 1100)
    assert partial.tail_hash == chain_of_trace([0, 1, 2], 1536, SEED).hashes[2]
    assert (len(short.hashes), short.tail_hash) == (1, None)


def test_trace_records_share_blocks_where_their_ids_agree() -> None:
    assert common(chain_of_trace([0, 1, 2], 1536, 1).hashes, chain_of_trace([0, 1, 9], 1536, 1).hashes) == 2
    assert common(chain_of_trace([0, 1], 1024, 1).hashes, chain_of_trace([5, 1], 1024, 1).hashes) == 0


def illustrated(image: str, question: str = "what is it?") -> TextPrompt:
    parts = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": question}]
    return chat_prompt({"messages": [{"role": "system", "content": "s" * 1000}, {"role": "user", "content": parts}]})


def test_an_image_has_the_blocks_that_its_tokens_would_have_as_text() -> None:
    rule = BlockRule(16, 64)
    bare = illustrated("data:cat")
    cat, again, dog = [with_images(illustrated(f"data:{name}"), 100, 4.0) for name in ("cat", "cat", "dog")]
    chains = [rule.chain(prompt, 1, 4.0) for prompt in (bare, cat, again, dog)]

    assert (
        chains[1].prompt_tokens == chains[0].prompt_tokens + 100 and len(chains[1].hashes) >= len(chains[0].hashes) + 6
    )
    assert chains[1] == chains[2]
    assert common(chains[1].hashes, chains[3].hashes) * 16 <= 1100 / 4
    assert cat.media_at == bare.media_at
    longer = rule.chain(with_images(illustrated("data:cat", "what is it? A dog?"), 100, 4.0), 1, 4.0)
    assert common(longer.hashes, chains[1].hashes) == len(chains[1].hashes)


def test_images_without_end_take_no_more_than_a_megabyte() -> None:
    prompt = TextPrompt(b"abcd", 0, (1, 2, 3, 4))
    assert with_images(prompt, 0, 4.0) == prompt
    assert len(with_images(prompt, 2**17, 4.0).data) == 4 + 2 * 2**19
    assert with_images(prompt, 1, 2.0).data == b"a\xfd\xfdb\xfd\xfdc\xfd\xfdd\xfd\xfd"


@pytest.mark.parametrize("head_tokens", [5, 16, 40])
def test_a_continued_chain_shares_with_its_head_the_head_s_full_blocks_and_no_more(head_tokens: int) -> None:
    head = engine_chain(range(head_tokens), 16)
    longer = engine_chain(range(head_tokens + 100), 16)
    one, other = (continued_chain(head, rest * 40, 4.0) for rest in (b"image one", b"image two"))

    full = head_tokens // 16
    assert one.hashes[:full] == other.hashes[:full] == tuple(longer.hashes[:full])
    assert not set(one.hashes[full:]) & {*other.hashes[full:], *longer.hashes}
    assert one.prompt_tokens == head_tokens + 90
    assert one.block_tokens == 16 and one.key_stride == head.key_stride


def test_a_continued_chain_depends_on_all_of_its_head_and_grows_with_its_rest() -> None:
    heads = [engine_chain([*range(39), last], 16) for last in (1, 2)]
    one, other = (continued_chain(head, b"an image, and a question" * 10, 4.0) for head in heads)
    assert one.hashes[:2] == other.hashes[:2] and one.hashes[2] != other.hashes[2]

    grown = continued_chain(heads[0], b"an image, and a question" * 20, 3.0)
    assert grown.hashes[: len(one.hashes)] == one.hashes
    short = continued_chain(heads[0], b"?", 4.0)
    assert short.hashes == tuple(heads[0].hashes) and short.prompt_tokens == 41 and short.tail_hash is not None
