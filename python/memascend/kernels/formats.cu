// Definitions shared by the CUDA sources: widths of numbers, and the formats of a gradient's elements. The sources are
// compiled as one (launcher.source), in this order: formats.cu, overflow.cu, projection.cu.
//
// There are no headers: NVRTC needs none, and the tests compile these very files for the host.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// A vector of global memory, read or written once. Of a pointer that was an integer the compiler does not know where it
// points, and makes loads that find out each time. These say so, and pass the first cache, where nothing is found again.
static __device__ __forceinline__ uint4 load_once(const uint4 *vector) {
#ifdef __CUDA_ARCH__
    return __ldcg(vector);
#else
    return *vector;
#endif
}
static __device__ __forceinline__ void store_once(uint4 *vector, uint4 value) {
#ifdef __CUDA_ARCH__
    __stcg(vector, value);
#else
    *vector = value;
#endif
}

// CuPy has NVRTC flush denormals to zero, by an option behind all that it is given. In PTX each instruction says for
// itself whether it does, and these do not. A rounded sum or product is never fused with another operation.
#ifdef __CUDACC__
static __device__ __forceinline__ float add(float a, float b) {
    float sum;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(sum) : "f"(a), "f"(b));
    return sum;
}
static __device__ __forceinline__ float multiply(float a, float b) {
    float product;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(product) : "f"(a), "f"(b));
    return product;
}
static __device__ __forceinline__ float multiply_add(float a, float b, float c) {
    float sum;
    asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(sum) : "f"(a), "f"(b), "f"(c));
    return sum;
}
static __device__ __forceinline__ double widen(float value) {
    double wide;
    asm("cvt.f64.f32 %0, %1;" : "=d"(wide) : "f"(value));
    return wide;
}
static __device__ __forceinline__ float narrow(double value) {
    float narrow;
    asm("cvt.rn.f32.f64 %0, %1;" : "=f"(narrow) : "d"(value));
    return narrow;
}
#else
static inline float add(float a, float b) { return a + b; }
static inline float multiply(float a, float b) { return a * b; }
static inline float multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }
static inline double widen(float value) { return value; }
static inline float narrow(double value) { return float(value); }
#endif

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
            value = add(__uint_as_float(magnitude + rebias + (1u << 23)), -__uint_as_float(rebias + (1u << 23)));
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
        if (magnitude < 0x38800000u) return (__float_as_uint(add(__uint_as_float(magnitude), 0.5f)) - 0x3F000000u) | sign;
        return ((magnitude - ((127u - 15u) << 23) + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13) | sign;
    }
};
