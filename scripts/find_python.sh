#!/bin/sh
# Prints the path of a Python that this project runs on, or says what to install.
#
#   scripts/find_python.sh            looks on PATH, then in pyenv, then asks uv
#   scripts/find_python.sh PYTHON     takes that one, or says why it will not do

needed=3.12
# Tried first, in this order: the versions that the project is tested with.
tested="3.13 3.12"

# The modules are what `python -m venv` and pip need; some distributions package them apart.
usable() {
    "$1" -c "import sys, ensurepip, ssl, venv
sys.exit(sys.version_info < tuple(map(int, '$needed'.split('.'))))" </dev/null >/dev/null 2>&1
}

version() {
    "$1" -c 'import platform; print(platform.python_version())' </dev/null 2>/dev/null
}

# Might be the very environment that is about to be made anew; what it was made from is found too.
in_virtual_environment() {
    [ -e "$(dirname "$1")/../pyvenv.cfg" ]
}

on_path() {
    # Every folder: a pyenv shim or an old Python may stand before one that will do.
    printf '%s\n' "$PATH" | tr : '\n' | while IFS= read -r folder; do
        printf '%s\n' "${folder:-.}/$1"
    done
}

candidates() {
    for name in $(printf 'python%s ' $tested) python3 python; do
        on_path "$name"
    done
    pyenv=${PYENV_ROOT:-$HOME/.pyenv}/versions
    for release in $tested; do
        printf '%s\n' "$pyenv/$release".*[0-9]/bin/python | sort -r -V
    done
    printf '%s\n' "$pyenv"/*/bin/python | sort -r -V
    for request in $tested ">=$needed"; do
        UV_PYTHON_DOWNLOADS=never uv python find --system "$request" 2>/dev/null
    done
}

first_usable() {
    while IFS= read -r candidate; do
        if [ -x "$candidate" ] && ! in_virtual_environment "$candidate" && usable "$candidate"; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    return 1
}

if [ -n "${1:-}" ]; then
    if ! chosen=$(command -v -- "$1"); then
        echo "error: PYTHON=$1: no such program" >&2
    elif usable "$chosen"; then
        printf '%s\n' "$chosen"
        exit 0
    elif release=$(version "$chosen"); then
        echo "error: PYTHON=$1 is Python $release: needed is >= $needed with its venv," \
            "ensurepip and ssl modules" >&2
    else
        echo "error: PYTHON=$1 does not run as a Python: needed is Python >= $needed" >&2
    fi
    exit 1
fi

candidates | first_usable && exit 0
cat >&2 <<END
error: no Python >= $needed with its venv, ensurepip and ssl modules on PATH, in pyenv or in uv.
Install one, for example with one of
  apt-get install python3 python3-venv    (Debian 13 or Ubuntu 24.04, and later)
  pyenv install 3.13
  uv python install 3.13
or name one: make PYTHON=/path/to/python
END
exit 1
