//! The formats of elements, each described once: to fp32, from fp32, and its non-finite values.

use super::bf16::{canonical_nan, round_bf16, widen_bf16};
use super::fp16::{round_f16, widen_f16};

/// A format that tensors have.
pub(super) trait Format {
    type Element: Copy + Default;
    /// As wide as the element: signed, because SSE2 has the maximum of signed 16-bit lanes only.
    type Magnitude: Copy + Default + Ord;
    /// The magnitude of infinity; a larger one is a NaN.
    const INFINITY: Self::Magnitude;
    fn widen(element: Self::Element) -> f32;
    /// The nearest, a tie to the even one; any NaN becomes the canonical one.
    fn round(value: f32) -> Self::Element;
    fn magnitude(element: Self::Element) -> Self::Magnitude;

    /// [`Format::widen`] for slices of one length: a plain loop, which LLVM vectorises, or the
    /// processor's instruction.
    #[inline(always)]
    fn widen_all(elements: &[Self::Element], values: &mut [f32]) {
        values.iter_mut().zip(elements).for_each(|(value, &element)| *value = Self::widen(element));
    }

    /// [`Format::round`] for slices of one length. None of the values is a NaN but the canonical
    /// one.
    #[inline(always)]
    fn round_all(values: &[f32], elements: &mut [Self::Element]) {
        elements.iter_mut().zip(values).for_each(|(element, &value)| *element = Self::round(value));
    }
}

pub(super) struct F32;

impl Format for F32 {
    type Element = f32;
    type Magnitude = i32;
    const INFINITY: i32 = 0x7F80_0000;
    #[inline(always)]
    fn widen(element: f32) -> f32 {
        element
    }
    #[inline(always)]
    fn round(value: f32) -> f32 {
        canonical_nan(value)
    }
    #[inline(always)]
    fn magnitude(element: f32) -> i32 {
        (element.to_bits() & 0x7FFF_FFFF) as i32
    }
    #[inline(always)]
    fn round_all(values: &[f32], elements: &mut [f32]) {
        elements.copy_from_slice(values);
    }
}

pub(super) struct Bf16;

impl Format for Bf16 {
    type Element = u16;
    type Magnitude = i16;
    const INFINITY: i16 = 0x7F80;
    #[inline(always)]
    fn widen(element: u16) -> f32 {
        widen_bf16(element)
    }
    #[inline(always)]
    fn round(value: f32) -> u16 {
        round_bf16(value)
    }
    #[inline(always)]
    fn magnitude(element: u16) -> i16 {
        (element & 0x7FFF) as i16
    }
}

pub(super) struct F16;

impl Format for F16 {
    type Element = u16;
    type Magnitude = i16;
    const INFINITY: i16 = 0x7C00;
    #[inline(always)]
    fn widen(element: u16) -> f32 {
        widen_f16(element)
    }
    #[inline(always)]
    fn round(value: f32) -> u16 {
        round_f16(value)
    }
    #[inline(always)]
    fn magnitude(element: u16) -> i16 {
        (element & 0x7FFF) as i16
    }
}

/// [`F16`] by the processor's instructions: the same bits. Used by functions compiled for F16C
/// alone.
#[cfg(target_arch = "x86_64")]
pub(super) struct F16c;

#[cfg(target_arch = "x86_64")]
impl Format for F16c {
    type Element = u16;
    type Magnitude = i16;
    const INFINITY: i16 = F16::INFINITY;
    #[inline(always)]
    fn widen(element: u16) -> f32 {
        F16::widen(element)
    }
    #[inline(always)]
    fn round(value: f32) -> u16 {
        F16::round(value)
    }
    #[inline(always)]
    fn magnitude(element: u16) -> i16 {
        F16::magnitude(element)
    }

    #[inline(always)]
    fn widen_all(elements: &[u16], values: &mut [f32]) {
        use std::arch::x86_64::*;
        let (elements, rest) = elements.as_chunks::<8>();
        let (values, values_rest) = values.as_chunks_mut::<8>();
        for (elements, values) in elements.iter().zip(values) {
            // SAFETY: 8 elements are read and 8 values written; the machine has F16C.
            unsafe {
                let group = _mm_loadu_si128(elements.as_ptr().cast());
                _mm256_storeu_ps(values.as_mut_ptr(), _mm256_cvtph_ps(group));
            }
        }
        F16::widen_all(rest, values_rest);
    }

    #[inline(always)]
    fn round_all(values: &[f32], elements: &mut [u16]) {
        use std::arch::x86_64::*;
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
        F16::round_all(rest, elements_rest);
    }
}
