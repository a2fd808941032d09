#!/bin/sh
# Installs the wheel as another user would: without root, compiler and Rust, with a HOME that cannot be written to, in a
# fresh virtual environment. Then 10 steps of fine-tuning, the examples, and what memascend takes on disk and to import.
#
#   sh tests/drive.sh WHEEL FOLDER    # `make drive`: as root, which becomes nobody; FOLDER is made, and stays
set -eu
usage="usage: sh tests/drive.sh WHEEL FOLDER"
wheel=$(realpath "${1:?$usage}") folder=$(realpath -m "${2:?$usage}")
[ -f "$wheel" ] || { echo "tests/drive.sh: there is no $wheel: make wheels" >&2; exit 1; }
python=$(command -v "${PYTHON:-/usr/bin/python3}")
here=$(dirname "$(dirname "$(realpath "$0")")")
[ "$(id -u)" = 0 ] || { echo "tests/drive.sh: it becomes another user: run it as root" >&2; exit 1; }
mkdir "$folder" "$folder/home" "$folder/bin" "$folder/work" "$folder/work/tmp"
cp -r "$wheel" "$here/examples" "$here/tests/drive_run.sh" "$folder/"
# The programs that the examples and a virtual environment call, and nothing else.
for program in sh env cat ls rm mkdir mktemp dirname uname id; do ln -s "$(command -v $program)" "$folder/bin/"; done
chmod 0555 "$folder/home" "$folder"
chown -R 65534:65534 "$folder/work"
cd "$folder/work"
exec setpriv --reuid 65534 --regid 65534 --clear-groups --no-new-privs env --ignore-environment \
    HOME="$folder/home" TMPDIR="$folder/work/tmp" PATH="$folder/work/venv/bin:$folder/bin" PYTHON="$python" \
    sh "$folder/drive_run.sh" "$folder"
