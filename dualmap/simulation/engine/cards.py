"""Accelerators by their data sheets, and the shares of these peaks that a serving stack reaches.

| card | dense 16-bit | memory | bandwidth | links to others of its node, each way |
| --- | --- | --- | --- | --- |
| a100 (SXM, 80 GB) | 312 TFLOPS | 80 GB | 2.04 TB/s | NVLink, 300 GB/s |
| h100 (SXM) | 989 TFLOPS | 80 GB | 3.35 TB/s | NVLink, 450 GB/s |
| h200 (SXM) | 989 TFLOPS | 141 GB | 4.8 TB/s | NVLink, 450 GB/s |
| b200 (HGX) | 2,250 TFLOPS | 180 GB | 7.7 TB/s | NVLink, 900 GB/s |
| l40s | 362 TFLOPS | 48 GB | 0.86 TB/s | PCIe 4, 32 GB/s |
| mi300x | 1,307 TFLOPS | 192 GB | 5.3 TB/s | Infinity Fabric, 448 GB/s |
| 910b4 | 280 TFLOPS | 32 GB | 0.8 TB/s | HCCS, 196 GB/s |
| 910b3 | 313 TFLOPS | 64 GB | 1.6 TB/s | HCCS, 196 GB/s |
| 910c, one of its two dies, which software sees as an NPU each | 376 TFLOPS | 64 GB | 1.6 TB/s | 196 GB/s |

The vendors' figures without sparsity, except for the 910C, whose are published by others. The network port is taken
as 200 Gbit/s a card on Ascend and 400 Gbit/s elsewhere.

Efficiencies. Ascend: dense matrix products reach 45 % of the peak and attention in prefill 40 %, reading weights or KV
cache 75 % of the bandwidth; a step costs 5 ms and a sequence 50 µs on the host. GPUs: 60 %, 45 % and 75 %; what the
host costs is what was measured with vLLM 0.24 on an H200, 0.3 ms a step, 13 µs a sequence, 17 ms a prompt. An eighth
of that H200, alone, multiplies at 82 % of an eighth of the peak and attends at 56 %: more than a whole card can, which
its power limits. ``MEASURED_EIGHTH`` in ``dualmap.simulation.engine.presets`` has its times, and a test how far the
derived ones are off.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(kw_only=True, frozen=True, slots=True)
class Efficiency:
    """Shares of the peaks that a serving stack reaches, and its cost on the host."""

    matmul: float = 0.45
    attention: float = 0.40
    memory: float = 0.75
    link: float = 0.8
    step_overhead_s: float = 0.005
    sequence_s: float = 50e-6
    prompt_s: float = 0.0
    """A prompt besides its steps: HTTP, tokenization, sending the first token."""
    transfer_s: float = 0.005


ASCEND = Efficiency()
GPU = Efficiency(matmul=0.60, attention=0.45, step_overhead_s=0.3e-3, sequence_s=13e-6, prompt_s=17e-3)


@dataclass(frozen=True, slots=True)
class Card:
    """An accelerator, by its data sheet."""

    flops: float
    """Peak dense 16-bit operations per second."""
    memory_bytes_per_s: float
    memory_bytes: float
    node_bytes_per_s: float
    """Rate to the other cards of its node, each way: what tensor parallelism exchanges its sums over."""
    network_bytes_per_s: float = 25e9
    """Rate of its network port."""
    host_bytes_per_s: float = 25e9
    """Rate to host memory that loads reach, over PCIe 4.0 with 16 lanes."""
    efficiency: Efficiency = ASCEND


def _gpu(tflops: float, terabytes_per_s: float, gigabytes: float, node_gigabytes_per_s: float) -> Card:
    rates = (tflops * 1e12, terabytes_per_s * 1e12, gigabytes * 1e9, node_gigabytes_per_s * 1e9)
    return Card(*rates, network_bytes_per_s=50e9, efficiency=GPU)


CARDS: Mapping[str, Card] = MappingProxyType(
    {
        "a100": _gpu(312, 2.04, 80, 300),
        "h100": _gpu(989, 3.35, 80, 450),
        "h200": _gpu(989, 4.8, 141, 450),
        "b200": _gpu(2250, 7.7, 180, 900),
        "l40s": _gpu(362, 0.864, 48, 32),
        "mi300x": _gpu(1307, 5.3, 192, 448),
        "910b4": Card(280e12, 0.8e12, 32e9, 196e9),
        "910b3": Card(313e12, 1.6e12, 64e9, 196e9),
        "910c": Card(376e12, 1.6e12, 64e9, 196e9),
    }
)
