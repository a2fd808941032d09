//! The overflow check: is there an infinity or a NaN? Alone, with the sum of squares, or while unscaling.
//!
//! An element is not finite when all bits of its exponent are set, so the check alone is integer arithmetic. The sum of
//! squares is that of the gradients' kernels, in their order (`gradient.rs`).

use super::bf16::{canonical_nan, round_bf16, widen_bf16};
use super::dispatch::{Isa, kernel};
use super::fp16::{round_f16, widen_f16};
use super::gradient::{Bf16, F32, Format, GradientStats, stats_body};
#[cfg(target_arch = "x86_64")]
use super::gradient::{GRADIENT_BLOCK, LANES, Lanes};

/// Groups looked at between two questions whether to go on: enough for the question to cost nothing.
const CHECK_GROUPS: usize = 512;

/// Elements that are looked at together: four AVX-512 registers of 16-bit elements, eight of 32-bit ones.
const CHECK_LANES: usize = 128;

/// Elements converted together: their values stay in the first cache.
const TILE: usize = 1024;

kernel! {
    /// Sets `found` when an fp32 element is infinite or NaN, and stops soon after the first one.
    pub fn check_f32 / check_f32_with(src: &[f32], found: &mut bool) = check_body::<F32, _>;
}

kernel! {
    /// Sets `found` when a bf16 element is infinite or NaN, and stops soon after the first one.
    pub fn check_bf16 / check_bf16_with(src: &[u16], found: &mut bool) = check_body::<Bf16, _>;
}

kernel! {
    /// Sets `found` when an fp16 element is infinite or NaN, and stops soon after the first one.
    pub fn check_f16 / check_f16_with(src: &[u16], found: &mut bool) = check_body::<F16, _>;
}

kernel! {
    /// Multiplies fp32 elements by `scale`, in place, and sets `found` when one was infinite or NaN before, as PyTorch
    /// does. A NaN is written as `0x7FC00000`.
    pub fn unscale_f32 / unscale_f32_with(dst: &mut [f32], scale: f32, found: &mut bool)
        = unscale_body::<Single, F32, _>;
}

kernel! {
    /// As [`unscale_f32`], in bf16: multiplied in fp32, rounded to the nearest, ties to even.
    pub fn unscale_bf16 / unscale_bf16_with(dst: &mut [u16], scale: f32, found: &mut bool)
        = unscale_body::<Brain, Bf16, _>;
}

