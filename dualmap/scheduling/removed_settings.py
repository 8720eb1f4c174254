"""Settings that former versions had, and what answers each of their questions now.

One table for all packages, in the lowest of those that refuse an unknown name: it serves the start of every command and
``dualmap settings set``.
"""

from __future__ import annotations

_OPTIONS = "the policy's own parameters are scheduling.policy_options, by the same names"
_LEARNED_TRANSFERS = "it is learned from the first transfers; until then 20 ms and 200,000 tokens a second are assumed"

REMOVED = {
    "scheduling.least_cost": _OPTIONS,
    "scheduling.preble": _OPTIONS,
    "scheduling.dynamo": _OPTIONS,
    "scheduling.sglang": _OPTIONS,
    "scheduling.llm_d": _OPTIONS,
    "scheduling.max_key_blocks": "the longest hash key has 64 blocks; it grows only as far as its prefix is hot",
    "scheduling.hotness_window_s": "the window of the hotness tree has 120 s, and fewer the more requests there are",
    "scheduling.hotness_window_requests": "the window follows from the number of instances, 4,096 requests at most",
    "scheduling.decode_stall_s": "3 s without a finished prefill are a decode stall, as in the paper",
    "scheduling.kv_weight_s": "it is a measured constant of the cost, 4 s",
    "scheduling.prefix_samples": "the last instance of 200,000 prefixes is remembered, per generation",
    "scheduling.split.whole_up_to_tokens": "scheduling.split.mode auto compares what both ways cost; never and always"
    " are the alternatives",
    "scheduling.split.transfer_latency_s": _LEARNED_TRANSFERS,
    "scheduling.split.transfer_tokens_per_s": _LEARNED_TRANSFERS,
    "scheduling.split.decode_delay_weight": "it is a measured constant, which grows as answers come close to"
    " scheduling.split.slo_tpot_s",
    "router.tokenize_threads": "there is a thread for four cores that the router may use, four at most",
    "router.tokenize_cache_bytes": "it follows from the memory that the router may use: a 32nd of it, 64 MiB at most",
    "router.max_continuations": "one stream continues on other instances eight times at most",
    "router.max_kept_bytes": "it follows from the memory that the router may use: an eighth of it, 256 MiB at most",
    "pools.discovery.kubernetes.resync_s": "all pods are listed again every 300 s, and after every broken watch",
    "picker.test_headers": "dualmap picker --test-headers, for conformance tests of gateways",
    "emulator.mean_output_tokens": "answers to requests that set no length have 256 tokens in the mean",
    "emulator.prefill_first": "it is a part of the preset's name: emulator.preset NAME:prefill_first",
    "emulator.crash_on": "a prompt that contains 'this prompt kills its emulated engine' kills it",
    "worker.lease_ms": "worker.lease_s, in seconds",
    "worker.time_scale": "scheduling.time_scale says it to replicas and workers at once",
}
"""The answer to a removed setting, or to all settings of a removed section, by dotted name without the numbers of
lists."""


def removed(name: str) -> str | None:
    """The message for those who set this; None where no former version had it."""
    parts = [part for part in name.split(".") if not part.isdecimal()]
    for length in range(len(parts), 0, -1):
        if answer := REMOVED.get(".".join(parts[:length])):
            return f"this setting was removed: {answer}"
    return None
