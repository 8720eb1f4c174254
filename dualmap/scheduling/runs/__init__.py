"""Runs of agents: which are active on the memory of the fleet, and which wait for a turn."""
