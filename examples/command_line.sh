#!/bin/sh
# The command line from the plan to the report: a run that is resumed with more steps, looked at, and exported.
#
#   sh examples/command_line.sh                    # a tiny random model over bytes, and this file: seconds
#   sh examples/command_line.sh MODEL_DIR DATA     # a model directory, and text or a directory of it
set -eu
here=$(cd "$(dirname "$0")" && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
model=${1:-$scratch/model} data=${2:-$0} tokens=
if [ $# -eq 0 ]; then
    tokens=--bytes  # this model has no tokenizer
    python -c 'import sys; sys.path.insert(0, sys.argv[1]); import train_loop, pathlib
train_loop.tiny_model(pathlib.Path(sys.argv[2]))' "$here" "$scratch/model"
fi

memascend plan "$model" --host-memory 256MiB --seq-len 64 --steps 4 --tbw 600 --details
run() {
    memascend finetune "$model" --data "$data" --store "$scratch/store" --host-memory 256MiB --seq-len 64 \
        --keep-store --durability step --schedule constant --lr 1e-3 $tokens "$@"
}
run --steps 2 --out "$scratch/first"
run --steps 4 --out "$scratch/tuned" --resume --change
memascend inspect "$scratch/store" --tbw 600
memascend verify "$scratch/store"
memascend report "$scratch/tuned" --out "$scratch/report.html"
memascend export "$scratch/store" --out "$scratch/exported"
ls "$scratch/tuned" "$scratch/exported"
