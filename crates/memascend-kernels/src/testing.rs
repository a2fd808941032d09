//! Inputs shared by the kernels' tests.

use proptest::collection::{SizeRange, vec};
use proptest::prelude::*;

use super::{Algorithm, Isa, Moments, Rule, StepScalars, Weight, step_with};

/// fp32 bit patterns with the awkward ones well represented: zeros, denormals, infinities, NaNs of
/// either sign, quiet and signalling, and the neighbours of each rounding boundary.
pub(crate) fn any_bits(length: impl Into<SizeRange>) -> impl Strategy<Value = Vec<u32>> {
    vec(any_bit_pattern(), length)
}

/// One pattern of [`any_bits`].
pub(crate) fn any_bit_pattern() -> impl Strategy<Value = u32> {
    const AWKWARD: [u32; 16] = [
        0x0000_0000,
        0x8000_0000,
        0x0000_0001,
        0x807F_FFFF,
        0x0080_0000,
        0x3F80_0000,
        0x3F80_8000,
        0xBF81_8000,
        0x7F7F_FFFF,
        0xFF7F_8000,
        0x7F80_0000,
        0xFF80_0000,
        0x7F80_0001,
        0xFFC0_0000,
        0x7FFF_8000,
        0xFFFF_FFFF,
    ];
    prop_oneof![
        3 => any::<u32>(),
        // Ordinary magnitudes, so that sums and quotients meet on comparable scales.
        4 => (-8.0f32..8.0).prop_map(f32::to_bits),
        1 => prop::sample::select(&AWKWARD[..]),
    ]
}

/// The bits of each value, to compare NaNs and signed zeros too.
pub(crate) fn bits_of(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// An AdamW step on fp32 weights.
pub(crate) fn adamw_f32(
    isa: Isa,
    weight: &mut [f32],
    [exp_avg, exp_avg_sq]: [&mut [f32]; 2],
    gradient: &[f32],
    first_element: u64,
    scalars: &StepScalars,
) {
    let rule = adamw(Weight::F32);
    let mut bytes = [&*weight, exp_avg, exp_avg_sq].map(bytes_of_f32);
    let [w, m, v] = &mut bytes;
    step_with(isa, rule, w, &mut [m, v], &bytes_of_f32(gradient), first_element, scalars);
    for (values, bytes) in [weight, exp_avg, exp_avg_sq].into_iter().zip(bytes) {
        for (value, bytes) in values.iter_mut().zip(bytes.as_chunks().0) {
            *value = f32::from_ne_bytes(*bytes);
        }
    }
}

/// An AdamW step on the halves of split masters.
pub(crate) fn adamw_bf16_split(
    isa: Isa,
    [high, low]: [&mut [u16]; 2],
    [exp_avg, exp_avg_sq]: [&mut [f32]; 2],
    gradient: &[u16],
    first_element: u64,
    scalars: &StepScalars,
) {
    let rule = adamw(Weight::Bf16Split);
    let (mut h, mut l) = (bytes_of_u16(high), bytes_of_u16(low));
    let (mut m, mut v) = (bytes_of_f32(exp_avg), bytes_of_f32(exp_avg_sq));
    let planes = &mut [&mut *m, &mut *v, &mut *l];
    step_with(isa, rule, &mut h, planes, &bytes_of_u16(gradient), first_element, scalars);
    for (values, bytes) in [(high, h), (low, l)] {
        for (value, bytes) in values.iter_mut().zip(bytes.as_chunks().0) {
            *value = u16::from_ne_bytes(*bytes);
        }
    }
    for (values, bytes) in [(exp_avg, m), (exp_avg_sq, v)] {
        for (value, bytes) in values.iter_mut().zip(bytes.as_chunks().0) {
            *value = f32::from_ne_bytes(*bytes);
        }
    }
}

fn adamw(weight: Weight) -> Rule {
    Rule { algorithm: Algorithm::AdamW { amsgrad: false }, moments: Moments::F32, weight }
}

fn bytes_of_f32(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_ne_bytes()).collect()
}

fn bytes_of_u16(values: &[u16]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_ne_bytes()).collect()
}
