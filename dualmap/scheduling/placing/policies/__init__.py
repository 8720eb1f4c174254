"""Scheduling policies: one file each, chosen by name."""

from dualmap.scheduling.placing.policies.registry import build_policy, queue_order_of

__all__ = ["build_policy", "queue_order_of"]
