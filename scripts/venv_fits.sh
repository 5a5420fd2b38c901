#!/bin/sh
# scripts/venv_fits.sh VENV [PYTHON]
# Succeeds where the virtual environment runs, is of a version that the project runs on and, if a
# PYTHON is named, of that one's version.

here=$(dirname "$0")

version() {
    "$1" -c 'import platform; print(platform.python_version())' 2>/dev/null
}

"$here/find_python.sh" "$1/bin/python" >/dev/null 2>&1 || exit 1
[ -z "${2:-}" ] || [ "$(version "$1/bin/python")" = "$(version "$2")" ]
