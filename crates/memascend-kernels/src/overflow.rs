//! The overflow check: is there an infinity or a NaN? Alone, with the sum of squares, or while
//! unscaling.
//!
//! An element is not finite when all bits of its exponent are set, so the check alone is integer arithmetic.
//! The sum of squares is taken in the order of the gradients' kernels (`gradient.rs`).

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
    //! `stats_body` lane for lane, on the words of four bf16 or two squares of fp16. A number is moved
    //! to where fp64 has its exponent and fraction, and is then too small by a power of two: a product
    //! widens it, exactly. That is one instruction less than a conversion, which has to move halves of
    //! registers. Fused or not makes no difference either: the square is exact in fp64.

    use super::{Format, GRADIENT_BLOCK, GradientStats, LANES, Lanes, stats_body};
    use std::arch::x86_64::*;

    /// How far ahead memory is asked for, in bytes. Processors do so by themselves, but begin anew in each
    /// page, while the sums leave them less time than the check does.
    const AHEAD: usize = 16384;

    /// fp64's exponent of 1 less fp32's.
    const WIDEN: f64 = f64::from_bits((1023 + 896) << 52);
    /// Exponent and fraction of a bf16, and of an fp32, at the places of an fp64's.
    const BRAIN_BITS: i64 = 0x7FFF << 45;
    const SQUARE_BITS: i64 = 0x7FFF_FFFF << 29;

    /// A non-finite number becomes this or more, so a sum of squares below it has none.
    const LIMIT: f64 = f64::from_bits((1023 + 128) << 52);

    #[inline(always)]
    fn ask_ahead(group: &[u16; LANES]) {
        // SAFETY: a prefetch of any address is allowed, and this needs SSE alone, which is everywhere.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(group.as_ptr().cast::<i8>().wrapping_add(AHEAD)) };
    }

    /// Adds the sums of `src`, a block or less: `sums` are of its whole groups of [`LANES`]. Where one
    /// is too large to tell whether all elements are finite, all is done again.
    #[inline(always)]
    fn finish<F: Format<Element = u16, Magnitude = i16>>(
        src: &[u16],
        sums: [f64; LANES],
        stats: &mut GradientStats,
    ) {
        if !sums.iter().all(|&sum| sum < LIMIT) {
            return stats_body::<F>(src, stats);
        }
        let mut lanes = Lanes::<i16>::new();
        lanes.sums = sums;
        let rest = src.as_chunks::<LANES>().1;
        if !rest.is_empty() {
            lanes.take_rest::<F>(rest);
        }
        lanes.finish::<F>(stats);
    }

    /// With AVX-512.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,f16c")]
    pub(super) fn sum_wide<const BRAIN: bool, F: Format<Element = u16, Magnitude = i16>>(
        src: &[u16],
        stats: &mut GradientStats,
    ) {
        let widen = _mm512_set1_pd(WIDEN);
        for src in src.chunks(GRADIENT_BLOCK) {
            // Of a word of bf16 the element `i`; of fp16 the words of the squares `i / 2`, and of these the
            // square `i % 2`.
            let mut sums = [_mm512_setzero_pd(); 4];
            for group in src.as_chunks::<LANES>().0 {
                ask_ahead(group);
                if BRAIN {
                    let bits = _mm512_set1_epi64(BRAIN_BITS);
                    // SAFETY: 32 elements are read.
                    let words = unsafe { _mm512_loadu_si512(group.as_ptr().cast()) };
                    let moved = [
                        _mm512_slli_epi64::<45>(words),
                        _mm512_slli_epi64::<29>(words),
                        _mm512_slli_epi64::<13>(words),
                        _mm512_srli_epi64::<3>(words),
                    ];
                    for (sum, moved) in sums.iter_mut().zip(moved) {
                        let value = _mm512_castsi512_pd(_mm512_and_si512(moved, bits));
                        let value = _mm512_mul_pd(value, widen);
                        *sum = _mm512_fmadd_pd(value, value, *sum);
                    }
                } else {
                    let bits = _mm512_set1_epi64(SQUARE_BITS);
                    let (halves, _) = group.as_chunks::<16>();
                    for (sums, half) in sums.as_chunks_mut::<2>().0.iter_mut().zip(halves) {
                        // SAFETY: 16 elements are read.
                        let values = _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(half.as_ptr().cast()) });
                        // Exact: 11 bits squared, and neither too large nor too small.
                        let words = _mm512_castps_si512(_mm512_mul_ps(values, values));
                        let moved = [_mm512_slli_epi64::<29>(words), _mm512_srli_epi64::<3>(words)];
                        for (sum, moved) in sums.iter_mut().zip(moved) {
                            let square = _mm512_castsi512_pd(_mm512_and_si512(moved, bits));
                            *sum = _mm512_fmadd_pd(square, widen, *sum);
                        }
                    }
                }
            }
            let mut lanes = [0.0; LANES];
            for (part, sums) in sums.into_iter().enumerate() {
                let mut eight = [0.0; 8];
                // SAFETY: 8 sums are written.
                unsafe { _mm512_storeu_pd(eight.as_mut_ptr(), sums) };
                for (i, sum) in eight.into_iter().enumerate() {
                    lanes[if BRAIN { 4 * i + part } else { part / 2 * 16 + 2 * i + part % 2 }] = sum;
                }
            }
            finish::<F>(src, lanes, stats);
        }
    }

    /// As [`sum_wide`], with AVX2 and F16C.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) fn sum_narrow<const BRAIN: bool, F: Format<Element = u16, Magnitude = i16>>(
        src: &[u16],
        stats: &mut GradientStats,
    ) {
        let widen = _mm256_set1_pd(WIDEN);
        for src in src.chunks(GRADIENT_BLOCK) {
            let mut sums = [_mm256_setzero_pd(); 8];
            for group in src.as_chunks::<LANES>().0 {
                ask_ahead(group);
                if BRAIN {
                    let bits = _mm256_set1_epi64x(BRAIN_BITS);
                    let (halves, _) = group.as_chunks::<16>();
                    for (sums, half) in sums.as_chunks_mut::<4>().0.iter_mut().zip(halves) {
                        // SAFETY: 16 elements are read.
                        let words = unsafe { _mm256_loadu_si256(half.as_ptr().cast()) };
                        let moved = [
                            _mm256_slli_epi64::<45>(words),
                            _mm256_slli_epi64::<29>(words),
                            _mm256_slli_epi64::<13>(words),
                            _mm256_srli_epi64::<3>(words),
                        ];
                        for (sum, moved) in sums.iter_mut().zip(moved) {
                            let value = _mm256_castsi256_pd(_mm256_and_si256(moved, bits));
                            let value = _mm256_mul_pd(value, widen);
                            *sum = _mm256_fmadd_pd(value, value, *sum);
                        }
                    }
                } else {
                    let bits = _mm256_set1_epi64x(SQUARE_BITS);
                    let (quarters, _) = group.as_chunks::<8>();
                    for (sums, quarter) in sums.as_chunks_mut::<2>().0.iter_mut().zip(quarters) {
                        // SAFETY: 8 elements are read.
                        let values = _mm256_cvtph_ps(unsafe { _mm_loadu_si128(quarter.as_ptr().cast()) });
                        let words = _mm256_castps_si256(_mm256_mul_ps(values, values));
                        let moved = [_mm256_slli_epi64::<29>(words), _mm256_srli_epi64::<3>(words)];
                        for (sum, moved) in sums.iter_mut().zip(moved) {
                            let square = _mm256_castsi256_pd(_mm256_and_si256(moved, bits));
                            *sum = _mm256_fmadd_pd(square, widen, *sum);
                        }
                    }
                }
            }
            let mut lanes = [0.0; LANES];
            for (part, sums) in sums.into_iter().enumerate() {
                let mut four = [0.0; 4];
                // SAFETY: 4 sums are written.
                unsafe { _mm256_storeu_pd(four.as_mut_ptr(), sums) };
                for (i, sum) in four.into_iter().enumerate() {
                    lanes[if BRAIN {
                        part / 4 * 16 + 4 * i + part % 4
                    } else {
                        part / 2 * 8 + 2 * i + part % 2
                    }] = sum;
                }
            }
            finish::<F>(src, lanes, stats);
        }
    }
}

/// `LANES` elements are checked together, two AVX-512 registers: with more, memory is read more slowly.
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
