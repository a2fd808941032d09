//! Arithmetic on slices: no I/O and no store. Only [`step_host`] and [`check_overflow`] divide
//! their work among threads.
//!
//! Every kernel is written once, as a plain body that LLVM vectorises, and compiled once per
//! instruction set ([`Isa`]). The bodies fuse only by `mul_add`, which rounds once everywhere, give
//! every reduction a fixed order and write one canonical NaN, so all instruction sets return the
//! same bits and a run may move between machines.
//!
//! - [`split()`], [`join`]: fp32 master weight to and from its bf16 weight and the low half;
//! - [`step`]: one fused step of any [`Rule`]: algorithm, format of the moments, kind of weight;
//! - [`Projector`], [`channel_factors`], [`step_channels`]: APOLLO's projection of a gradient, the
//!   factors of a matrix's channels, and the step with them;
//! - [`copy_bf16`], [`add_bf16`], [`stats_bf16`] and their `_f16` and `_f32` twins: capture a
//!   gradient, with its sum of squares and its overflow check, in one pass; [`round_gradient`] and
//!   [`round_gradient_sum`] do so with an fp32 gradient that is kept in bf16;
//! - [`dequantise_e4m3`], [`dequantise_int8`], [`dequantise_bytes`], [`dequantise_four_bits`],
//!   [`dequantise_two_bits`], [`dequantise_whole`], [`dequantise_fp16`]: quantised weights to bf16;
//!   [`unpack_awq`] and [`unpack_gptq`] find the numbers in words, [`transpose`] is for matrices that
//!   are stored so, and [`past_caches`] for writing them;
//! - [`check_f32`], [`unscale_f32`] and their twins: the overflow check of any tensor, alone or
//!   with unscaling;
//! - [`check_overflow`]: the same over a list of tensors; [`step_host`]: a step of a tensor in host
//!   memory.

mod adamw;
mod apollo;
mod bf16;
mod dequantise;
mod dispatch;
mod dtype;
mod format;
mod fp16;
mod gradient;
mod overflow;
mod overflow_check;
mod past_caches;
mod rules;
mod split;
mod step_host;
mod threads;
mod transpose;

pub use apollo::{
    ChannelSquares, FactorOptions, Numbers, Projected, Projection, Projector, Purpose, Scratch,
    channel_factors, factors_of, squares_of,
};
pub use bf16::{round_bf16, widen_bf16, widen_bf16_slice, widen_bf16_slice_with};
pub use dequantise::{
    Blocks, E2M1, First, dequantise_bytes, dequantise_bytes_with, dequantise_e4m3, dequantise_e4m3_with,
    dequantise_four_bits, dequantise_four_bits_with, dequantise_fp16, dequantise_fp16_with, dequantise_int8,
    dequantise_int8_with, dequantise_two_bits, dequantise_two_bits_with, dequantise_whole,
    dequantise_whole_with, power_of_two, unpack_awq, unpack_awq_with, unpack_gptq, unpack_gptq_with,
    widen_e4m3,
};
pub use dispatch::Isa;
pub use dtype::Dtype;
pub use fp16::{round_f16, widen_f16};
pub use gradient::{
    GRADIENT_BLOCK, GradientStats, add_bf16, add_bf16_with, add_f16, add_f16_with, add_f32, add_f32_with,
    copy_bf16, copy_bf16_with, copy_f16, copy_f16_with, copy_f32, copy_f32_with, round_gradient,
    round_gradient_sum, round_gradient_sum_with, round_gradient_with, stats_bf16, stats_bf16_with, stats_f32,
    stats_f32_with,
};
pub use overflow::{
    check_bf16, check_bf16_with, check_f16, check_f16_with, check_f32, check_f32_with, stats_f16,
    stats_f16_with, sum_bf16, sum_bf16_with, unscale_bf16, unscale_bf16_with, unscale_f16, unscale_f16_with,
    unscale_f32, unscale_f32_with,
};
pub use overflow_check::{CheckedOutcome, CheckedTensor, CheckedWork, check_overflow};
pub use past_caches::{PastCaches, past_caches};
pub use rules::{
    Algorithm, ChannelFactors, Moments, Plane, PlaneFormat, Rule, StepScalars, Weight, step, step_channels,
    step_channels_with, step_with,
};
pub use split::{join, join_bits, join_slice, join_slice_with, split, split_slice, split_slice_with};
pub use step_host::{HostTensor, step_host, step_host_channels};
pub use transpose::{transpose, transpose_with};

#[cfg(test)]
mod testing;
