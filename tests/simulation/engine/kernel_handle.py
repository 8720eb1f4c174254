"""A stand-in for the handle of the package that has measured kernels."""

from __future__ import annotations

from typing import Any

from dualmap.simulation.engine.kernel_times import KernelFacts

FACTS = KernelFacts("a/model", "card", 1, "a package", 100_000, 147_456)


class Handle:
    """A hybrid model's kernels: products, scans of states, attention. Times are milliseconds."""

    def mixed_step_breakdown_per_op(
        self, tokens: int, sequences: int, isl: int, osl: int, prefix: int
    ) -> tuple[list[Any], list[Any], list[Any]]:
        assert tokens == isl and osl == 1
        every = tokens - prefix + sequences
        linear = [
            ("context_ffn_gemm", 10.0 * every, 0.0, "silicon"),
            ("context_gdn_scan", 1.0 * every, 0.0, "sol"),
            ("context_norm", 0.5, 0.0, "empirical"),
        ]
        attention = [("context_attention", 0.25 * (tokens - prefix) * tokens, 0.0, "mixed")]
        return linear, attention, [("generation_attention", 1e9, 0.0, "silicon")]

    def decode_step_per_op(self, sequences: int, isl: int, osl: int) -> list[Any]:
        assert osl == 1
        return [
            ("generation_ffn_gemm", 9.0 * sequences, 0.0, "silicon"),
            ("generation_gdn_recurrence", 3.0 * sequences, 0.0, "silicon"),
            ("generation_attention", 0.125 * sequences * isl, 0.0, "silicon"),
        ]
