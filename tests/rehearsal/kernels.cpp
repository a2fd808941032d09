// The CUDA kernels compiled for the host, launched by name as CuPy launches them: with a grid, and arguments of 64 bits.

#include "../kernels/cuda_on_host.cpp"

#include <string_view>
#include <utility>

template <typename Parameter>
static Parameter given(u64 word) {
    if constexpr (std::is_pointer_v<Parameter>)
        return reinterpret_cast<Parameter>(word);
    else
        return Parameter(word);
}

template <typename... Parameters, std::size_t... Number>
static void call(void (*kernel)(Parameters...), const u64 *words, std::index_sequence<Number...>) {
    kernel(given<Parameters>(words[Number])...);
}

// One thread of a kernel, whose arguments are `words`.
template <auto kernel>
static void run(void *words) {
    [words]<typename... Parameters>(void (*function)(Parameters...)) {
        call(function, static_cast<const u64 *>(words), std::index_sequence_for<Parameters...>());
    }(kernel);
}

static const std::pair<std::string_view, void (*)(void *)> KERNELS[] = {
    {"overflow_find", run<overflow_find>},
    {"overflow_sum", run<overflow_sum>},
    {"overflow_unscale", run<overflow_unscale>},
    {"overflow_unscale_sum", run<overflow_unscale_sum>},
    {"overflow_total", run<overflow_total>},
    {"overflow_block_sums", run<overflow_block_sums>},
    {"projection_matrix", run<projection_matrix>},
    {"projection_product", run<projection_product>},
    {"projection_sums", run<projection_sums>},
};

// One launch at a time in a process. Returns 0, or 1 for a name that there is not.
extern "C" int launch(const char *name, unsigned grid, unsigned threads, u64 *words) {
    for (const auto &[known, kernel] : KERNELS)
        if (known == name) {
            body = kernel;
            argument = words;
            gridDim.x = grid;
            for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) run_block(threads);
            return 0;
        }
    return 1;
}
