"""Random numbers that no other process draws, for ids that need not be secret.

A fork has a copy of its parent's generators, and would mint the ids that the other forks mint: this one begins again in
each of them.
"""

from __future__ import annotations

import os
from random import Random
from typing import Final

own_random: Final = Random()
os.register_at_fork(after_in_child=own_random.seed)
