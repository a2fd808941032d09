// The overflow check on a CUDA device: one launch for a list of tensors. At the end of the file, the measuring of one
// gradient for the host, in the host's order.
//
// Tensors are cut into chunks of CHUNK elements; a block of THREADS threads takes every gridDim.x-th of them. An element
// is infinite or NaN when all bits of its exponent are set. Squares are added in fp64: each thread of a block adds its
// own, the threads of a block are added as a binary tree into the chunk's slot, and the slots likewise by the second
// kernel. Which thread has which element depends on its number within the chunk alone, not on the grid or on how the
// tensor is aligned, so sums are the same to the bit from run to run.

constexpr u32 CHUNK = 65536;
constexpr u32 THREADS = 256;
// Partial sums of a gradient's block.
constexpr u32 LANES = 32;
// Vectors of 16 bytes that a thread has on their way at once.
constexpr u32 AHEAD = 8;
// Bits of 1.0f: the flag is a float, as torch's gradient scaler wants it, and is or-ed as an integer.
constexpr u32 FOUND = 0x3F800000u;

// A tensor: none is empty, and first_chunk grows from row to row.
struct Row {
    u64 address;
    u64 numel;
    u64 first_chunk;
    u64 dtype;
};

// The partial result of a thread in a chunk.
struct Partial {
    u32 bad;
    double sums[4];
};

template <class F, bool NORM, bool UNSCALE>
static __device__ __forceinline__ u32 take(u32 word, u32 number, float factor, Partial &partial) {
    constexpr u32 PER_WORD = 4 / sizeof(typename F::Element);
    partial.bad |= (word & F::EXPONENT) + F::STEP;
    u32 written = 0;
#pragma unroll
    for (u32 i = 0; i < PER_WORD; ++i) {
        u32 bits = PER_WORD == 1 ? word : (word >> (16 * i)) & 0xFFFFu;
        if (UNSCALE) {
            bits = F::round(multiply(F::value(bits), factor));
            written |= bits << (PER_WORD == 1 ? 0 : 16 * i);
        }
        if (NORM) {
            const double value = widen(F::value(bits));
            partial.sums[number] += value * value; // the product is exact: 24 bits squared fit in 53
        }
    }
    return written;
}

template <class F, bool NORM, bool UNSCALE>
static __device__ __forceinline__ uint4 take_vector(uint4 words, float factor, Partial &partial) {
    uint4 written;
    written.x = take<F, NORM, UNSCALE>(words.x, 0, factor, partial);
    written.y = take<F, NORM, UNSCALE>(words.y, 1, factor, partial);
    written.z = take<F, NORM, UNSCALE>(words.z, 2, factor, partial);
    written.w = take<F, NORM, UNSCALE>(words.w, 3, factor, partial);
    return written;
}

// One vector, element by element, or the first `count` elements of one: zeros in the other places change nothing.
template <class F, bool NORM, bool UNSCALE>
static __device__ void take_elements(typename F::Element *elements, u32 count, float factor, Partial &partial) {
    constexpr u32 PER_WORD = 4 / sizeof(typename F::Element);
    for (u32 word = 0; word < 4; ++word) {
        u32 bits = 0;
        for (u32 i = 0; i < PER_WORD; ++i)
            if (word * PER_WORD + i < count) bits |= u32(elements[word * PER_WORD + i]) << (16 * i);
        const u32 written = take<F, NORM, UNSCALE>(bits, word, factor, partial);
        if (UNSCALE)
            for (u32 i = 0; i < PER_WORD; ++i)
                if (word * PER_WORD + i < count)
                    elements[word * PER_WORD + i] = typename F::Element(written >> (16 * i));
    }
}

template <class F, bool NORM, bool UNSCALE>
static __device__ void take_chunk(u64 address, u64 start, u64 numel, float factor, Partial &partial) {
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
            for (u32 i = 0; i < AHEAD; ++i) read[i] = load_once(words + at + i * THREADS);
#pragma unroll
            for (u32 i = 0; i < AHEAD; ++i) {
                const uint4 written = take_vector<F, NORM, UNSCALE>(read[i], factor, partial);
                if (UNSCALE) store_once(words + at + i * THREADS, written);
            }
        }
        for (; at < vectors; at += THREADS) {
            const uint4 written = take_vector<F, NORM, UNSCALE>(load_once(words + at), factor, partial);
            if (UNSCALE) store_once(words + at, written);
        }
    } else {
        for (; at < vectors; at += THREADS)
            take_elements<F, NORM, UNSCALE>(elements + at * PER_VECTOR, PER_VECTOR, factor, partial);
    }
    // The last elements are fewer than a vector: the next thread's.
    if (at == vectors && length % PER_VECTOR != 0)
        take_elements<F, NORM, UNSCALE>(elements + vectors * PER_VECTOR, length % PER_VECTOR, factor, partial);
}

