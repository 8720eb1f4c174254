"""This package as it is installed: its version, and its extras, which a deployment installs only where it uses them.

The package is published on no index, so an extra cannot be installed by the package's name. Its packages can.
"""

from __future__ import annotations

import re
import shlex
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec

DISTRIBUTION = "dualmap-fleet"


def package_version() -> str:
    """The version that this package has in ``pyproject.toml``; ``unknown`` where it is not installed."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "unknown"


def packages_of(extra: str) -> list[str]:
    """The packages that an extra brings, as pip takes them; none where this package runs without being installed."""
    try:
        declared = requires(DISTRIBUTION) or []
    except PackageNotFoundError:
        return []
    # Another marker of a package stays, so that pip leaves it out where it cannot be installed.
    pattern = re.compile(rf"(?P<package>[^;]+?)\s*;\s*(?:(?P<marker>.+) and )?extra == ['\"]{extra}['\"]")
    found = filter(None, map(pattern.fullmatch, declared))
    return ["; ".join(filter(None, match.group("package", "marker"))) for match in found]


def how_to_install(extra: str) -> str:
    """A clause for an error message: how the packages of an extra get into the environment of this process."""
    packages = " ".join(map(shlex.quote, packages_of(extra)))
    if not packages:
        return f"in a checkout, .venv/bin/pip install -e '.[{extra}]'"
    if find_spec("pip") is None:
        return f"build the image with --build-arg EXTRAS={extra}, or install {packages} into {sys.prefix}"
    return f"{shlex.quote(sys.executable)} -m pip install {packages}"
