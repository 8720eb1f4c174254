"""Experiments on the simulator: workloads, variants, runs, tables, and studies made of them. Not in the wheel."""
