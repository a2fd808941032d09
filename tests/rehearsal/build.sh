#!/usr/bin/env bash
# build.sh PYTHON OUT: builds the stand-in CUDA device for PYTHON's PyTorch, a CUDA build, into OUT. `OUT/run.sh COMMAND...`
# runs a command on it. Needs gcc, g++ and nm; CUDA's headers come with PyTorch. Without PyTorch for CUDA or without a
# compiler it says so and exits with 3. What was built from the same sources for the same PyTorch is not built again.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
project=$(cd "$here/../.." && pwd)
[ $# = 2 ] || { echo "usage: $0 PYTHON OUT" >&2; exit 2; }
python=$1
mkdir -p "$2"
out=$(cd "$2" && pwd)

lacking() { echo "no stand-in device: $*" >&2; exit 3; }
for tool in gcc g++ nm; do
    command -v "$tool" >/dev/null || lacking "$tool is not installed"
done
{ read -r torch; read -r version; read -r cuda; read -r headers; } < <("$python" - <<'P'
import importlib.util, pathlib, sys, sysconfig
spec = importlib.util.find_spec("torch")
if spec is None:
    sys.exit()
folder = pathlib.Path(spec.origin).parent
names = {}
exec((folder / "version.py").read_text(), names)  # importing PyTorch takes seconds
cuda = names.get("cuda") or ""
headers = next(folder.parent.glob("nvidia/*/include/driver_types.h"), None)
print(folder, names["__version__"], cuda, headers.parent if headers else "", sep="\n")
P
) || lacking "$python has no PyTorch"
[ -n "$cuda" ] || lacking "PyTorch $version of $python is not built for CUDA"
[ -n "$headers" ] || lacking "CUDA's headers (driver_types.h) are not installed beside PyTorch: pip install nvidia-cuda-runtime"

runtime=$project/crates/memascend-mem/tests/fake_cudart.c
kernels=$project/python/memascend/kernels
made_of() {
    echo "$torch $version $cuda"
    cat "$here"/*.{sh,c,cpp} "$here"/headers/crt/*.h "$runtime" "$kernels"/*.cu \
        "$project/tests/kernels/cuda_on_host.cpp"
}
mkdir -p "$out/python"
cp "$here"/installed/*.py "$out/python/"
stamp=$(made_of | sha256sum)
[ "$(cat "$out/stamp" 2>/dev/null)" != "$stamp" ] || exit 0
rm -f "$out/stamp"

# 13.2 is 13020.
number=$((${cuda%%.*} * 1000 + ${cuda#*.} * 10))
major=${cuda%%.*}

gcc -shared -fPIC -O1 -Wall -Wextra -Werror -pthread -DFAKE_TABLE=65536 -DFAKE_VERSION=$number -DFAKE_DRIVER=$number \
    -I"$(dirname "$runtime")" -I"$headers" -I"$here/headers" "$here/runtime.c" \
    -o "$out/libcudart-rehearsal.so" &
runtime_build=$!

# undefined LIBRARY PREFIX: the functions with that prefix that a library of PyTorch's takes from others.
undefined() { nm -D --undefined-only "$torch/lib/$1" | awk -v named="^$2[A-Z]" '$2 ~ named {sub(/@.*/, "", $2); print $2}' | sort -u; }

# libcaffe2_nvrtc.so, which PyTorch loads, refers to functions of the driver. They succeed and do nothing.
{
    for function in $(undefined libcaffe2_nvrtc.so cu); do
        case $function in
        cuDevicePrimaryCtxGetState) echo "int $function(int d, unsigned *f, int *a) { (void)d; *f = 0; *a = 1; return 0; }" ;;
        cuCtxGetCurrent) echo "int $function(void **c) { *c = (void *)1; return 0; }" ;;
        *) echo "int $function(void) { return 0; }" ;;
        esac
    done
} > "$out/driver.c"
gcc -shared -fPIC "$out/driver.c" -Wl,-soname,libcuda.so.1 -o "$out/libcuda.so.1"

# CUPTI, by which PyTorch's profiler would trace a device: none is there. CUDA 13.2's own looks for the driver without end.
{
    for function in $(undefined libtorch_cpu.so cupti); do
        case $function in
        cuptiGetVersion) echo "int $function(unsigned *v) { *v = $number; return 0; }" ;;
        cuptiGetResultString) echo "int $function(int r, const char **s) { (void)r; *s = \"a stand-in device has no CUPTI\"; return 0; }" ;;
        *) echo "int $function(void) { return 15; }" ;;  # CUPTI_ERROR_NOT_INITIALIZED
        esac
    done
} > "$out/cupti.c"
gcc -shared -fPIC "$out/cupti.c" -o "$out/libcupti-rehearsal.so"

# Warnings are of PyTorch's headers. The libraries are those that the process has loaded by then.
g++ -std=c++20 -O1 -w -shared -fPIC -isystem "$torch/include" -isystem "$torch/include/torch/csrc/api/include" \
    "$here/operators.cpp" -o "$out/librehearsal-operators.so" -L"$torch/lib" -lc10 -ltorch_cpu

# As tests/kernels/test_cuda_kernels.py compiles them.
(cd "$kernels" && cat formats.cu overflow.cu projection.cu) > "$out/memascend.cu"
g++ -std=c++20 -O1 -shared -fPIC -fno-strict-aliasing -ffp-contract=off -Wall -Wno-unknown-pragmas -Wno-dangling-pointer \
    -DSOURCE="\"$out/memascend.cu\"" "$here/kernels.cpp" -o "$out/librehearsal-kernels.so"
wait $runtime_build

cat > "$out/run.sh" <<R
#!/usr/bin/env bash
# run.sh COMMAND...: runs a command on the stand-in CUDA device, for PyTorch $version of CUDA $cuda.
export REHEARSAL=$out LD_PRELOAD=$out/libcudart-rehearsal.so:$out/libcupti-rehearsal.so\${LD_PRELOAD:+:\$LD_PRELOAD}
export MEMASCEND_CUDART=$out/libcudart-rehearsal.so LD_LIBRARY_PATH=$out\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}
export PYTHONPATH=$out/python\${PYTHONPATH:+:\$PYTHONPATH} OMP_NUM_THREADS=\${OMP_NUM_THREADS:-1}
exec "\$@"
R
chmod +x "$out/run.sh"
echo "$stamp" > "$out/stamp"
