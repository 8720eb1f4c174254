"""Errors of the benchmark, whose message says what to do."""

from __future__ import annotations


class LackingError(Exception):
    """Something that the benchmark needs is missing or does not start."""