// The sum over a block's COUNT threads, as a binary tree; the first thread's return value is it.
template <u32 COUNT>
static __device__ double add_threads(double mine, double *sums) {
    sums[threadIdx.x] = mine;
    for (u32 width = COUNT / 2; width > 0; width /= 2) {
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
            // Unscaling goes on to the end, even after an overflow.
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
        Partial partial = {0, {0, 0, 0, 0}};
        u32 sign;
        if (dtype == 0) {
            take_chunk<F32, NORM, UNSCALE>(address, start, numel, factor, partial);
            sign = F32::SIGN;
        } else if (dtype == 1) {
            take_chunk<F16, NORM, UNSCALE>(address, start, numel, factor, partial);
            sign = F16::SIGN;
        } else {
            take_chunk<Bf16, NORM, UNSCALE>(address, start, numel, factor, partial);
            sign = Bf16::SIGN;
        }
        if (partial.bad & sign) bad = 1;
        if (NORM) {
            const double sum =
                add_threads<THREADS>((partial.sums[0] + partial.sums[1]) + (partial.sums[2] + partial.sums[3]), sums);
            if (threadIdx.x == 0) slots[chunk] = sum;
        } else {
            __syncthreads();
        }
        // add_threads synchronises, so every thread has set its flag by now.
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

// Adds the slots, in one block. NaN when an element is not finite: some slots may then be unwritten.
extern "C" __global__ void __launch_bounds__(256)
    overflow_total(const double *slots, u64 count, const u32 *flag, double *total) {
    __shared__ double sums[THREADS];
    double mine = 0;
    for (u64 slot = threadIdx.x; slot < count; slot += THREADS) mine += slots[slot];
    const double sum = add_threads<THREADS>(mine, sums);
    if (threadIdx.x == 0) *total = *flag ? __longlong_as_double(0x7FF8000000000000ll) : sum;
}

// The sums of squares of one gradient's blocks of CHUNK elements, with the bits of the CPU's kernels
// (crates/memascend-kernels/src/gradient.rs): element i of a block is added to lane i % LANES, the lanes are added
// as a binary tree. Whether the product and the sum are fused makes no difference: the product is exact.
//
// One warp has a block, one thread a lane. Elements come 16 bytes to a thread, not as they lie in lanes, and pass through
// shared memory to the thread that adds them; AHEAD vectors of each thread, 4 KiB of a warp, are on their way while
// those before them are added.
//
// Predicted, not measured: a lane is a chain of 2,048 dependent additions, of some 20 cycles with the conversion's share:
// 25 us and, in 16-bit formats, 5 GB/s for a block, however few there are. An H100 (132 processors, 3.3 TB/s) reads at
// memory speed from some 600 blocks (40 M elements) on. Devices that convert and add two fp64 a cycle and processor take
// one element: an RTX 4090 (128 processors, 2.5 GHz) 320 G elements/s, 640 GB/s in 16-bit formats. Both are far above
// what PCIe carries the same gradient away with.
template <class F> static __device__ double sum_lane(u64 address, u32 length, uint4 *tile) {
    typedef typename F::Element Element;
    constexpr u32 PER_TILE = AHEAD * LANES * 16 / sizeof(Element);
    const Element *elements = reinterpret_cast<const Element *>(address);
    const Element *lane = reinterpret_cast<const Element *>(tile) + threadIdx.x;
    double sum = 0;
    u32 at = 0;
    if (address % 16 == 0 && length >= PER_TILE) {
        const uint4 *words = reinterpret_cast<const uint4 *>(address) + threadIdx.x;
        uint4 read[AHEAD];
#pragma unroll
        for (u32 i = 0; i < AHEAD; ++i) read[i] = load_once(words + i * LANES);
        for (bool more = true; more;) {
#pragma unroll
            for (u32 i = 0; i < AHEAD; ++i) tile[i * LANES + threadIdx.x] = read[i];
            __syncthreads();
            at += PER_TILE;
            words += AHEAD * LANES;
            more = length - at >= PER_TILE;
            if (more) {
#pragma unroll
                for (u32 i = 0; i < AHEAD; ++i) read[i] = load_once(words + i * LANES);
            }
#pragma unroll 16
            for (u32 i = 0; i < PER_TILE; i += LANES) {
                const double value = widen(F::value(lane[i]));
                sum += value * value;
            }
            __syncthreads();
        }
    }
    // The remainder that fills no tile, or is not aligned. Zeros, with which the CPU fills the last lanes, change
    // nothing.
#pragma unroll 16
    for (at += threadIdx.x; at < length; at += LANES) {
        const double value = widen(F::value(elements[at]));
        sum += value * value;
    }
    return sum;
}

// One block of one warp for each of `sums`, which are as many as the tensor has blocks. `flag` becomes 1 when an element
// is infinite or NaN, and is left alone otherwise.
extern "C" __global__ void __launch_bounds__(32)
    overflow_block_sums(u64 address, u64 numel, u64 dtype, double *sums, u32 *flag) {
    __shared__ uint4 tile[AHEAD * LANES];
    __shared__ double lanes[LANES];
    const u64 start = u64(blockIdx.x) * CHUNK;
    const u32 length = numel - start < CHUNK ? u32(numel - start) : CHUNK;
    double lane;
    if (dtype == 0)
        lane = sum_lane<F32>(address + start * 4, length, tile);
    else if (dtype == 1)
        lane = sum_lane<F16>(address + start * 2, length, tile);
    else
        lane = sum_lane<Bf16>(address + start * 2, length, tile);
    const double sum = add_threads<LANES>(lane, lanes);
    if (threadIdx.x == 0) {
        // The squares of finite elements, of fp32 too, are far from the end of fp64. There is one NaN, as on the CPU.
        const bool finite = sum <= 1.7976931348623157e308;
        sums[blockIdx.x] = sum == sum ? sum : __longlong_as_double(0x7FF8000000000000ll);
        if (!finite) atomicOr(flag, 1u);
    }
}
