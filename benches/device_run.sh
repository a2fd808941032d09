#!/usr/bin/env bash
# Measure memascend on this machine's GPU: one command, under 9 minutes, results under $OUT (benches/device/README.md).
#
#   benches/device_run.sh                       the stages of the first call, from the wheel in dist/ or as installed
#   ONLY=second benches/device_run.sh           another group of stages; or stages by name: ONLY=probe,tests
#   REHEARSE=1 benches/device_run.sh            the same stages with toy sizes on a simulated device, without a GPU
#
# OUT: results (build/device-run/out). STORE: a directory on the drive to measure (build/device-run).
# PYTHON: the interpreter (python3). WHEEL: the wheel to install beside it (the newest in dist/). REHEARSAL: a simulated
# device that is built already.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
export PYTHONPATH="$PWD/benches${PYTHONPATH:+:$PYTHONPATH}"
if [ "${REHEARSE:-0}" = 1 ]; then
  # Sources and a linked extension module will do: a rehearsal measures nothing.
  export PYTHONPATH="$PWD/python:$PYTHONPATH"
  device=${REHEARSAL:-$PWD/build/rehearsal}
  if [ ! -x "$device/run.sh" ]; then
    if [ ! -f tests/rehearsal/build.sh ]; then
      echo "REHEARSE=1: tests/rehearsal/build.sh is not there: set REHEARSAL to a simulated device" >&2
      exit 2
    fi
    bash tests/rehearsal/build.sh "$python" "$device"
  fi
  exec "$device/run.sh" "$python" -m device
fi
exec "$python" -m device
