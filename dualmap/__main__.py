"""``python -m dualmap`` is the ``dualmap`` command."""

import sys

if not sys.flags.safe_path:
    # Python has put the current folder first, where a file such as click.py would hide the package of that name. As the
    # last one it still serves a checkout that is not installed.
    sys.path.append(sys.path.pop(0))

from dualmap.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
