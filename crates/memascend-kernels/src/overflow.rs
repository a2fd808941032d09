//! The overflow check: is there an infinity or a NaN? Alone, with the sum of squares, or while
//! unscaling.
//!
//! An element is not finite when all bits of its exponent are set, so the check alone is integer
//! arithmetic. The sum of squares is that of the gradients' kernels, in their order
//! (`gradient.rs`).

use super::bf16::canonical_nan;
use super::dispatch::{half_kernel, kernel};
#[cfg(target_arch = "x86_64")]
use super::format::F16c;
use super::format::{Bf16, F16, F32, Format};
use super::gradient::{GRADIENT_BLOCK, GradientStats, stats_body};
#[cfg(target_arch = "x86_64")]
use super::gradient::{LANES, Lanes};

/// Elements checked between two tests of whether to go on: enough for the tests to cost nothing.
const CHECK_ELEMENTS: usize = GRADIENT_BLOCK;

/// Elements converted together: their values stay in the first cache.
const TILE: usize = 1024;

kernel! {
    /// Sets `found` when an fp32 element is infinite or NaN, and stops soon after the first one.
    pub fn check_f32 / check_f32_with(src: &[f32], found: &mut bool) = check_body::<F32, 32>;
}

kernel! {
    /// Sets `found` when a bf16 element is infinite or NaN, and stops soon after the first one.
    pub fn check_bf16 / check_bf16_with(src: &[u16], found: &mut bool) = check_body::<Bf16, 64>;
}

kernel! {
    /// Sets `found` when an fp16 element is infinite or NaN, and stops soon after the first one.
    pub fn check_f16 / check_f16_with(src: &[u16], found: &mut bool) = check_body::<F16, 64>;
}

kernel! {
    /// Multiplies fp32 elements by `scale`, in place, and sets `found` when one was infinite or NaN
    /// before, as PyTorch does. A NaN is written as `0x7FC00000`.
    pub fn unscale_f32 / unscale_f32_with(dst: &mut [f32], scale: f32, found: &mut bool)
        = unscale_body::<F32>;
}

kernel! {
    /// As [`unscale_f32`], in bf16: multiplied in fp32, rounded to the nearest, ties to even.
    pub fn unscale_bf16 / unscale_bf16_with(dst: &mut [u16], scale: f32, found: &mut bool)
        = unscale_body::<Bf16>;
}

half_kernel! {
    /// Measures an fp16 gradient without moving it.
    pub fn stats_f16 / stats_f16_with(src: &[u16], stats: &mut GradientStats)
        = x86::sum_wide::<false, F16>, x86::sum_narrow::<false, F16>, stats_body::<F16>;
}

half_kernel! {
    /// Measures a bf16 gradient: `stats_bf16`, written out for the instruction sets that have more
    /// to give.
    pub fn sum_bf16 / sum_bf16_with(src: &[u16], stats: &mut GradientStats)
        = x86::sum_wide::<true, Bf16>, x86::sum_narrow::<true, Bf16>, stats_body::<Bf16>;
}

