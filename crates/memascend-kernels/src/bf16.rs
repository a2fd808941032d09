//! bf16 as its bits: widening, and rounding as PyTorch rounds.

/// The one NaN that kernels write (as fp32 bits): quiet, positive, no payload.
///
/// Which operand's payload an addition keeps depends on how the compiler ordered the operands, so
/// an uncanonicalised NaN would differ between instruction sets.
pub(super) const NAN_BITS: u32 = 0x7FC0_0000;

/// The fp32 value of a bf16.
#[inline(always)]
pub const fn widen_bf16(bits: u16) -> f32 {
    f32::from_bits((bits as u32) << 16)
}

/// Rounds to the nearest bf16, ties to even; any NaN becomes `0x7FC0`.
///
/// PyTorch's scalar code does the same; its vector code writes the NaN `0xFFFF` instead, so which
/// one PyTorch returns depends on the element's position. No finite or infinite result differs.
#[inline(always)]
pub const fn round_bf16(value: f32) -> u16 {
    let bits = canonical_nan(value).to_bits();
    // The canonical NaN has a zero low half: rounding leaves it as it is.
    ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) as u16
}

/// The value itself, or the canonical NaN. A select on integers, so every path returns the same
/// bits.
#[inline(always)]
pub(super) const fn canonical_nan(value: f32) -> f32 {
    f32::from_bits(if value.is_nan() { NAN_BITS } else { value.to_bits() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bf16_survives_a_round_trip() {
        for bits in 0..=u16::MAX {
            let value = widen_bf16(bits);
            let expected = if value.is_nan() { 0x7FC0 } else { bits };
            assert_eq!(round_bf16(value), expected, "{bits:#06x}");
        }
    }

    #[test]
    fn ties_go_to_even_and_overflow_goes_to_infinity() {
        for (bits, expected) in [
            (0x3F80_8000, 0x3F80),
            (0x3F80_8001, 0x3F81),
            (0x3F81_8000, 0x3F82),
            (0x3F80_7FFF, 0x3F80),
            (0x7F7F_8000, 0x7F80),
            (0xFF7F_FFFF, 0xFF80),
            (0x0000_8000, 0x0000),
            (0x0000_8001, 0x0001),
            (0x7F80_0001, 0x7FC0),
            (0xFFFF_FFFF, 0x7FC0),
        ] {
            assert_eq!(round_bf16(f32::from_bits(bits)), expected, "{bits:#010x}");
        }
    }
}
