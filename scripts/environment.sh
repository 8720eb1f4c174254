# Sourced by the scripts beside it: finds a Python, makes .venv and installs what is missing. POSIX sh.
#
# It needs Python 3.11 to 3.13 and nothing else: no root, no system package. PYTHON=/path/to/python chooses one.

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
venv=${DUALMAP_VENV:-$root/.venv}

# A candidate counts only if it runs (a pyenv shim may exist and fail), fits, and can make an environment with pip.
usable_python() {
    "$1" -c 'import sys, venv
if not (3, 11) <= sys.version_info[:2] <= (3, 13): sys.exit(1)
try: import ensurepip
except ImportError: import pip' >/dev/null 2>&1
}

find_python() {
    for candidate in ${PYTHON:-} python3.13 python3.12 python3.11 python3 python \
        "$HOME"/.pyenv/versions/3.1[123].*/bin/python3 /usr/bin/python3 /usr/local/bin/python3; do
        if usable_python "$candidate"; then
            echo "$candidate"
            return 0
        fi
    done
    echo "No usable Python found: this needs Python 3.11, 3.12 or 3.13 with venv and pip." >&2
    echo "Set PYTHON=/path/to/python if it is in an unusual place." >&2
    return 1
}

make_venv() {
    python=$(find_python) || exit 2
    echo "Making $venv with $("$python" --version)" >&2
    rm -rf "$venv"
    if "$python" -c 'import ensurepip' 2>/dev/null; then
        "$python" -m venv "$venv"
    else # Debian without python3-venv: the interpreter's own pip installs into an environment without one
        "$python" -m venv --without-pip "$venv"
        "$python" -m pip --python "$venv/bin/python" install -q pip
    fi
}

# install EXTRA: the project with an extra ('' for none), editable; only when pyproject.toml changed since the last time.
# An environment installed with the test extra serves the plain commands too.
install() {
    usable_python "$venv/bin/python" || make_venv
    wanted=$(cksum <"$root/pyproject.toml")
    for stamp in "$venv/.installed-$1" "$venv/.installed-test"; do
        if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
            return 0
        fi
    done
    echo "Installing into $venv (once)" >&2
    "$venv/bin/python" -m pip install -q --disable-pip-version-check -e "$root${1:+[$1]}"
    echo "$wanted" >"$venv/.installed-$1"
}
