//! Capture of a gradient: copy or accumulate it and measure the result, in one pass.
//!
//! The sum of squares has one order. Element `i` of a block of [`GRADIENT_BLOCK`] goes to fp64 lane
//! `i % LANES`; the lanes are added as a binary tree; the blocks are added one after another. So
//! the result depends neither on the instruction set nor on how a gradient is cut into chunks, as
//! long as every chunk but the last is a multiple of [`GRADIENT_BLOCK`].

use super::bf16::canonical_nan;
use super::dispatch::{half_kernel, kernel};
#[cfg(target_arch = "x86_64")]
use super::format::F16c;
use super::format::{Bf16, F16, F32, Format};

/// Elements per partial sum: chunks of a gradient must be multiples of this, except the last.
pub const GRADIENT_BLOCK: usize = 65536;

/// fp64 lanes of a partial sum: four AVX-512 registers, enough to hide the latency of an addition.
pub(super) const LANES: usize = 32;

/// Statistics of a pass over gradients, accumulated over calls in the order of the calls.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct GradientStats {
    /// Sum of the squares of the elements: infinite or NaN once an element is.
    pub sum_squares: f64,
    /// Whether an element was infinite or NaN.
    pub non_finite: bool,
}

impl GradientStats {
    /// Adds the sum of squares of the next block of [`GRADIENT_BLOCK`] elements.
    #[inline(always)]
    pub fn add_block(&mut self, sum: f64) {
        let sum = self.sum_squares + sum;
        // One NaN for all instruction sets, as in `canonical_nan`.
        self.sum_squares = if sum.is_nan() { f64::NAN } else { sum };
    }
}

kernel! {
    /// Copies a bf16 gradient.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn copy_bf16 / copy_bf16_with(dst: &mut [u16], src: &[u16], stats: &mut GradientStats)
        = write_body::<Bf16, false>;
}

kernel! {
    /// Adds a bf16 gradient to `dst`: added in fp32, rounded to the nearest, ties to even, as
    /// PyTorch accumulates. The statistics are of the rounded sum.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn add_bf16 / add_bf16_with(dst: &mut [u16], src: &[u16], stats: &mut GradientStats)
        = write_body::<Bf16, true>;
}

kernel! {
    /// Measures a bf16 gradient without moving it.
    pub fn stats_bf16 / stats_bf16_with(src: &[u16], stats: &mut GradientStats)
        = stats_body::<Bf16>;
}

half_kernel! {
    /// Copies an fp16 gradient.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn copy_f16 / copy_f16_with(dst: &mut [u16], src: &[u16], stats: &mut GradientStats)
        = write_body::<F16c, false>, write_body::<F16c, false>, write_body::<F16, false>;
}

half_kernel! {
    /// Adds an fp16 gradient to `dst`, as [`add_bf16`] does. A NaN sum is written as `0x7E00`.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn add_f16 / add_f16_with(dst: &mut [u16], src: &[u16], stats: &mut GradientStats)
        = write_body::<F16c, true>, write_body::<F16c, true>, write_body::<F16, true>;
}

kernel! {
    /// Copies an fp32 gradient.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn copy_f32 / copy_f32_with(dst: &mut [f32], src: &[f32], stats: &mut GradientStats)
        = write_body::<F32, false>;
}

kernel! {
    /// Adds an fp32 gradient to `dst`. A NaN sum is written as `0x7FC00000`.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn add_f32 / add_f32_with(dst: &mut [f32], src: &[f32], stats: &mut GradientStats)
        = write_body::<F32, true>;
}

kernel! {
    /// Measures an fp32 gradient without moving it.
    pub fn stats_f32 / stats_f32_with(src: &[f32], stats: &mut GradientStats)
        = stats_body::<F32>;
}

kernel! {
    /// Rounds an fp32 gradient to bf16: to the nearest, ties to even; a NaN becomes `0x7FC0`. The statistics
    /// are of the rounded values.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn round_gradient / round_gradient_with(dst: &mut [u16], src: &[f32], stats: &mut GradientStats)
        = round_body::<false>;
}

kernel! {
    /// Adds an fp32 gradient to a bf16 `dst`: added in fp32, rounded once, as [`round_gradient`]
    /// rounds.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn round_gradient_sum / round_gradient_sum_with(
        dst: &mut [u16],
        src: &[f32],
        stats: &mut GradientStats,
    ) = round_body::<true>;
}

/// The partial sums of one block and its largest magnitude, per lane.
pub(super) struct Lanes<M> {
    pub(super) sums: [f64; LANES],
    pub(super) peaks: [M; LANES],
}

impl<M: Copy + Default + Ord> Lanes<M> {
    #[inline(always)]
    pub(super) fn new() -> Self {
        Lanes { sums: [0.0; LANES], peaks: [M::default(); LANES] }
    }

