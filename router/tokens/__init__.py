"""Prompts as the engine's own tokens: chat templates, tokenizers, and what is kept of former prompts.

Everything but this module and ``instance_tokenizer`` needs the extra ``tokens`` of the package.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

from router.metrics import PoolMetrics
from router.prompt import PromptTokenizer
from router.settings import RouterSettings
from router.tokens.instance_tokenizer import InstanceTokenizer
from scheduling.view import ClusterView
from statestore.clock import Clock
from statestore.settings import PoolSettings


class NoTokenizerError(ValueError):
    """A pool's tokenizer cannot be used; the message says what to do."""


def build_tokenizer(
    pool: PoolSettings,
    settings: RouterSettings,
    metrics: PoolMetrics,
    *,
    view: Callable[[], ClusterView],
    clock: Clock,
) -> PromptTokenizer | None:
    """The tokenizer that the pool is configured with; None for none. Reads the model's files: call at the start.
    ``view`` tells the instances of now.

    Raises:
        NoTokenizerError: it cannot be used.
    """
    folder = pool.tokenizer
    if folder is None:
        return None
    if folder == "instances":
        key = settings.upstream_api_key
        return InstanceTokenizer(
            pool.model,
            view,
            clock=clock,
            timeout_s=settings.tokenize_timeout_s,
            max_bytes=settings.tokenize_cache_bytes,
            count=lambda how: metrics.tokenized[how].inc(),
            authorization=f"Bearer {key.get_secret_value()}" if key is not None else None,
        )
    if any(find_spec(library) is None for library in ("fastokens", "jinja2", "tokenizers")):
        raise NoTokenizerError(
            f"pool {pool.name!r} has a tokenizer: install the package's extra, dualmap-fleet[tokens]"
        )
    from router.tokens.encoder import LocalEncoder
    from router.tokens.model_files import read_templates
    from router.tokens.tokenizer import PoolTokenizer

    try:
        encoder = LocalEncoder(folder)
        templates = read_templates(
            folder, template_file=pool.chat_template, default_variables=pool.chat_template_kwargs
        )
    except ValueError as error:
        raise NoTokenizerError(f"pool {pool.name!r}: {error}") from error
    return PoolTokenizer(
        encoder,
        templates,
        threads=ThreadPoolExecutor(settings.tokenize_threads, thread_name_prefix=f"tokenize {pool.name}"),
        timeout_s=settings.tokenize_timeout_s,
        max_bytes=settings.tokenize_cache_bytes,
        count=lambda how: metrics.tokenized[how].inc(),
    )
