# Sourced by the scripts beside it: finds a Python, makes .venv and installs what is missing. POSIX sh.
#
# It needs Python 3.11 to 3.13 and nothing else: no root, no system package. PYTHON=/path/to/python chooses one.
#
# Runs at the same time take turns. An environment carries a mark until it is complete, and one that was left with its
# mark is made again. It is not made beside its place and renamed, as its scripts hold its path.

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
venv=${DUALMAP_VENV:-$root/.venv}
venv=${venv%/}
mark=$venv/.unfinished

# safely COMMAND: Python takes no module from the folder that the user is in, where a file may be named like a package.
safely() {
    PYTHONSAFEPATH=1 "$@"
}

# A candidate counts only if it runs (a pyenv shim may exist and fail), fits, and can make an environment with pip.
usable_python() {
    safely "$1" -c 'import sys, venv
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

# make_venv PYTHON: a new environment in the place of whatever is there, unless that is none.
make_venv() {
    if [ -e "$venv" ] && [ ! -e "$venv/pyvenv.cfg" ] && [ ! -e "$mark" ] && [ -n "$(ls -A "$venv")" ]; then
        echo "$venv is no Python environment, and is left alone. Set DUALMAP_VENV to another folder." >&2
        exit 2
    fi
    echo "Making $venv with $("$1" --version)" >&2
    rm -rf "$venv"
    mkdir -p "$venv"
    : >"$mark"
    if safely "$1" -c 'import ensurepip' 2>/dev/null; then
        safely "$1" -m venv "$venv"
    else # Debian without python3-venv: the interpreter's own pip installs into an environment without one
        safely "$1" -m venv --without-pip "$venv"
        safely "$1" -m pip --python "$venv/bin/python" install -q pip
    fi
    rm -f "$mark"
}

is_complete() {
    [ ! -e "$mark" ] && usable_python "$venv/bin/python" && safely "$venv/bin/python" -m pip --version >/dev/null 2>&1
}

# sources_sum: what an installed environment is made of.
sources_sum() {
    for source in "$root"/pyproject.toml "$root"/hatch_build.py "$root"/dualmap/*/*.c "$root"/dualmap/*/*/*.c; do
        [ ! -f "$source" ] || cat "$source"
    done | cksum
}

# is_current STAMP: it was written for the present sources.
is_current() {
    [ -f "$1" ] && [ "$(cat "$1")" = "$(sources_sum)" ]
}

# is_installed EXTRA: for the present sources. Every extra serves the plain commands too, and the test extra brings
# what the others have.
is_installed() {
    usable_python "$venv/bin/python" || return 1
    for stamp in "$venv/.installed-"${1:-*} "$venv/.installed-test"; do
        if is_current "$stamp"; then
            return 0
        fi
    done
    return 1
}

# take_turn PYTHON: waits until no other run is at it. The lock is that of descriptor 9, so it goes with this process
# and what it started, however they end.
take_turn() {
    mkdir -p "$(dirname -- "$venv")"
    exec 9>"$venv.lock"
    safely "$1" -c 'import fcntl, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
try:
    fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print(f"Waiting for another run that makes {sys.argv[1]}", file=sys.stderr)
    fcntl.flock(9, fcntl.LOCK_EX)' "$venv" 9>&9
}

# install EXTRA: the project with an extra ('' for none), editable; only when its
# sources changed since the last time.
install() {
    if is_installed "$1"; then
        return 0
    fi
    python=$(find_python) || exit 2
    take_turn "$python"
    if ! is_installed "$1"; then
        is_complete || make_venv "$python"
        echo "Installing into $venv (once)" >&2
        for stamp in "$venv"/.installed-*; do # an install that is interrupted leaves other extras as they are
            is_current "$stamp" || rm -f "$stamp"
        done
        safely "$venv/bin/python" -m pip install -q --disable-pip-version-check -e "$root${1:+[$1]}"
        sources_sum >"$venv/.installed-$1"
    fi
    exec 9>&-
}
