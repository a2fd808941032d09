// The projection of a matrix's gradient for APOLLO, with the bits of the CPU's kernels
// (crates/memascend-kernels/src/apollo): three launches.
//
// - projection_matrix makes the random matrix, (depth, rank), every element from its index alone;
// - projection_product multiplies: each of the (channels, rank) numbers is one chain of fused multiply-adds in the order of
//   the channel's elements, so no tensor cores and no split of the depth;
// - projection_sums adds each channel's squares in fp64.
//
// A channel is a row or a column of the gradient, whichever there are more of; `depth` is the number of its elements.
// Operations on fp64 whose results are not exact are written as intrinsics, which the compiler does not fuse.
//
// Predicted, not measured: the product takes 2 * rank operations an element. For 14336 x 4096 at rank 256 these are 30 G
// of fp32 multiply-adds, 1 to 2 ms of an H100's 67 TFLOPS at half of its peak; PCIe carries the same gradient (117 MB)
// away in 4.7 ms.

// Channels, and ranks, that a block of threads computes, and that a thread does.
constexpr u32 SIDE = 64, EACH = 4, ACROSS = SIDE / EACH;
// Elements of a channel in shared memory at once.
constexpr u32 DEEP = 16;
// Numbers from one such element to the next in shared memory. Where a channel is a row, a warp stores 32 / DEEP channels of
// DEEP elements each: in steps of 2 modulo the 32 banks, each of its stores has a bank of its own.
constexpr u32 STEP = SIDE + 32 / DEEP;
// Sums of one channel's squares where its elements follow one another in memory.
constexpr u32 SUMS = 8;

static_assert(ACROSS * ACROSS == THREADS, "every thread has a tile");

