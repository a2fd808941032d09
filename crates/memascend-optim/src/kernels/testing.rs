//! Inputs shared by the kernels' tests.

use proptest::collection::{SizeRange, vec};
use proptest::prelude::*;

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
