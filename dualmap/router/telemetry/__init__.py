"""Counts and records of a replica, and the metrics that it shows."""
