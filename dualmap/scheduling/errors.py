"""Errors of the scheduling core; each package that calls it translates them once, at its own edge."""

from __future__ import annotations


class SchedulingError(Exception):
    """Root of everything the scheduling core raises."""


class NoInstanceError(SchedulingError):
    """No ready instance can take the request (all down, draining, or excluded)."""


class TransitionError(SchedulingError):
    """The event is not legal in this state; nothing has changed."""
