#!/bin/sh
# Runs the aarch64 wheel of dist/release under qemu, in a root of Debian's packages that it makes: as root, on Debian.
#
#   sh tests/arm64.sh FOLDER [PYTEST ARGUMENTS]    # `make qemu`; the root is FOLDER, which stays for the next run
#
# It needs debootstrap, qemu-user-static and binfmt_misc. A processor without SVE is chosen, so that PyTorch runs code
# that qemu emulates well; the kernels are compiled for NEON alone. There is no io_uring under qemu: threads move the bytes.
set -eu
root=$(realpath -m "${1:?usage: sh tests/arm64.sh FOLDER [PYTEST ARGUMENTS]}")
shift
cd "$(dirname "$0")/.."
wheel=$(echo dist/release/memascend-*_aarch64.whl)
[ -f "$wheel" ] || { echo "tests/arm64.sh: no wheel for aarch64 in dist/release: make wheels" >&2; exit 1; }
for program in debootstrap qemu-aarch64-static; do
    command -v $program >/dev/null || {
        echo "tests/arm64.sh: $program is missing: apt-get install debootstrap qemu-user-static binfmt-support" >&2
        exit 1
    }
done
[ -e /proc/sys/fs/binfmt_misc/qemu-aarch64 ] || {
    echo "tests/arm64.sh: the kernel does not start qemu for arm64: mount binfmt_misc, and update-binfmts --enable" >&2
    exit 1
}
site=$root/venv/lib/python3.13/site-packages
[ -x "$root/usr/bin/python3" ] || debootstrap --arch=arm64 --variant=minbase --include=python3-venv,ca-certificates trixie "$root"
[ -d "$site/torch" ] || {
    chroot "$root" python3 -m venv /venv
    # By this machine's Python, which takes seconds. It would look for CUDA's packages too, which have no wheel for arm64.
    pip() {
        python3 -m pip install --quiet --upgrade --only-binary=:all: --python-version 3.13 --target "$site" \
            --platform manylinux_2_28_aarch64 --platform manylinux_2_17_aarch64 --platform manylinux2014_aarch64 "$@"
    }
    pip --no-deps "$(sed -n 's/^dependencies = \["torch>=\([0-9.]*\)[,"].*/torch==\1.0/p' pyproject.toml)"
    pip numpy 'transformers>=5.20' 'safetensors>=0.8' 'pytest>=8' pytest-timeout pytest-xdist psutil hypothesis expecttest \
        jinja2 pyyaml tqdm filelock typing-extensions sympy networkx fsspec setuptools packaging
}
trap 'umount "$root/proc" "$root/sys" "$root/dev"' EXIT
for folder in proc sys dev; do mount --bind /$folder "$root/$folder"; done
rm -rf "$root/memascend"
mkdir "$root/memascend"
cp -r "$wheel" tests pyproject.toml "$root/memascend/"
inside() { QEMU_CPU=neoverse-n1 OMP_NUM_THREADS=1 chroot "$root" /usr/bin/env --chdir=/memascend/tests "$@"; }
inside /venv/bin/python -m pip install --quiet --force-reinstall --no-deps --no-index "/memascend/${wheel##*/}"
inside /venv/bin/python -P kernel_digests.py
[ $# -gt 0 ] || set -- kernels/test_instruction_set.py kernels/test_overflow.py
inside /venv/bin/python -P -m pytest -c ../pyproject.toml --rootdir .. --timeout 3600 "$@"
