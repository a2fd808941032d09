#!/bin/sh
# The part of drive.sh that runs as the other user, in a folder of its own.
set -eu
folder=$1
for program in cc gcc clang ld rustc cargo zig; do
    if command -v $program; then echo "drive: $program is on PATH" >&2; exit 1; fi
done
if mkdir "$HOME/x" 2>/dev/null; then echo "drive: HOME can be written to" >&2; exit 1; fi
echo "== user $(id -u), PATH $PATH, HOME $HOME (read-only)"
export PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 HF_HUB_OFFLINE=1
"$PYTHON" -m venv venv
python -m pip install --quiet "$(echo "$folder"/*.whl)[cli]"
python - <<'CODE'
import importlib.metadata, os, subprocess, sys

files = [str(f.locate()) for f in importlib.metadata.files("memascend")]
sizes = {f: os.path.getsize(f) for f in files if os.path.exists(f)}
binary = sum(size for f, size in sizes.items() if f.endswith(".so"))
print(f"== installed: {sum(sizes.values()) / 1e6:.2f} MB in {len(sizes)} files, {binary / 1e6:.2f} MB of it the module")


# What memascend adds to PyTorch, which takes most of the time and is in memory already where it is imported second.
code = "import torch, time; t = time.perf_counter(); import memascend; print(time.perf_counter() - t)"
seconds = min(float(subprocess.check_output([sys.executable, "-c", code])) for _ in range(5))
print(f"== import: {seconds:.3f} s beyond PyTorch's (least of 5)")
CODE
memascend --version
memascend doctor --store "$PWD" --no-measure
python -c 'import sys; sys.path.insert(0, sys.argv[1]); import train_loop, pathlib
train_loop.tiny_model(pathlib.Path("model"))' "$folder/examples"
memascend finetune model --data "$folder/examples" --store store --host-memory 256MiB --seq-len 64 --steps 10 --out tuned
ls tuned
for example in train_loop.py encoder_own_loss.py resume_after_kill.py; do
    echo "== $example"
    python "$folder/examples/$example"
done
echo "== command_line.sh"
sh "$folder/examples/command_line.sh"
echo "== all of it ran"
