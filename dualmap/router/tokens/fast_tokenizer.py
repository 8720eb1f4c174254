"""A faster tokenizer: ``fastokens``, which vLLM has as ``--tokenizer-backend fastokens``, where it gives what the
``tokenizers`` library gives.

That library keeps track of offsets, which are not needed here, and takes many times as long for it. The fast one does
not know every kind of tokenizer, so each is compared on texts of all kinds before it is used at all.
"""

from __future__ import annotations

import logging
import os
import random
from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Final

import fastokens  # type: ignore[import-untyped]
from tokenizers import Tokenizer

log = logging.getLogger(__name__)

_SAMPLES: Final = (
    "def f(x):\n    return x + 1  # it's\n\n\n\tif x: pass\r\n",
    "He said: \"we'll see\" — 12345 6.7e8, 100% of ½… I'M, DON'T",
    "   leading and trailing   \n \n",
    "Größe naïve ﬁ Ⅷ 你好，世界。こんにちは 안녕 привет שלום मन्दिर",
    "🙂👩‍👩‍👧 e\u0301 \u00a0\u2003x\u200by\ufeff",
    '{"a": [1, 2.5, -3e10, null], "b": "\\u00e9\\n"}',
    "a" * 40 + " " + "1" * 20 + "!" * 20 + " " * 20,
)
_MIXED_SAMPLES: Final = 300
_SCRIPTS: Final = ((0x20, 0x7F), (0x20, 0x7F), (0x80, 0x3000), (0x3000, 0xD800), (0x1F300, 0x1F9FF))
_MIXED_CHARS: Final = 20


Encoded = tuple[bytes, Sequence[int]]
"""Ids of several texts, one after the other, in the form of ``id_bytes``; and where each text begins among them, in
tokens, and where the last one ends."""


def id_bytes(ids: Sequence[int]) -> bytes:
    """Token ids in the form in which blocks of them are hashed: unsigned 32-bit numbers, one after the other."""
    return array("I", ids).tobytes()


def fast_tokenizer_of(tokenizer: Tokenizer) -> fastokens.Tokenizer | None:
    """None where it does not know this kind, or its tokens differ from those of ``tokenizer``."""
    os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")  # its threads would take the replica's time
    try:
        fast = fastokens.Tokenizer.from_json_str(tokenizer.to_str())
        specials = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
        samples = [*_SAMPLES, *(special + sample for special in specials for sample in _SAMPLES[:2])]
        samples += _mixed(specials)
        if fast_ids(fast, samples) == library_ids(tokenizer, samples):
            return fast
        log.info("fastokens gives other tokens than the tokenizers library, which is used instead")
    except Exception as error:  # the library raises nothing more precise
        log.info("fastokens cannot be used: %s", error)
    return None


def fast_ids(fast: fastokens.Tokenizer, texts: list[str]) -> Encoded:
    """The ids of the texts without added special tokens. Other threads run meanwhile.

    Raises:
        ValueError: a text exceeds what its regular expressions may take.
    """
    ids, starts = fast.encode_batch_flat(texts)
    return ids, array("Q", starts)


def library_ids(tokenizer: Tokenizer, texts: list[str]) -> Encoded:
    """The ids by the ``tokenizers`` library."""
    found = [each.ids for each in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
    return b"".join(map(id_bytes, found)), array("Q", accumulate(map(len, found), initial=0))


def _mixed(specials: Sequence[str]) -> Iterator[str]:
    """Characters of all scripts, special tokens among them; the same ones every time."""
    chance = random.Random(1)
    for _ in range(_MIXED_SAMPLES):
        chars = [chr(chance.randrange(*chance.choice(_SCRIPTS))) for _ in range(_MIXED_CHARS)]
        yield "".join(chars[: _MIXED_CHARS // 2] + chance.choices(specials) + chars[_MIXED_CHARS // 2 :])
