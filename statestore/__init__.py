"""Shared state: one contract (``base``), kept on Redis or in memory, and what a replica does while it is away."""
