"""Faults on a whole local fleet, under traffic whose every answer is known. Linux only, and not in the wheel."""
