"""Scheduling policies: one file each, chosen by name."""

from dualmap.scheduling.policies.registry import build_policy

__all__ = ["build_policy"]
