"""Experiments on the simulator: the paper's evaluation, and a laboratory that compares variants. Not in the wheel."""