static __device__ u64 mix(u64 x) {
    x += 0x9E3779B97F4A7C15ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

static __device__ const double CENTRE_NUMERATOR[8] = {
    2.5090809287301226727e3,  3.3430575583588128105e4,  6.7265770927008700853e4,  4.5921953931549871457e4,
    1.3731693765509461125e4,  1.9715909503065514427e3,  1.3314166789178437745e2,  3.3871328727963666080e0,
};
static __device__ const double CENTRE_DENOMINATOR[8] = {
    5.2264952788528545610e3,  2.8729085735721942674e4,  3.9307895800092710610e4,  2.1213794301586595867e4,
    5.3941960214247511077e3,  6.8718700749205790830e2,  4.2313330701600911252e1,  1.0,
};
static __device__ const double TAIL_NUMERATOR[8] = {
    7.74545014278341407640e-4, 2.27238449892691845833e-2, 2.41780725177450611770e-1, 1.27045825245236838258e0,
    3.64784832476320460504e0,  5.76949722146069140550e0,  4.63033784615654529590e0,  1.42343711074968357734e0,
};
static __device__ const double TAIL_DENOMINATOR[8] = {
    1.05075007164441684324e-9, 5.47593808499534494600e-4, 1.51986665636164571966e-2, 1.48103976427480074590e-1,
    6.89767334985100004550e-1, 1.67638483018380384940e0,  2.05319162663775882187e0,  1.0,
};

// By Horner's rule, coefficients from the highest power down.
static __device__ double polynomial(const double *coefficients, double x) {
    double sum = 0;
#pragma unroll
    for (u32 i = 0; i < 8; ++i) sum = __dadd_rn(__dmul_rn(sum, x), coefficients[i]);
    return sum;
}

// The natural logarithm of a normal positive number.
static __device__ double natural_logarithm(double x) {
    const u64 bits = u64(__double_as_longlong(x));
    int exponent = int(bits >> 52) - 1023;
    double mantissa = __longlong_as_double((long long)((bits & ((1ull << 52) - 1)) | (1023ull << 52)));
    if (mantissa > 1.41421356237309504880) {
        mantissa *= 0.5;
        exponent += 1;
    }
    const double s = __ddiv_rn(__dadd_rn(mantissa, -1.0), __dadd_rn(mantissa, 1.0));
    const double square = __dmul_rn(s, s);
    double series = 0;
#pragma unroll
    for (int term = 11; term >= 0; --term)
        series = __dadd_rn(__dmul_rn(series, square), __ddiv_rn(1.0, double(2 * term + 1)));
    return __dadd_rn(__dmul_rn(__dmul_rn(2.0, s), series), __dmul_rn(double(exponent), 0.69314718055994530942));
}

// Normal with mean 0 and variance 1: the quantile function by algorithm AS241 of Wichura 1988.
static __device__ double normal(u64 bits) {
    const double p = (double(bits >> 32) + 0.5) / 4294967296.0; // exact
    const double q = p - 0.5;                                    // exact
    if ((q < 0 ? -q : q) <= 0.425) {
        const double r = __dadd_rn(0.180625, -__dmul_rn(q, q));
        return __ddiv_rn(__dmul_rn(q, polynomial(CENTRE_NUMERATOR, r)), polynomial(CENTRE_DENOMINATOR, r));
    }
    const double tail = q < 0 ? p : 1.0 - p;
    const double r = __dadd_rn(__dsqrt_rn(-natural_logarithm(tail)), -1.6);
    const double x = __ddiv_rn(polynomial(TAIL_NUMERATOR, r), polynomial(TAIL_DENOMINATOR, r));
    return q < 0 ? -x : x;
}

// `matrix`, (depth, rank): normal with variance 1 / rank.
extern "C" __global__ void __launch_bounds__(256) projection_matrix(u64 key, u64 depth, u64 rank, float *matrix) {
    const double deviation = __dsqrt_rn(double(rank));
    const u64 count = depth * rank, stride = u64(gridDim.x) * THREADS;
    for (u64 index = u64(blockIdx.x) * THREADS + threadIdx.x; index < count; index += stride)
        matrix[index] = narrow(__ddiv_rn(normal(mix(key ^ index)), deviation));
}

// A gradient, and its channels.
struct MatrixGradient {
    u64 address, rows, columns;

    __device__ bool by_column() const { return rows < columns; }
    __device__ u64 channels() const { return by_column() ? columns : rows; }
    __device__ u64 depth() const { return by_column() ? rows : columns; }
    template <class F> __device__ float value(u64 channel, u64 at) const {
        const u64 index = by_column() ? at * columns + channel : channel * columns + at;
        return F::value(reinterpret_cast<const typename F::Element *>(address)[index]);
    }
};

template <class F>
static __device__ void multiply_matrix(const MatrixGradient gradient, u64 rank, const float *matrix, float *projected,
                                       float (*values)[STEP], float (*numbers)[SIDE]) {
    const u64 channels = gradient.channels(), depth = gradient.depth(), across = (rank + SIDE - 1) / SIDE;
    const u64 channel = blockIdx.x / across * SIDE, first = blockIdx.x % across * SIDE;
    const u32 mine = threadIdx.x / ACROSS, lane = threadIdx.x % ACROSS;
    float sums[EACH][EACH] = {};
    for (u64 begin = 0; begin < depth; begin += DEEP) {
        const u32 deep = depth - begin < DEEP ? u32(depth - begin) : DEEP;
        // Neighbouring threads read neighbouring elements, whichever way the channels lie.
        for (u32 at = threadIdx.x; at < DEEP * SIDE; at += THREADS) {
            const u32 down = gradient.by_column() ? at / SIDE : at % DEEP;
            const u32 beside = gradient.by_column() ? at % SIDE : at / DEEP;
            if (down < deep && channel + beside < channels)
                values[down][beside] = gradient.value<F>(channel + beside, begin + down);
            if (at / SIDE < deep && first + at % SIDE < rank)
                numbers[at / SIDE][at % SIDE] = matrix[(begin + at / SIDE) * rank + first + at % SIDE];
        }
        __syncthreads();
        // Positions beyond the last element are not multiplied: even a product of 0 can change a sum, from -0 to 0.
        for (u32 down = 0; down < deep; ++down)
#pragma unroll
            for (u32 i = 0; i < EACH; ++i)
#pragma unroll
                for (u32 j = 0; j < EACH; ++j)
                    sums[i][j] =
                        multiply_add(values[down][mine + i * ACROSS], numbers[down][lane + j * ACROSS], sums[i][j]);
        __syncthreads();
    }
    for (u32 i = 0; i < EACH; ++i)
        for (u32 j = 0; j < EACH; ++j) {
            const u64 row = channel + mine + i * ACROSS, column = first + lane + j * ACROSS;
            if (row < channels && column < rank) projected[row * rank + column] = sums[i][j];
        }
}

// A block of threads for each SIDE channels and SIDE ranks; `projected` is (channels, rank).
extern "C" __global__ void __launch_bounds__(256)
    projection_product(u64 address, u64 dtype, u64 rows, u64 columns, u64 rank, const float *matrix, float *projected) {
    __shared__ float values[DEEP][STEP], numbers[DEEP][SIDE];
    const MatrixGradient gradient = {address, rows, columns};
    if (dtype == 0)
        multiply_matrix<F32>(gradient, rank, matrix, projected, values, numbers);
    else if (dtype == 1)
        multiply_matrix<F16>(gradient, rank, matrix, projected, values, numbers);
    else
        multiply_matrix<Bf16>(gradient, rank, matrix, projected, values, numbers);
}

template <class F> static __device__ double squares(const MatrixGradient gradient, u64 channel, u32 from, u32 stride) {
    double sum = 0;
    for (u64 at = from; at < gradient.depth(); at += stride) {
        const double value = widen(gradient.value<F>(channel, at));
        sum += value * value; // the product is exact: 24 bits squared fit in 53
    }
    return sum;
}

// THREADS channels for each block of threads where they lie side by side, else THREADS / SUMS. `sums` is (channels, 2):
// the lower and the upper half of each channel's fp64.
extern "C" __global__ void __launch_bounds__(256)
    projection_sums(u64 address, u64 dtype, u64 rows, u64 columns, u32 *sums) {
    __shared__ double parts[THREADS];
    const MatrixGradient gradient = {address, rows, columns};
    const u32 each = gradient.by_column() ? 1 : SUMS;
    const u64 channel = (u64(blockIdx.x) * THREADS + threadIdx.x) / each;
    const u32 part = threadIdx.x % each;
    double sum = 0;
    if (channel < gradient.channels()) {
        if (dtype == 0)
            sum = squares<F32>(gradient, channel, part, each);
        else if (dtype == 1)
            sum = squares<F16>(gradient, channel, part, each);
        else
            sum = squares<Bf16>(gradient, channel, part, each);
    }
    parts[threadIdx.x] = sum;
    __syncthreads();
    if (part != 0 || channel >= gradient.channels()) return;
    if (each > 1) {
        const double *s = parts + threadIdx.x;
        sum = ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
    }
    const u64 bits = u64(__double_as_longlong(sum));
    sums[2 * channel] = u32(bits);
    sums[2 * channel + 1] = u32(bits >> 32);
}
