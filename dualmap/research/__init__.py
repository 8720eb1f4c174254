"""Experiments on the simulator: workloads, variants, runs, tables, and studies made of them. And
chaos: a local fleet that is broken on purpose. Not in the wheel."""