    #[inline(always)]
    fn take<F: Format<Magnitude = M>>(&mut self, elements: &[F::Element; LANES]) {
        let mut values = [0.0; LANES];
        F::widen_all(elements, &mut values);
        for (sum, value) in self.sums.iter_mut().zip(values) {
            let value = f64::from(value);
            *sum += value * value; // the product is exact: 24 bits squared fit in 53
        }
        for (peak, &element) in self.peaks.iter_mut().zip(elements) {
            *peak = F::magnitude(element).max(*peak);
        }
    }

    /// The block's last elements, fewer than [`LANES`]: zeros in the other lanes change nothing.
    #[inline(always)]
    pub(super) fn take_rest<F: Format<Magnitude = M>>(&mut self, rest: &[F::Element]) {
        let mut padded = [F::Element::default(); LANES];
        padded[..rest.len()].copy_from_slice(rest);
        self.take::<F>(&padded);
    }

    /// Out of line on purpose: inlined, its tree of additions has LLVM cut the accumulators of the
    /// hot loop into odd pieces, at as little as half the speed.
    #[inline(never)]
    pub(super) fn finish<F: Format<Magnitude = M>>(&mut self, stats: &mut GradientStats) {
        let mut width = LANES / 2;
        while width > 0 {
            for i in 0..width {
                self.sums[i] += self.sums[i + width];
            }
            width /= 2;
        }
        stats.add_block(self.sums[0]);
        stats.non_finite |= self.peaks.iter().any(|&peak| peak >= F::INFINITY);
    }
}

#[inline(always)]
fn write_body<F: Format, const ADD: bool>(
    dst: &mut [F::Element],
    src: &[F::Element],
    stats: &mut GradientStats,
) {
    assert_eq!(dst.len(), src.len(), "gradient lengths");
    let blocks = dst.chunks_mut(GRADIENT_BLOCK).zip(src.chunks(GRADIENT_BLOCK));
    for (dst, src) in blocks {
        let mut lanes = Lanes::new();
        let (dst_groups, dst_rest) = dst.as_chunks_mut::<LANES>();
        let (src_groups, src_rest) = src.as_chunks::<LANES>();
        for (dst, src) in dst_groups.iter_mut().zip(src_groups) {
            let mut result = *src;
            if ADD {
                add::<F, LANES>(dst, src, &mut result);
            }
            *dst = result;
            lanes.take::<F>(&result);
        }
        if !dst_rest.is_empty() {
            for (dst, &src) in dst_rest.iter_mut().zip(src_rest) {
                *dst = if ADD { F::round(F::widen(*dst) + F::widen(src)) } else { src };
            }
            lanes.take_rest::<F>(dst_rest);
        }
        lanes.finish::<F>(stats);
    }
}

#[inline(always)]
fn round_body<const ADD: bool>(dst: &mut [u16], src: &[f32], stats: &mut GradientStats) {
    assert_eq!(dst.len(), src.len(), "gradient lengths");
    let blocks = dst.chunks_mut(GRADIENT_BLOCK).zip(src.chunks(GRADIENT_BLOCK));
    for (dst, src) in blocks {
        let mut lanes = Lanes::new();
        let (dst_groups, dst_rest) = dst.as_chunks_mut::<LANES>();
        let (src_groups, src_rest) = src.as_chunks::<LANES>();
        for (dst, src) in dst_groups.iter_mut().zip(src_groups) {
            let mut values = *src;
            if ADD {
                let mut old = [0.0; LANES];
                Bf16::widen_all(dst, &mut old);
                values.iter_mut().zip(old).for_each(|(value, old)| *value += old);
            }
            let mut result = [0; LANES];
            Bf16::round_all(&values, &mut result);
            *dst = result;
            lanes.take::<Bf16>(&result);
        }
        if !dst_rest.is_empty() {
            for (dst, &src) in dst_rest.iter_mut().zip(src_rest) {
                *dst = Bf16::round(if ADD { Bf16::widen(*dst) + src } else { src });
            }
            lanes.take_rest::<Bf16>(dst_rest);
        }
        lanes.finish::<Bf16>(stats);
    }
}

/// Sums in fp32, rounded.
#[inline(always)]
fn add<F: Format, const N: usize>(a: &[F::Element; N], b: &[F::Element; N], sums: &mut [F::Element; N]) {
    let (mut values, mut others) = ([0.0; N], [0.0; N]);
    F::widen_all(a, &mut values);
    F::widen_all(b, &mut others);
    for (value, other) in values.iter_mut().zip(others) {
        *value = canonical_nan(*value + other);
    }
    F::round_all(&values, sums);
}

#[inline(always)]
pub(super) fn stats_body<F: Format>(src: &[F::Element], stats: &mut GradientStats) {
    for src in src.chunks(GRADIENT_BLOCK) {
        let mut lanes = Lanes::new();
        let (groups, rest) = src.as_chunks::<LANES>();
        for group in groups {
            lanes.take::<F>(group);
        }
        if !rest.is_empty() {
            lanes.take_rest::<F>(rest);
        }
        lanes.finish::<F>(stats);
    }
}

#[cfg(test)]
mod tests;
