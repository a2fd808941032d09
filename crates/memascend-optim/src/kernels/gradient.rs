//! Capture of a gradient: copy or accumulate it and measure the result, in one pass.
//!
//! The sum of squares has one order. Element `i` of a block of [`GRADIENT_BLOCK`] goes to fp64 lane
//! `i % LANES`; the lanes are added as a binary tree; the blocks are added one after another. So the
//! result depends neither on the instruction set nor on how a gradient is cut into chunks, as long as
//! every chunk but the last is a multiple of [`GRADIENT_BLOCK`].

use super::bf16::{canonical_nan, round_bf16, widen_bf16};
use super::dispatch::kernel;

/// Elements per partial sum: chunks of a gradient must be multiples of this, except the last.
pub const GRADIENT_BLOCK: usize = 65536;

/// fp64 lanes of a partial sum: four AVX-512 registers, enough to hide the latency of an addition.
pub(super) const LANES: usize = 32;

/// What a pass over gradients found, accumulated over calls in the order of the calls.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct GradientStats {
    /// Sum of the squares of the elements: infinite or NaN once an element is.
    pub sum_squares: f64,
    /// Whether an element was infinite or NaN.
    pub non_finite: bool,
}

kernel! {
    /// Copies a bf16 gradient.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn copy_bf16 / copy_bf16_with(dst: &mut [u16], src: &[u16], stats: &mut GradientStats)
        = write_body::<Bf16, false, _>;
}

kernel! {
    /// Adds a bf16 gradient to `dst`: added in fp32, rounded to the nearest, ties to even, as PyTorch
    /// accumulates. The statistics are those of the rounded sum.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn add_bf16 / add_bf16_with(dst: &mut [u16], src: &[u16], stats: &mut GradientStats)
        = write_body::<Bf16, true, _>;
}

kernel! {
    /// Measures a bf16 gradient without moving it.
    pub fn stats_bf16 / stats_bf16_with(src: &[u16], stats: &mut GradientStats)
        = stats_body::<Bf16, _>;
}

kernel! {
    /// Copies an fp32 gradient.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn copy_f32 / copy_f32_with(dst: &mut [f32], src: &[f32], stats: &mut GradientStats)
        = write_body::<F32, false, _>;
}

kernel! {
    /// Adds an fp32 gradient to `dst`. A NaN sum is written as `0x7FC00000`.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn add_f32 / add_f32_with(dst: &mut [f32], src: &[f32], stats: &mut GradientStats)
        = write_body::<F32, true, _>;
}

kernel! {
    /// Measures an fp32 gradient without moving it.
    pub fn stats_f32 / stats_f32_with(src: &[f32], stats: &mut GradientStats)
        = stats_body::<F32, _>;
}

/// How a gradient's elements are read.
pub(super) trait Format<T> {
    /// As wide as the element: signed, because SSE2 has the maximum of signed 16-bit lanes only.
    type Magnitude: Copy + Default + Ord;
    /// The magnitude of infinity; a larger one is a NaN.
    const INFINITY: Self::Magnitude;
    fn value(element: T) -> f32;
    fn magnitude(element: T) -> Self::Magnitude;
    fn add(a: T, b: T) -> T;
}

pub(super) struct Bf16;

impl Format<u16> for Bf16 {
    type Magnitude = i16;
    const INFINITY: i16 = 0x7F80;
    #[inline(always)]
    fn value(element: u16) -> f32 {
        widen_bf16(element)
    }
    #[inline(always)]
    fn magnitude(element: u16) -> i16 {
        (element & 0x7FFF) as i16
    }
    #[inline(always)]
    fn add(a: u16, b: u16) -> u16 {
        round_bf16(widen_bf16(a) + widen_bf16(b))
    }
}

pub(super) struct F32;

impl Format<f32> for F32 {
    type Magnitude = i32;
    const INFINITY: i32 = 0x7F80_0000;
    #[inline(always)]
    fn value(element: f32) -> f32 {
        element
    }
    #[inline(always)]
    fn magnitude(element: f32) -> i32 {
        (element.to_bits() & 0x7FFF_FFFF) as i32
    }
    #[inline(always)]
    fn add(a: f32, b: f32) -> f32 {
        canonical_nan(a + b)
    }
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
    fn take<T: Copy, F: Format<T, Magnitude = M>>(&mut self, elements: &[T; LANES]) {
        for (sum, &element) in self.sums.iter_mut().zip(elements) {
            let value = f64::from(F::value(element));
            *sum += value * value; // the product is exact: 24 bits squared fit in 53
        }
        for (peak, &element) in self.peaks.iter_mut().zip(elements) {
            *peak = F::magnitude(element).max(*peak);
        }
    }

    /// The block's last elements, fewer than [`LANES`]: zeros in the other lanes change nothing.
    #[inline(always)]
    pub(super) fn take_rest<T: Copy + Default, F: Format<T, Magnitude = M>>(&mut self, rest: &[T]) {
        let mut padded = [T::default(); LANES];
        padded[..rest.len()].copy_from_slice(rest);
        self.take::<T, F>(&padded);
    }

    /// Out of line on purpose: inlined, its tree of additions has LLVM cut the accumulators of the hot
    /// loop into odd pieces, at as little as half the speed.
    #[inline(never)]
    pub(super) fn finish<T: Copy, F: Format<T, Magnitude = M>>(&mut self, stats: &mut GradientStats) {
        let mut width = LANES / 2;
        while width > 0 {
            for i in 0..width {
                self.sums[i] += self.sums[i + width];
            }
            width /= 2;
        }
        let sum = stats.sum_squares + self.sums[0];
        // One NaN for all instruction sets, as in `canonical_nan`.
        stats.sum_squares = if sum.is_nan() { f64::NAN } else { sum };
        stats.non_finite |= self.peaks.iter().any(|&peak| peak >= F::INFINITY);
    }
}

#[inline(always)]
fn write_body<F: Format<T>, const ADD: bool, T: Copy + Default>(
    dst: &mut [T],
    src: &[T],
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
                for i in 0..LANES {
                    result[i] = F::add(dst[i], src[i]);
                }
            }
            *dst = result;
            lanes.take::<T, F>(&result);
        }
        if !dst_rest.is_empty() {
            for (dst, &src) in dst_rest.iter_mut().zip(src_rest) {
                *dst = if ADD { F::add(*dst, src) } else { src };
            }
            lanes.take_rest::<T, F>(dst_rest);
        }
        lanes.finish::<T, F>(stats);
    }
}

#[inline(always)]
pub(super) fn stats_body<F: Format<T>, T: Copy + Default>(src: &[T], stats: &mut GradientStats) {
    for src in src.chunks(GRADIENT_BLOCK) {
        let mut lanes = Lanes::new();
        let (groups, rest) = src.as_chunks::<LANES>();
        for group in groups {
            lanes.take::<T, F>(group);
        }
        if !rest.is_empty() {
            lanes.take_rest::<T, F>(rest);
        }
        lanes.finish::<T, F>(stats);
    }
}

#[cfg(test)]
mod tests;
