#!/bin/sh
# Make a virtual environment with everything that the demo and the tests need.
# usage: bootstrap.sh PYTHON VENV
set -eu
python=$1
venv=$2

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "oled-sim needs Python 3.11 or newer; '$python' is not: set PYTHON=/path/to/python3.11" >&2
    exit 1
fi

# Debian splits ensurepip off into a package of its own.
if ! "$python" -c 'import ensurepip' 2>/dev/null; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "installing python3-venv, which Debian's python3 needs to make a virtual environment"
        apt-get update -qq && apt-get install -y -qq python3-venv >/dev/null
    else
        echo "'$python' cannot make virtual environments: apt-get install python3-venv, then try again" >&2
        exit 1
    fi
fi

echo "installing into $venv (a few minutes the first time; torch is large)"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
# pip compiles ten thousand files to bytecode one after the other, tests of the packages included:
# here all cores do, and those tests stay out. A file for a later Python may not compile: no matter.
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile \
    --constraint constraints.txt --editable '.[torch,dev]'
"$venv/bin/python" -m compileall -qq -j 0 -x '/tests?/' "$venv/lib" || true
