"""A tokenizer of the model's own files, by ``fastokens`` or the ``tokenizers`` library."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Protocol

from tokenizers import Tokenizer

from dualmap.router.tokens.fast_tokenizer import Encoded, fast_ids, fast_tokenizer_of, library_ids

log = logging.getLogger(__name__)

AT_ONCE_CHARS: Final = 32 << 10
_AT_ONCE_SLOW_CHARS: Final = 4 << 10
"""Longest text that is encoded at once where the ``tokenizers`` library serves."""


class Encoder(Protocol):
    """Token ids of texts."""

    cuts: re.Pattern[bytes] | None
    """Finds the special tokens before which a text may be cut; None if there are none."""
    first_ids: tuple[int, ...]
    """Ids that ``add_special_tokens`` puts before a text."""
    last_ids: tuple[int, ...]
    """Ids that it puts after a text."""
    at_once_chars: int
    """Texts up to this take a millisecond or two, so that the event loop may encode them itself."""

    def encode(self, texts: list[str]) -> Encoded:
        """The ids of the texts, without added special tokens. Blocks; other threads run."""


class LocalEncoder:
    """The tokenizer of a folder with a model's files. Raises ValueError if it cannot be read.

    vLLM has transformers load it, which for some models takes no more than the vocabulary from ``tokenizer.json``, and
    the rest from its own code. So transformers is used; where it is missing, the file is taken as it is: for models as
    they are published both are the same.
    """

    def __init__(self, folder: Path) -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the library's threads would take the replica's time
        path = folder / "tokenizer.json"
        try:
            by_transformers = _by_transformers(folder)
            self._tokenizer = Tokenizer.from_str(by_transformers) if by_transformers else Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more precise
            raise ValueError(f"{path} cannot be read as a tokenizer: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        specials = _specials(self._tokenizer)
        self.cuts = re.compile(b"|".join(re.escape(each.encode()) for each in specials)) if specials else None
        self._fast = fast_tokenizer_of(self._tokenizer)
        self.at_once_chars = AT_ONCE_CHARS if self._fast is not None else _AT_ONCE_SLOW_CHARS
        self.first_ids, self.last_ids = _added(self._tokenizer)

    def encode(self, texts: list[str]) -> Encoded:
        if self._fast is not None:
            try:
                return fast_ids(self._fast, texts)
            except ValueError as error:
                log.debug("fastokens refuses a text: %s", error)
        return library_ids(self._tokenizer, texts)


_LOAD: Final = """
import sys
from transformers import AutoTokenizer
print(AutoTokenizer.from_pretrained(sys.argv[1], local_files_only=True).backend_tokenizer.to_str())
"""
_LOAD_TIMEOUT_S: Final = 120.0


def _by_transformers(folder: Path) -> str | None:
    """The tokenizer as transformers makes it, as JSON; None where that is not installed, or fails.

    In a process of its own: the library takes more memory than all the rest of a replica.
    """
    if not folder.is_dir():
        return None
    if find_spec("transformers") is None:
        log.warning(
            "transformers is not installed, by which vLLM loads a tokenizer: tokenizer.json in %s is taken as it is,"
            " which for some models gives other tokens; install the extra tokens",
            folder,
        )
        return None
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    command = [sys.executable, "-P", "-c", _LOAD, str(folder)]  # -P: no module of the current folder
    try:
        done = subprocess.run(command, capture_output=True, env=environment, timeout=_LOAD_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        log.warning(
            "transformers cannot load the tokenizer in %s, its tokenizer.json is read instead: %s", folder, error
        )
        return None
    return done.stdout.decode()


def _specials(tokenizer: Tokenizer) -> list[str]:
    """Special tokens that are found in a text before it is normalized, and leave the text before them as it is: none of
    them unless all are such. The longest first, as the library prefers them."""
    added = tokenizer.get_added_tokens_decoder().values()
    if any(token.normalized or token.single_word or token.lstrip or token.rstrip for token in added):
        return []
    return sorted((token.content for token in added), key=len, reverse=True)


def _added(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    added = tokenizer.encode("a", add_special_tokens=True).ids
    for start in range(len(added) - len(plain) + 1):
        if added[start : start + len(plain)] == plain:
            return tuple(added[:start]), tuple(added[start + len(plain) :])
    raise ValueError("its post-processor changes the tokens of a text")
