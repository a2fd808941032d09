// Runs the CUDA source of all kernels on the CPU. The words and builtins of CUDA are defined here, the source itself is
// included as it ships (SOURCE names it). The threads of a block are contexts of one thread, which __syncthreads
// switches: so each of them runs to the barrier before any goes on, as on a device.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>
#include <vector>

struct Index {
    unsigned x;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
static Index threadIdx, blockIdx, gridDim;

#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(threads)

static unsigned shim_atomics;
static inline float __uint_as_float(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
static inline unsigned __float_as_uint(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}
static inline double __longlong_as_double(long long bits) {
    double value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
static inline long long __double_as_longlong(double value) {
    long long bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}
static inline double __dadd_rn(double a, double b) { return a + b; }
static inline double __dmul_rn(double a, double b) { return a * b; }
static inline double __ddiv_rn(double a, double b) { return a / b; }
static inline double __dsqrt_rn(double a) { return std::sqrt(a); }
static inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
static inline unsigned atomicOr(unsigned *address, unsigned value) {
    ++shim_atomics;
    const unsigned old = *address;
    *address |= value;
    return old;
}
static void __syncthreads();

#include SOURCE

static ucontext_t scheduler, contexts[THREADS];
static bool ended[THREADS];
static std::vector<char> stacks(THREADS * std::size_t(65536));
static void (*body)(void *);
static void *argument;

static void __syncthreads() {
    const unsigned me = threadIdx.x;
    swapcontext(&contexts[me], &scheduler);
    threadIdx.x = me;
}

static void enter() {
    body(argument);
    ended[threadIdx.x] = true;
}

// One block: all of its threads to the next barrier, again and again until they have ended, which they do together.
static void run_block(unsigned threads) {
    for (unsigned thread = 0; thread < threads; ++thread) {
        ended[thread] = false;
        getcontext(&contexts[thread]);
        contexts[thread].uc_stack.ss_sp = &stacks[thread * std::size_t(65536)];
        contexts[thread].uc_stack.ss_size = 65536;
        contexts[thread].uc_link = &scheduler;
        makecontext(&contexts[thread], enter, 0);
    }
    for (;;) {
        unsigned over = 0;
        for (unsigned thread = 0; thread < threads; ++thread) {
            threadIdx.x = thread;
            swapcontext(&scheduler, &contexts[thread]);
            over += ended[thread];
        }
        if (over == threads) return;
        if (over != 0) {
            std::fprintf(stderr, "%u threads ended while others wait at a barrier\n", over);
            std::abort();
        }
    }
}

struct Call {
    const Row *rows;
    u64 row_count, chunk_count;
    u32 *flag;
    double *slots, *total;
    const float *unscale;
};

// `total` null: no sums. `unscale` null: nothing is written. Returns how often blocks said that they found something.
extern "C" unsigned check(const Row *rows, u64 row_count, u64 chunk_count, unsigned grid, u32 *flag, double *slots,
                          double *total, const float *unscale) {
    Call call = {rows, row_count, chunk_count, flag, slots, total, unscale};
    argument = &call;
    shim_atomics = 0;
    body = [](void *pointer) {
        const Call &c = *static_cast<Call *>(pointer);
        if (c.unscale && c.total)
            overflow_unscale_sum(c.rows, c.row_count, c.chunk_count, c.flag, c.slots, c.unscale);
        else if (c.unscale)
            overflow_unscale(c.rows, c.row_count, c.chunk_count, c.flag, c.unscale);
        else if (c.total)
            overflow_sum(c.rows, c.row_count, c.chunk_count, c.flag, c.slots);
        else
            overflow_find(c.rows, c.row_count, c.chunk_count, c.flag);
    };
    gridDim.x = grid;
    for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) run_block(THREADS);
    if (total) {
        body = [](void *pointer) {
            const Call &c = *static_cast<Call *>(pointer);
            overflow_total(c.slots, c.chunk_count, c.flag, c.total);
        };
        gridDim.x = 1;
        blockIdx.x = 0;
        run_block(THREADS);
    }
    return shim_atomics;
}

struct Gradient {
    u64 address, numel, dtype;
    double *sums;
    u32 *flag;
};

extern "C" void block_sums(u64 address, u64 numel, u64 dtype, double *sums, u32 *flag) {
    Gradient gradient = {address, numel, dtype, sums, flag};
    argument = &gradient;
    body = [](void *pointer) {
        const Gradient &g = *static_cast<Gradient *>(pointer);
        overflow_block_sums(g.address, g.numel, g.dtype, g.sums, g.flag);
    };
    gridDim.x = unsigned((numel + CHUNK - 1) / CHUNK);
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) run_block(LANES);
}

struct Projected {
    u64 address, dtype, rows, columns, rank, key;
    float *matrix, *projected;
    u32 *sums;
};

// Launch `number` of a projection, on `grid` blocks of threads.
extern "C" void project(const Projected *given, unsigned number, unsigned grid) {
    Projected projected = *given;
    argument = &projected;
    if (number == 0)
        body = [](void *pointer) {
            const Projected &p = *static_cast<Projected *>(pointer);
            projection_matrix(p.key, p.rows < p.columns ? p.rows : p.columns, p.rank, p.matrix);
        };
    else if (number == 1)
        body = [](void *pointer) {
            const Projected &p = *static_cast<Projected *>(pointer);
            projection_product(p.address, p.dtype, p.rows, p.columns, p.rank, p.matrix, p.projected);
        };
    else
        body = [](void *pointer) {
            const Projected &p = *static_cast<Projected *>(pointer);
            projection_sums(p.address, p.dtype, p.rows, p.columns, p.sums);
        };
    gridDim.x = grid;
    for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) run_block(THREADS);
}

// Conversions, one by one: all of them can be tried. `dtype` as in a row.
extern "C" void convert(u64 dtype, const u32 *from, u32 *to, std::size_t count, int rounding) {
    for (std::size_t i = 0; i < count; ++i) {
        const float value = __uint_as_float(from[i]);
        if (rounding)
            to[i] = dtype == 0 ? F32::round(value) : dtype == 1 ? F16::round(value) : Bf16::round(value);
        else
            to[i] = __float_as_uint(dtype == 0 ? F32::value(from[i])
                                    : dtype == 1 ? F16::value(from[i])
                                                 : Bf16::value(from[i]));
    }
}
