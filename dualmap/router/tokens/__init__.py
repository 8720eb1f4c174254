"""Prompts as the engine's own tokens: chat templates, tokenizers, and what is kept of former prompts.

What reads a model's files needs the extra ``tokens`` of the package.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from dualmap.router.prompts.prompt import PromptTokenizer
from dualmap.router.settings import RouterSettings
from dualmap.router.telemetry.metrics import PoolMetrics
from dualmap.router.tokens.comparison import compare
from dualmap.router.tokens.instance_client import InstanceClient
from dualmap.router.tokens.instance_renderer import InstanceRenderer
from dualmap.router.tokens.instance_tokenizer import InstanceTokenizer
from dualmap.router.tokens.verified import FILES, INSTANCES, Comparison, TokenCounter, VerifiedTokenizer
from dualmap.runtime.clock import Clock
from dualmap.runtime.extras import how_to_install
from dualmap.runtime.machine import cores, memory_bytes
from dualmap.runtime.pool_settings import PoolSettings
from dualmap.runtime.trust import InstanceTrust
from dualmap.scheduling.estimates.learned import Learned
from dualmap.scheduling.state.view import ClusterView

if TYPE_CHECKING:
    from dualmap.router.tokens.encoder import LocalEncoder
    from dualmap.router.tokens.model_files import ChatTemplates
    from dualmap.router.tokens.tokenizer import PoolTokenizer


MOST_CACHE_BYTES = 64 << 20
CACHE_PART = 32
"""The blocks of tokenized prompts take at most this part of the memory, in each pool."""
MOST_THREADS = 4
CORES_A_THREAD = 4
"""Cores for each thread that tokenizes: the event loop, the relay and other replicas need the rest."""


class NoTokenizerError(ValueError):
    """A pool's tokenizer cannot be used; the message says what to do."""


def build_tokenizer(
    pool: PoolSettings,
    settings: RouterSettings,
    metrics: PoolMetrics,
    *,
    view: Callable[[], ClusterView],
    learned: Callable[[], Learned],
    clock: Clock,
    trust: InstanceTrust | None = None,
) -> PromptTokenizer | None:
    """The tokenizer that the pool is configured with; None for none. Reads the model's files: call at the start.
    ``view`` has the instances of now, and ``learned`` what is known of prompts.

    Raises:
        NoTokenizerError: it cannot be used.
    """
    folder = pool.tokenizer
    if folder is None:
        return None
    key, cache_bytes = settings.upstream_api_key, min(MOST_CACHE_BYTES, memory_bytes() // CACHE_PART)
    client = InstanceClient(authorization=f"Bearer {key.get_secret_value()}" if key is not None else None, trust=trust)
    instances = InstanceTokenizer(
        pool.model,
        view,
        client,
        clock=clock,
        timeout_s=settings.tokenize_timeout_s,
        max_bytes=cache_bytes,
        count=lambda how: metrics.tokenized[how].inc(),
    )
    counters: dict[str, TokenCounter] = {INSTANCES: instances}
    comparison: Comparison | None = None
    if folder != "instances":
        files = _by_files(pool, folder, settings, metrics, cache_bytes)
        counters, comparison = {FILES: files, INSTANCES: instances}, partial(compare, files, instances)
    renderer = InstanceRenderer(
        pool.model,
        view,
        learned,
        client,
        clock=clock,
        timeout_s=settings.tokenize_timeout_s,
        max_bytes=cache_bytes,
    )
    return VerifiedTokenizer(
        counters,
        renderer,
        pool=pool.name,
        view=lambda: view().serving(pool.model),
        clock=clock,
        count=lambda how: metrics.tokenized[how].inc(),
        unrendered=lambda why: metrics.unrendered[why].inc(),
        miscounted=metrics.miscounted.inc,
        compare=comparison,
    )


def read_model(pool: PoolSettings, folder: Path) -> tuple[LocalEncoder, ChatTemplates | None]:
    """The tokenizer and the chat templates of a model's files.

    Raises:
        NoTokenizerError: they cannot be used.
    """
    if any(find_spec(library) is None for library in ("fastokens", "jinja2", "tokenizers")):
        raise NoTokenizerError(
            f"pool {pool.name!r} has a tokenizer, which needs packages that are missing: {how_to_install('tokens')};"
            " or let the instances tokenize (tokenizer: instances)"
        )
    from dualmap.router.tokens.encoder import LocalEncoder
    from dualmap.router.tokens.model_files import read_templates

    try:
        return LocalEncoder(folder), read_templates(
            folder, template_file=pool.chat_template, default_variables=pool.chat_template_kwargs
        )
    except ValueError as error:
        raise NoTokenizerError(f"pool {pool.name!r}: {error}") from error


def _by_files(
    pool: PoolSettings, folder: Path, settings: RouterSettings, metrics: PoolMetrics, cache_bytes: int
) -> PoolTokenizer:
    encoder, templates = read_model(pool, folder)
    from dualmap.router.tokens.tokenizer import PoolTokenizer

    threads = max(1, min(MOST_THREADS, cores() // CORES_A_THREAD))
    return PoolTokenizer(
        encoder,
        templates,
        threads=ThreadPoolExecutor(threads, thread_name_prefix=f"tokenize {pool.name}"),
        timeout_s=settings.tokenize_timeout_s,
        max_bytes=cache_bytes,
        count=lambda how: metrics.tokenized[how].inc(),
    )
