// The overflow check on a CUDA device: one launch for a list of tensors.
//
// Tensors are cut into chunks of CHUNK elements; a block of THREADS threads takes every gridDim.x-th of them. An element
// is infinite or NaN when all bits of its exponent are set. Squares are added in fp64: each thread of a block adds its
// own, the threads of a block are added as a binary tree into the chunk's slot, and the slots likewise by the second
// kernel. Which thread has which element depends on its number within the chunk alone, not on the grid or on how the
// tensor is aligned, so sums are the same to the bit from run to run.
//
// There are no headers: NVRTC needs none, and the tests compile this very file for the host.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr u32 CHUNK = 65536;
constexpr u32 THREADS = 256;
// Vectors of 16 bytes that a thread has on their way at once.
constexpr u32 AHEAD = 8;
// Bits of 1.0f: the flag is a float, as torch's gradient scaler wants it, and integers are what can be or-ed.
constexpr u32 FOUND = 0x3F800000u;

// A tensor: none is empty, and first_chunk grows from row to row.
struct Row {
    u64 address;
    u64 numel;
    u64 first_chunk;
    u64 dtype;
};

// Formats: elements lie in words of 32 bits, one or two in each. With all of its exponent set, and only then, an
// element's sign bit is set in (word & EXPONENT) + STEP.

struct F32 {
    typedef u32 Element;
    static constexpr u32 EXPONENT = 0x7F800000u, STEP = 0x00800000u, SIGN = 0x80000000u;

    static __device__ float value(u32 bits) { return __uint_as_float(bits); }
    static __device__ u32 round(float value) {
        const u32 bits = __float_as_uint(value);
        return (bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC00000u : bits;
    }
};

struct Bf16 {
    typedef u16 Element;
    static constexpr u32 EXPONENT = 0x7F807F80u, STEP = 0x00800080u, SIGN = 0x80008000u;

    static __device__ float value(u32 bits) { return __uint_as_float(bits << 16); }
    // To the nearest, ties to even.
    static __device__ u32 round(float value) {
        const u32 bits = F32::round(value);
        return (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    }
};

struct F16 {
    typedef u16 Element;
    static constexpr u32 EXPONENT = 0x7C007C00u, STEP = 0x04000400u, SIGN = 0x80008000u;