/// As `kernel!`, with bodies written for x86-64, where the processor converts fp16.
macro_rules! half_kernel {
    (
        $(#[$doc:meta])*
        pub fn $name:ident / $with:ident ($($arg:ident: $ty:ty),+ $(,)?) = $wide:path, $narrow:path, $body:path;
    ) => {
        $(#[$doc])*
        pub fn $name($($arg: $ty),+) {
            $with(Isa::best(), $($arg),+);
        }

        #[doc = concat!("[`", stringify!($name), "`] on a chosen instruction set: the same bits.")]
        ///
        /// # Panics
        /// When this machine lacks `isa`.
        pub fn $with(isa: Isa, $($arg: $ty),+) {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,f16c")]
            fn avx512($($arg: $ty),+) {
                $wide($($arg),+);
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            fn avx2($($arg: $ty),+) {
                $narrow($($arg),+);
            }

            assert!(isa.is_available(), "this machine cannot run {isa:?} kernels");
            match isa {
                #[cfg(target_arch = "x86_64")]
                // SAFETY: the assertion above and the condition found every feature the function is compiled for.
                Isa::Avx512 if is_x86_feature_detected!("f16c") => unsafe { avx512($($arg),+) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: the assertion above and the condition found every feature the function is compiled for.
                Isa::Avx2 if is_x86_feature_detected!("f16c") => unsafe { avx2($($arg),+) },
                _ => $body($($arg),+),
            }
        }
    };
}

half_kernel! {
    /// Measures an fp16 gradient without moving it.
    pub fn stats_f16 / stats_f16_with(src: &[u16], stats: &mut GradientStats)
        = x86::sum_wide::<false, F16>, x86::sum_narrow::<false, F16>, stats_body::<F16, _>;
}

half_kernel! {
    /// Measures a bf16 gradient: `stats_bf16`, written out for the instruction sets that have more to give.
    pub fn sum_bf16 / sum_bf16_with(src: &[u16], stats: &mut GradientStats)
        = x86::sum_wide::<true, Bf16>, x86::sum_narrow::<true, Bf16>, stats_body::<Bf16, _>;
}

half_kernel! {
    /// As [`unscale_f32`], in fp16: multiplied in fp32, rounded to the nearest, ties to even.
    pub fn unscale_f16 / unscale_f16_with(dst: &mut [u16], scale: f32, found: &mut bool)
        = unscale_body::<x86::Instruction, F16, _>, unscale_body::<x86::Instruction, F16, _>,
          unscale_body::<Half, F16, _>;
}

struct F16;

impl Format<u16> for F16 {
    type Magnitude = i16;
    const INFINITY: i16 = 0x7C00;
    #[inline(always)]
    fn value(element: u16) -> f32 {
        widen_f16(element)
    }
    #[inline(always)]
    fn magnitude(element: u16) -> i16 {
        (element & 0x7FFF) as i16
    }
    #[inline(always)]
    fn add(a: u16, b: u16) -> u16 {
        round_f16(widen_f16(a) + widen_f16(b))
    }
}

/// Conversion of elements, a tile at a time: plain loops, which LLVM vectorises, or the processor's instruction.
trait Convert<T> {
    fn widen(elements: &[T], values: &mut [f32]);
    /// None of the values is a NaN but the canonical one.
    fn round(values: &[f32], elements: &mut [T]);
}

struct Single;

impl Convert<f32> for Single {
    #[inline(always)]
    fn widen(elements: &[f32], values: &mut [f32]) {
        values.copy_from_slice(elements);
    }
    #[inline(always)]
    fn round(values: &[f32], elements: &mut [f32]) {
        elements.copy_from_slice(values);
    }
}

struct Brain;

impl Convert<u16> for Brain {
    #[inline(always)]
    fn widen(elements: &[u16], values: &mut [f32]) {
        values.iter_mut().zip(elements).for_each(|(value, &element)| *value = widen_bf16(element));
    }
    #[inline(always)]
    fn round(values: &[f32], elements: &mut [u16]) {
        elements.iter_mut().zip(values).for_each(|(element, &value)| *element = round_bf16(value));
    }
}

struct Half;

impl Convert<u16> for Half {
    #[inline(always)]
    fn widen(elements: &[u16], values: &mut [f32]) {
        values.iter_mut().zip(elements).for_each(|(value, &element)| *value = widen_f16(element));
    }
    #[inline(always)]
    fn round(values: &[f32], elements: &mut [u16]) {
        elements.iter_mut().zip(values).for_each(|(element, &value)| *element = round_f16(value));
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{Convert, Format, GRADIENT_BLOCK, GradientStats, Half, LANES, Lanes};
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

    /// `stats_body` with AVX-512, lane for lane. Fused or not makes no difference: the square is exact in fp64.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,f16c")]
    pub(super) fn sum_wide<const BRAIN: bool, F: Format<u16, Magnitude = i16>>(
        src: &[u16],
        stats: &mut GradientStats,
    ) {
        for src in src.chunks(GRADIENT_BLOCK) {
            let (groups, rest) = src.as_chunks::<LANES>();
            let mut sums = [_mm512_setzero_pd(); 4];
            let mut peaks = _mm512_setzero_si512();
            for group in groups {
                let (parts, _) = group.as_chunks::<8>();
                for i in 0..4 {
                    // SAFETY: 8 elements are read.
                    let part = unsafe { _mm_loadu_si128(parts[i].as_ptr().cast()) };
                    let values = _mm512_cvtps_pd(widen::<BRAIN>(part));
                    sums[i] = _mm512_fmadd_pd(values, values, sums[i]);
                }
                // SAFETY: 32 elements are read.
                let elements = unsafe { _mm512_loadu_si512(group.as_ptr().cast()) };
                peaks = _mm512_max_epi16(peaks, _mm512_and_si512(elements, _mm512_set1_epi16(0x7FFF)));
            }
            let mut lanes = Lanes::<i16>::new();
            for (lanes, sums) in lanes.sums.as_chunks_mut::<8>().0.iter_mut().zip(sums) {
                // SAFETY: 8 sums are written.
                unsafe { _mm512_storeu_pd(lanes.as_mut_ptr(), sums) };
            }
            // SAFETY: 32 magnitudes are written.
            unsafe { _mm512_storeu_si512(lanes.peaks.as_mut_ptr().cast(), peaks) };
            if !rest.is_empty() {
                lanes.take_rest::<u16, F>(rest);
            }
            lanes.finish::<u16, F>(stats);
        }
    }

    /// As [`sum_wide`], with AVX2 and F16C.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) fn sum_narrow<const BRAIN: bool, F: Format<u16, Magnitude = i16>>(
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
                lanes.take_rest::<u16, F>(rest);
            }
            lanes.finish::<u16, F>(stats);
        }
    }

    /// With F16C: used by functions compiled for it alone.
    pub(super) struct Instruction;

    impl Convert<u16> for Instruction {
        #[inline(always)]
        fn widen(elements: &[u16], values: &mut [f32]) {
            let (elements, rest) = elements.as_chunks::<8>();
            let (values, values_rest) = values.as_chunks_mut::<8>();
            for (elements, values) in elements.iter().zip(values) {
                // SAFETY: 8 elements are read and 8 values written; the machine has F16C.
                unsafe {
                    let group = _mm_loadu_si128(elements.as_ptr().cast());
                    _mm256_storeu_ps(values.as_mut_ptr(), _mm256_cvtph_ps(group));
                }
            }
            Half::widen(rest, values_rest);
        }

        #[inline(always)]
        fn round(values: &[f32], elements: &mut [u16]) {
            let (values, rest) = values.as_chunks::<8>();
            let (elements, elements_rest) = elements.as_chunks_mut::<8>();
            for (values, elements) in values.iter().zip(elements) {
                // SAFETY: 8 values are read and 8 elements written; the machine has F16C.
                unsafe {
                    let group = _mm256_loadu_ps(values.as_ptr());
                    let group = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(group);
                    _mm_storeu_si128(elements.as_mut_ptr().cast(), group);
                }
            }
            Half::round(rest, elements_rest);
        }
    }
}

#[inline(always)]
fn check_body<F: Format<T>, T: Copy>(src: &[T], found: &mut bool) {
    let (groups, rest) = src.as_chunks::<CHECK_LANES>();
    for groups in groups.chunks(CHECK_GROUPS) {
        if *found {
            return;
        }
        let mut peaks = [F::Magnitude::default(); CHECK_LANES];
        for group in groups {
            for (peak, &element) in peaks.iter_mut().zip(group) {
                *peak = F::magnitude(element).max(*peak);
            }
        }
        *found |= any_from::<F, T>(&peaks);
    }
    *found |= rest.iter().any(|&element| F::magnitude(element) >= F::INFINITY);
}

/// Out of line, as the end of a block of sums is: the loop before it stays whole.
#[inline(never)]
fn any_from<F: Format<T>, T>(peaks: &[F::Magnitude; CHECK_LANES]) -> bool {
    peaks.iter().any(|&peak| peak >= F::INFINITY)
}

#[inline(always)]
fn unscale_body<C: Convert<T>, F: Format<T>, T: Copy>(dst: &mut [T], scale: f32, found: &mut bool) {
    let mut values = [0.0; TILE];
    for dst in dst.chunks_mut(TILE) {
        let values = &mut values[..dst.len()];
        let peak = dst.iter().fold(F::Magnitude::default(), |peak, &element| F::magnitude(element).max(peak));
        *found |= peak >= F::INFINITY;
        C::widen(dst, values);
        for value in values.iter_mut() {
            *value = canonical_nan(*value * scale);
        }
        C::round(values, dst);
    }
}

#[cfg(test)]
mod tests;
