"""Scheduling policies: one file each, chosen by name."""

from dualmap.scheduling.placing.policies.registry import build_policy

__all__ = ["build_policy"]
