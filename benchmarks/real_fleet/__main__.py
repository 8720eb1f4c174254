"""``python -m benchmarks.real_fleet``: see ``command``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks import each other by their plain names

from real_fleet.command import main

sys.exit(main(sys.argv[1:]))
