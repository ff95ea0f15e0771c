#!/bin/sh
# Make a virtual environment with fusestep (editable) and its developer tools, or mend one that is not whole.
#
#   tools/setup.sh FOLDER
#
# FOLDER/ready is written last and names the checkout; FOLDER/unfinished stands while pip works, so that a set-up that
# was interrupted half-way starts from an empty folder the next time. PYTHON names an interpreter to use.
set -eu
folder=$1
cd "$(dirname "$0")/.."

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

python=
for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
    if new_enough "$candidate"; then
        python=$candidate
        break
    fi
done
if [ -z "$python" ]; then
    found=$("${PYTHON:-python3}" --version 2>/dev/null || echo "not there")
    echo "fusestep needs Python 3.11 or newer and ${PYTHON:-python3} is ${found}:" \
        "install one (Debian, Ubuntu: apt install python3 python3-venv), or name one with PYTHON=/path/to/python3.12." >&2
    exit 2
fi

if [ -e "$folder/unfinished" ] || ! "$folder/bin/python" -m pip --version >/dev/null 2>&1; then
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
        echo "$python cannot make virtual environments, since its modules venv and ensurepip are not installed:" \
            "install them (Debian, Ubuntu: apt install python$version-venv), or name another with PYTHON=/path/to/python3." >&2
        exit 2
    fi
    echo "Making the virtual environment $folder with $("$python" --version)."
    "$python" -m venv --clear "$folder"
fi

echo "Installing fusestep and its tools into $folder. The first time this downloads PyTorch, which takes minutes."
rm -f "$folder/ready"
touch "$folder/unfinished"
[ -t 1 ] || quiet=--quiet
"$folder/bin/python" -m pip install ${quiet:-} --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
rm "$folder/unfinished"
pwd -P >"$folder/ready"