    static __device__ float value(u32 bits) {
        const u32 rebias = (127u - 15u) << 23;
        const u32 magnitude = (bits & 0x7FFFu) << 13;
        const u32 exponent = magnitude & 0x0F800000u;
        float value;
        if (exponent == 0)
            value = __uint_as_float(magnitude + rebias + (1u << 23)) - __uint_as_float(rebias + (1u << 23));
        else
            value = __uint_as_float(magnitude + (exponent == 0x0F800000u ? 2 * rebias : rebias));
        return __uint_as_float(__float_as_uint(value) | (bits & 0x8000u) << 16);
    }
    // To the nearest, ties to even.
    static __device__ u32 round(float value) {
        const u32 bits = __float_as_uint(value), magnitude = bits & 0x7FFFFFFFu, sign = (bits >> 16) & 0x8000u;
        if (magnitude > 0x7F800000u) return 0x7E00u;
        if (magnitude >= 0x477FF000u) return 0x7C00u | sign;
        // In 0.5 .. 1 the last place of an fp32 is the smallest fp16 denormal.
        if (magnitude < 0x38800000u) return (__float_as_uint(__uint_as_float(magnitude) + 0.5f) - 0x3F000000u) | sign;
        return ((magnitude - ((127u - 15u) << 23) + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13) | sign;
    }
};

// What a thread has found in a chunk.
struct Found {
    u32 bad;
    double sums[4];
};

template <class F, bool NORM, bool UNSCALE>
static __device__ __forceinline__ u32 take(u32 word, u32 number, float factor, Found &found) {
    constexpr u32 PER_WORD = 4 / sizeof(typename F::Element);
    found.bad |= (word & F::EXPONENT) + F::STEP;
    u32 written = 0;
#pragma unroll
    for (u32 i = 0; i < PER_WORD; ++i) {
        u32 bits = PER_WORD == 1 ? word : (word >> (16 * i)) & 0xFFFFu;
        if (UNSCALE) {
            bits = F::round(F::value(bits) * factor);
            written |= bits << (PER_WORD == 1 ? 0 : 16 * i);
        }
        if (NORM) {
            const double value = F::value(bits);
            found.sums[number] += value * value; // the product is exact: 24 bits squared fit in 53
        }
    }
    return written;
}

template <class F, bool NORM, bool UNSCALE>
static __device__ __forceinline__ uint4 take_vector(uint4 words, float factor, Found &found) {
    uint4 written;
    written.x = take<F, NORM, UNSCALE>(words.x, 0, factor, found);
    written.y = take<F, NORM, UNSCALE>(words.y, 1, factor, found);
    written.z = take<F, NORM, UNSCALE>(words.z, 2, factor, found);
    written.w = take<F, NORM, UNSCALE>(words.w, 3, factor, found);
    return written;
}

// One vector, element by element, or the first `count` elements of one: zeros in the other places change nothing.
template <class F, bool NORM, bool UNSCALE>
static __device__ void take_elements(typename F::Element *elements, u32 count, float factor, Found &found) {
    constexpr u32 PER_WORD = 4 / sizeof(typename F::Element);
    for (u32 word = 0; word < 4; ++word) {
        u32 bits = 0;
        for (u32 i = 0; i < PER_WORD; ++i)
            if (word * PER_WORD + i < count) bits |= u32(elements[word * PER_WORD + i]) << (16 * i);
        const u32 written = take<F, NORM, UNSCALE>(bits, word, factor, found);
        if (UNSCALE)
            for (u32 i = 0; i < PER_WORD; ++i)
                if (word * PER_WORD + i < count)
                    elements[word * PER_WORD + i] = typename F::Element(written >> (16 * i));
    }
}

template <class F, bool NORM, bool UNSCALE>
static __device__ void take_chunk(u64 address, u64 start, u64 numel, float factor, Found &found) {
    typedef typename F::Element Element;
    constexpr u32 PER_VECTOR = 16 / sizeof(Element);
    Element *elements = reinterpret_cast<Element *>(address) + start;
    const u32 length = numel - start < CHUNK ? u32(numel - start) : CHUNK;
    const u32 vectors = length / PER_VECTOR;
    u32 at = threadIdx.x;
    if (address % 16 == 0) {
        uint4 *words = reinterpret_cast<uint4 *>(elements);
        for (; at + (AHEAD - 1) * THREADS < vectors; at += AHEAD * THREADS) {
            uint4 read[AHEAD];
#pragma unroll
            for (u32 i = 0; i < AHEAD; ++i) read[i] = words[at + i * THREADS];
#pragma unroll
            for (u32 i = 0; i < AHEAD; ++i) {
                const uint4 written = take_vector<F, NORM, UNSCALE>(read[i], factor, found);
                if (UNSCALE) words[at + i * THREADS] = written;
            }
        }
        for (; at < vectors; at += THREADS) {
            const uint4 written = take_vector<F, NORM, UNSCALE>(words[at], factor, found);
            if (UNSCALE) words[at] = written;
        }
    } else {
        for (; at < vectors; at += THREADS)
            take_elements<F, NORM, UNSCALE>(elements + at * PER_VECTOR, PER_VECTOR, factor, found);
    }
    // The last elements are fewer than a vector: the next thread's.
    if (at == vectors && length % PER_VECTOR != 0)
        take_elements<F, NORM, UNSCALE>(elements + vectors * PER_VECTOR, length % PER_VECTOR, factor, found);
}

// The sum over a block's threads, as a binary tree; the first thread's return value is it.
static __device__ double add_threads(double mine, double *sums) {
    sums[threadIdx.x] = mine;
    for (u32 width = THREADS / 2; width > 0; width /= 2) {
        __syncthreads();
        if (threadIdx.x < width) sums[threadIdx.x] += sums[threadIdx.x + width];
    }
    return sums[threadIdx.x];
}

template <bool NORM, bool UNSCALE>
static __device__ void check_chunks(const Row *rows, u64 row_count, u64 chunk_count, u32 *flag, double *slots,
                                    const float *unscale) {
    __shared__ double sums[THREADS];
    __shared__ u32 stop, bad;
    const float factor = UNSCALE ? *unscale : 1.0f;
    for (u64 chunk = blockIdx.x; chunk < chunk_count; chunk += gridDim.x) {
        if (threadIdx.x == 0) {
            // What is unscaled is unscaled to the end.
            stop = UNSCALE ? 0 : *reinterpret_cast<volatile u32 *>(flag);
            bad = 0;
        }
        __syncthreads();
        if (stop) return; // all threads of the block, or none
        u64 row = 0, end = row_count;
        while (end - row > 1) {
            const u64 middle = (row + end) / 2;
            if (rows[middle].first_chunk <= chunk)
                row = middle;
            else
                end = middle;
        }
        const u64 address = rows[row].address, numel = rows[row].numel, dtype = rows[row].dtype;
        const u64 start = (chunk - rows[row].first_chunk) * CHUNK;
        Found found = {0, {0, 0, 0, 0}};
        u32 sign;
        if (dtype == 0) {
            take_chunk<F32, NORM, UNSCALE>(address, start, numel, factor, found);
            sign = F32::SIGN;
        } else if (dtype == 1) {
            take_chunk<F16, NORM, UNSCALE>(address, start, numel, factor, found);
            sign = F16::SIGN;
        } else {
            take_chunk<Bf16, NORM, UNSCALE>(address, start, numel, factor, found);
            sign = Bf16::SIGN;
        }
        if (found.bad & sign) bad = 1;
        if (NORM) {
            const double sum =
                add_threads((found.sums[0] + found.sums[1]) + (found.sums[2] + found.sums[3]), sums);
            if (threadIdx.x == 0) slots[chunk] = sum;
        } else {
            __syncthreads();
        }
        // add_threads synchronises, so all have said by now what they found.
        if (threadIdx.x == 0 && bad) atomicOr(flag, FOUND);
    }
}

extern "C" __global__ void __launch_bounds__(256)
    overflow_find(const Row *rows, u64 row_count, u64 chunk_count, u32 *flag) {
    check_chunks<false, false>(rows, row_count, chunk_count, flag, nullptr, nullptr);
}

extern "C" __global__ void __launch_bounds__(256)
    overflow_sum(const Row *rows, u64 row_count, u64 chunk_count, u32 *flag, double *slots) {
    check_chunks<true, false>(rows, row_count, chunk_count, flag, slots, nullptr);
}

extern "C" __global__ void __launch_bounds__(256)
    overflow_unscale(const Row *rows, u64 row_count, u64 chunk_count, u32 *flag, const float *unscale) {
    check_chunks<false, true>(rows, row_count, chunk_count, flag, nullptr, unscale);
}

extern "C" __global__ void __launch_bounds__(256) overflow_unscale_sum(const Row *rows, u64 row_count, u64 chunk_count,
                                                                     u32 *flag, double *slots, const float *unscale) {
    check_chunks<true, true>(rows, row_count, chunk_count, flag, slots, unscale);
}

// Adds the slots, in one block. NaN when something was found: not all slots may have been written then.
extern "C" __global__ void __launch_bounds__(256)
    overflow_total(const double *slots, u64 count, const u32 *flag, double *total) {
    __shared__ double sums[THREADS];
    double mine = 0;
    for (u64 slot = threadIdx.x; slot < count; slot += THREADS) mine += slots[slot];
    const double sum = add_threads(mine, sums);
    if (threadIdx.x == 0) *total = *flag ? __longlong_as_double(0x7FF8000000000000ll) : sum;
}
