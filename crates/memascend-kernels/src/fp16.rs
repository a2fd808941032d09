//! fp16 as its bits, in integer arithmetic that vectorises on every instruction set.

use super::bf16::NAN_BITS;

/// fp32 bits of 2^-24, the least fp16 above zero.
const DENORMAL_UNIT: f32 = f32::from_bits(0x3380_0000);
/// Added to an fp16 exponent, at fp32's place, to make it an fp32 exponent.
const REBIAS: u32 = (127 - 15) << 23;

/// The fp32 value of an fp16. Any NaN becomes the canonical one.
#[inline(always)]
pub const fn widen_f16(bits: u16) -> f32 {
    let sign = (bits as u32 & 0x8000) << 16;
    let magnitude = bits as u32 & 0x7FFF;
    // A product instead of a shift by the number of leading zeros: exact, and free of fp32
    // denormals.
    let denormal = (magnitude as i32 as f32 * DENORMAL_UNIT).to_bits();
    let normal = (magnitude << 13) + REBIAS;
    let widened = if magnitude < 0x0400 {
        denormal
    } else if magnitude < 0x7C00 {
        normal
    } else {
        0x7F80_0000
    };
    f32::from_bits(if magnitude > 0x7C00 { NAN_BITS } else { sign | widened })
}

/// Rounds to the nearest fp16, ties to even; too large becomes infinity, any NaN `0x7E00`.
#[inline(always)]
pub const fn round_f16(value: f32) -> u16 {
    let bits = value.to_bits();
    let sign = (bits >> 16) & 0x8000;
    let magnitude = bits & 0x7FFF_FFFF;
    // Beside 0.5 an fp32 has fp16's unit of 2^-24 as its last place, so the addition rounds.
    let denormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0x3F00_0000);
    let normal = magnitude.wrapping_add(0x0FFF + ((magnitude >> 13) & 1)).wrapping_sub(REBIAS) >> 13;
    let rounded = if magnitude < 0x3880_0000 {
        denormal
    } else if magnitude < 0x4780_0000 {
        normal
    } else {
        0x7C00
    };
    (if magnitude > 0x7F80_0000 { 0x7E00 } else { sign | rounded }) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The definition of the format, in fp64.
    fn plain(bits: u16) -> f64 {
        let fraction = f64::from(bits & 0x3FF);
        let magnitude = match i32::from(bits >> 10 & 0x1F) {
            0 => fraction * 2f64.powi(-24),
            31 => f64::INFINITY,
            exponent => (1.0 + fraction / 1024.0) * 2f64.powi(exponent - 15),
        };
        if bits & 0x8000 == 0 { magnitude } else { -magnitude }
    }

    fn is_nan(bits: u16) -> bool {
        bits & 0x7FFF > 0x7C00
    }

    #[test]
    fn every_pattern_widens_to_its_value_and_rounds_back() {
        for bits in 0..=u16::MAX {
            let value = widen_f16(bits);
            if is_nan(bits) {
                assert_eq!((value.to_bits(), round_f16(value)), (NAN_BITS, 0x7E00), "{bits:#06x}");
            } else {
                assert_eq!(f64::from(value).to_bits(), plain(bits).to_bits(), "{bits:#06x}");
                assert_eq!(round_f16(value), bits, "{bits:#06x}");
            }
        }
    }

    #[test]
    fn what_lies_between_two_patterns_goes_to_the_nearer_and_a_tie_to_the_even_one() {
        for low in 0..0x7C00u16 {
            // Above the largest number IEEE rounds as if one more followed, and calls it infinity.
            let above = if low == 0x7BFF { 65536.0 } else { plain(low + 1) };
            let middle = (plain(low) + above) / 2.0;
            let tie = middle as f32;
            assert_eq!(f64::from(tie), middle, "the middle is an fp32 number");
            let (below, beyond) = (f32::from_bits(tie.to_bits() - 1), f32::from_bits(tie.to_bits() + 1));
            for sign in [0, 0x8000] {
                let signed = |x: f32| if sign == 0 { x } else { -x };
                assert_eq!(round_f16(signed(below)), sign | low, "{low:#06x}");
                assert_eq!(round_f16(signed(tie)), sign | (low + (low & 1)), "{low:#06x}");
                assert_eq!(round_f16(signed(beyond)), sign | (low + 1), "{low:#06x}");
            }
        }
        assert_eq!(round_f16(f32::INFINITY), 0x7C00);
        assert_eq!(round_f16(f32::MIN), 0xFC00);
        assert_eq!(round_f16(f32::from_bits(1)), 0);
    }
}
