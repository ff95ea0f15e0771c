#!/bin/sh
# Make a virtual environment with fusestep (editable) and its developer tools, or mend one that is not whole.
#
#   tools/setup.sh FOLDER
#
# FOLDER/ready is written last and names the checkout; FOLDER/unfinished stands until then, so that a set-up that was
# interrupted half-way starts afresh the next time. PYTHON names an interpreter to use.
set -eu
folder=$1
cd "$(dirname "$0")/.."

say() { echo "fusestep: $*" >&2; }
new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }
is_current() {
    [ "$(cat "$folder/ready" 2>/dev/null)" = "$(pwd -P)" ] &&
        [ -z "$(find pyproject.toml constraints.txt tools/setup.sh -newer "$folder/ready")" ]
}
# An environment whose pyvenv.cfg is gone is the system's Python under another name, so pip must not be asked alone.
is_whole() {
    [ ! -e "$folder/unfinished" ] && [ -f "$folder/pyvenv.cfg" ] &&
        "$folder/bin/python" -c 'import pip, sys; sys.exit(sys.prefix == sys.base_prefix)' 2>/dev/null
}

# One set-up at a time: `make demo` and `make test` may be started together. The lock names its process.
mkdir -p "$(dirname "$folder")"
until ln -s $$ "$folder.lock" 2>/dev/null; do
    other=$(readlink "$folder.lock") || continue
    if ! kill -0 "$other" 2>/dev/null; then
        rm -f "$folder.lock"
        continue
    fi
    [ -n "${waited:-}" ] || say "waiting for another set-up of $folder (process $other)."
    waited=yes
    sleep 1
done
trap 'rm -f "$folder.lock"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
if [ -n "${waited:-}" ] && is_current; then
    exit 0
fi

if ! is_whole; then
    if [ -n "$(ls -A "$folder" 2>/dev/null)" ] && [ ! -e "$folder/unfinished" ] && [ ! -f "$folder/pyvenv.cfg" ]; then
        say "$folder exists and is no virtual environment; move it away, or name another folder with VENV=…"
        exit 2
    fi
    python=
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
        if new_enough "$candidate"; then
            python=$candidate
            break
        fi
    done
    if [ -z "$python" ]; then
        found=$("${PYTHON:-python3}" --version 2>/dev/null || echo "not there")
        say "Python 3.11 or newer is needed, and ${PYTHON:-python3} is $found:" \
            "install one (Debian, Ubuntu: apt install python3 python3-venv), or name one with PYTHON=/path/to/python3.12"
        exit 2
    fi
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
        say "$python cannot make virtual environments, since its modules venv and ensurepip are not installed:" \
            "install them (Debian, Ubuntu: apt install python$version-venv), or name another with PYTHON=/path/to/python3"
        exit 2
    fi
    say "making the virtual environment $folder with $("$python" --version)."
    # Out of the way in one move, so that no half of the old one is ever taken for a whole.
    rm -rf "$folder.old"
    [ ! -e "$folder" ] || mv "$folder" "$folder.old"
    mkdir "$folder"
    touch "$folder/unfinished"
    "$python" -m venv "$folder"
    rm -rf "$folder.old"
fi

say "installing itself and its tools into $folder; the first time this downloads PyTorch, which takes minutes."
rm -f "$folder/ready"
touch "$folder/unfinished"
[ -t 1 ] || quiet=--quiet
PIP_REQUIRE_VIRTUALENV=true "$folder/bin/python" -m pip install ${quiet:-} --disable-pip-version-check \
    --constraint constraints.txt --editable '.[dev]'
pwd -P >"$folder/ready"
rm "$folder/unfinished"
