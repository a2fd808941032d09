//! bf16 as its bits: widening, and rounding as PyTorch rounds.

use super::dispatch::kernel;

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

kernel! {
    /// [`widen_bf16`] of every element.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn widen_bf16_slice / widen_bf16_slice_with(dst: &mut [f32], src: &[u16]) = widen_body;
}

#[inline(always)]
fn widen_body(dst: &mut [f32], src: &[u16]) {
    assert_eq!(dst.len(), src.len(), "lengths");
    dst.iter_mut().zip(src).for_each(|(value, &bits)| *value = widen_bf16(bits));
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
    use super::super::Isa;
    use super::super::testing::bits_of;
    use super::*;

    #[test]
    fn a_slice_is_widened_element_by_element_on_every_isa() {
        let bits: Vec<u16> = (0..=u16::MAX).chain(0..5).collect();
        let expected: Vec<f32> = bits.iter().map(|&bits| f32::from_bits(u32::from(bits) << 16)).collect();
        for isa in Isa::available() {
            let mut values = vec![1.0; bits.len()];
            widen_bf16_slice_with(isa, &mut values, &bits);
            assert_eq!(bits_of(&values), bits_of(&expected), "{isa:?}");
        }
    }

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
