//! Benchmarks of the allocators, the pool and the kernels, on criterion: `cargo bench -p memascend-bench`.
