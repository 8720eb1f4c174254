"""``python -m dualmap`` is the ``dualmap`` command."""

import sys

from dualmap.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