half_kernel! {
    /// As [`unscale_f32`], in fp16: multiplied in fp32, rounded to the nearest, ties to even.
    pub fn unscale_f16 / unscale_f16_with(dst: &mut [u16], scale: f32, found: &mut bool)
        = unscale_body::<F16c>, unscale_body::<F16c>, unscale_body::<F16>;
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{Format, GRADIENT_BLOCK, GradientStats, LANES, Lanes};
    use std::arch::x86_64::*;

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    fn widen<const BRAIN: bool>(elements: __m128i) -> __m256 {
        if BRAIN {
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(elements)))
        } else {
            _mm256_cvtph_ps(elements)
        }
    }

    /// `stats_body` with AVX-512, lane for lane. Fused or not makes no difference: the square is
    /// exact in fp64. Nor can the sum of squares of finite 16-bit numbers overflow, so that it
    /// tells whether all are.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,f16c")]
    pub(super) fn sum_wide<const BRAIN: bool, F: Format<Element = u16, Magnitude = i16>>(
        src: &[u16],
        stats: &mut GradientStats,
    ) {
        for src in src.chunks(GRADIENT_BLOCK) {
            let (groups, rest) = src.as_chunks::<LANES>();
            let mut sums = [_mm512_setzero_pd(); 4];
            for group in groups {
                // SAFETY: 32 elements are read.
                let elements = unsafe { _mm512_loadu_si512(group.as_ptr().cast()) };
                let [one, other] = if BRAIN {
                    // Elements of even indices, and of odd ones: in place, so that none has to be
                    // moved.
                    let odd = _mm512_and_si512(elements, _mm512_set1_epi32(0xFFFF_0000_u32 as i32));
                    [_mm512_slli_epi32::<16>(elements), odd].map(|bits| _mm512_castsi512_ps(bits))
                } else {
                    let high = _mm512_extracti64x4_epi64::<1>(elements);
                    [_mm512_cvtph_ps(_mm512_castsi512_si256(elements)), _mm512_cvtph_ps(high)]
                };
                let high = |values| _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(values)));
                let parts =
                    [_mm512_castps512_ps256(one), high(one), _mm512_castps512_ps256(other), high(other)];
                for (sum, part) in sums.iter_mut().zip(parts) {
                    let values = _mm512_cvtps_pd(part);
                    *sum = _mm512_fmadd_pd(values, values, *sum);
                }
            }
            let mut lanes = Lanes::<i16>::new();
            for (part, sums) in sums.into_iter().enumerate() {
                let mut eight = [0.0; 8];
                // SAFETY: 8 sums are written.
                unsafe { _mm512_storeu_pd(eight.as_mut_ptr(), sums) };
                for (i, sum) in eight.into_iter().enumerate() {
                    let lane = if BRAIN { part % 2 * 16 + 2 * i + part / 2 } else { part * 8 + i };
                    lanes.sums[lane] = sum;
                }
            }
            if !rest.is_empty() {
                lanes.take_rest::<F>(rest);
            }
            lanes.finish::<F>(stats);
            stats.non_finite |= !stats.sum_squares.is_finite();
        }
    }

    /// As [`sum_wide`], with AVX2 and F16C.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) fn sum_narrow<const BRAIN: bool, F: Format<Element = u16, Magnitude = i16>>(
        src: &[u16],
        stats: &mut GradientStats,
    ) {
        for src in src.chunks(GRADIENT_BLOCK) {
            let (groups, rest) = src.as_chunks::<LANES>();
            let mut sums = [_mm256_setzero_pd(); 8];
            let mut peaks = [_mm256_setzero_si256(); 2];
            for group in groups {
                let (parts, _) = group.as_chunks::<8>();
                for i in 0..4 {
                    // SAFETY: 8 elements are read.
                    let part = unsafe { _mm_loadu_si128(parts[i].as_ptr().cast()) };
                    let values = widen::<BRAIN>(part);
                    let low = _mm256_cvtps_pd(_mm256_castps256_ps128(values));
                    let high = _mm256_cvtps_pd(_mm256_extractf128_ps::<1>(values));
                    sums[2 * i] = _mm256_fmadd_pd(low, low, sums[2 * i]);
                    sums[2 * i + 1] = _mm256_fmadd_pd(high, high, sums[2 * i + 1]);
                }
                for (peaks, half) in peaks.iter_mut().zip(group.as_chunks::<16>().0) {
                    // SAFETY: 16 elements are read.
                    let elements = unsafe { _mm256_loadu_si256(half.as_ptr().cast()) };
                    *peaks = _mm256_max_epi16(*peaks, _mm256_and_si256(elements, _mm256_set1_epi16(0x7FFF)));
                }
            }
            let mut lanes = Lanes::<i16>::new();
            for (lanes, sums) in lanes.sums.as_chunks_mut::<4>().0.iter_mut().zip(sums) {
                // SAFETY: 4 sums are written.
                unsafe { _mm256_storeu_pd(lanes.as_mut_ptr(), sums) };
            }
            for (lanes, peaks) in lanes.peaks.as_chunks_mut::<16>().0.iter_mut().zip(peaks) {
                // SAFETY: 16 magnitudes are written.
                unsafe { _mm256_storeu_si256(lanes.as_mut_ptr().cast(), peaks) };
            }
            if !rest.is_empty() {
                lanes.take_rest::<F>(rest);
            }
            lanes.finish::<F>(stats);
        }
    }
}

/// `LANES` elements are looked at together. Those of two AVX-512 registers: with more memory is
/// read no faster, but more slowly.
#[inline(always)]
fn check_body<F: Format, const LANES: usize>(src: &[F::Element], found: &mut bool) {
    let (groups, rest) = src.as_chunks::<LANES>();
    for groups in groups.chunks(CHECK_ELEMENTS / LANES) {
        if *found {
            return;
        }
        let mut peaks = [F::Magnitude::default(); LANES];
        for group in groups {
            for (peak, &element) in peaks.iter_mut().zip(group) {
                *peak = F::magnitude(element).max(*peak);
            }
        }
        *found |= any_from::<F>(&peaks);
    }
    *found |= rest.iter().any(|&element| F::magnitude(element) >= F::INFINITY);
}

/// Out of line, as the end of a block of sums is: the loop before it stays whole.
#[inline(never)]
fn any_from<F: Format>(peaks: &[F::Magnitude]) -> bool {
    peaks.iter().any(|&peak| peak >= F::INFINITY)
}

#[inline(always)]
fn unscale_body<F: Format>(dst: &mut [F::Element], scale: f32, found: &mut bool) {
    let mut values = [0.0; TILE];
    for dst in dst.chunks_mut(TILE) {
        let values = &mut values[..dst.len()];
        let peak = dst.iter().fold(F::Magnitude::default(), |peak, &element| F::magnitude(element).max(peak));
        *found |= peak >= F::INFINITY;
        F::widen_all(dst, values);
        for value in values.iter_mut() {
            *value = canonical_nan(*value * scale);
        }
        F::round_all(values, dst);
    }
}

#[cfg(test)]
mod tests;
