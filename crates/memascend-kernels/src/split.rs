//! Split master weights: an fp32 master kept as its bf16 weight and the low half of its bits.
//!
//! `high = (bits + 0x8000) >> 16` rounds half up (in magnitude), and `low` is the low half
//! unchanged. `low >= 0x8000` says whether the rounding carried, so `bits = (high << 16) +
//! sign_extend(low)` undoes it. All arithmetic is modulo 2^32, and the restore is exact for every
//! bit pattern.
//!
//! Values of the bf16 weight where rounding leaves the number's own neighbourhood:
//! - a finite master of `0x7F7F8000` or more in magnitude reads as infinity, as in any bf16
//!   rounding;
//! - a NaN whose payload is only in its low bits (`0x7F800001..=0x7F807FFF`) reads as infinity;
//! - a NaN of `0x7FFF8000` or more reads as a zero: the carry runs through the sign, and from
//!   `0xFFFF8000` on out of the word. Arithmetic never makes such a NaN, and the AdamW kernels
//!   write `0x7FC00000`; only a foreign fp32 checkpoint can hold one, and a step takes it for zero
//!   ([`join_written`]).

use super::dispatch::kernel;

/// The bf16 weight (rounded half up) and the low half of a master given by its bits.
#[inline(always)]
pub const fn split(bits: u32) -> (u16, u16) {
    ((bits.wrapping_add(0x8000) >> 16) as u16, bits as u16)
}

/// The bits of the master that [`split`] came from.
#[inline(always)]
pub const fn join_bits(high: u16, low: u16) -> u32 {
    ((high as u32) << 16).wrapping_add(low as i16 as u32)
}

/// The master that [`split`] came from.
#[inline(always)]
pub const fn join(high: u16, low: u16) -> f32 {
    f32::from_bits(join_bits(high, low))
}

/// The master of a weight that a program may have written to since [`split`] made its halves.
///
/// A written weight keeps the low half of the weight before, which moves the master by less than
/// the weight's last bit. Below a zero there is no such number: there the low half is left out.
#[inline(always)]
pub const fn join_written(high: u16, low: u16) -> f32 {
    let below_zero = high & 0x7FFF == 0 && low >= 0x8000;
    join(high, if below_zero { 0 } else { low })
}

kernel! {
    /// [`split`] for slices.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn split_slice / split_slice_with(master: &[f32], high: &mut [u16], low: &mut [u16])
        = split_body;
}

kernel! {
    /// [`join`] for slices.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn join_slice / join_slice_with(high: &[u16], low: &[u16], master: &mut [f32])
        = join_body;
}

#[inline(always)]
fn split_body(master: &[f32], high: &mut [u16], low: &mut [u16]) {
    let length = master.len();
    assert_eq!(high.len(), length, "high half");
    assert_eq!(low.len(), length, "low half");
    for i in 0..length {
        (high[i], low[i]) = split(master[i].to_bits());
    }
}

#[inline(always)]
fn join_body(high: &[u16], low: &[u16], master: &mut [f32]) {
    let length = master.len();
    assert_eq!(high.len(), length, "high half");
    assert_eq!(low.len(), length, "low half");
    for i in 0..length {
        master[i] = join(high[i], low[i]);
    }
}

#[cfg(test)]
mod tests {
    use super::super::Isa;
    use super::super::testing::any_bits;
    use super::*;
    use proptest::prelude::*;

    /// All 2^32 patterns where the build is optimised; in a debug build one in 4099 (a prime, so
    /// every low half occurs).
    #[test]
    fn restores_every_bit_pattern() {
        const CHUNK: usize = 1 << 15;
        let stride: u64 = if cfg!(debug_assertions) { 4099 } else { 1 };
        let mut master = vec![0f32; CHUNK];
        let mut restored = vec![0f32; CHUNK];
        let (mut high, mut low) = (vec![0u16; CHUNK], vec![0u16; CHUNK]);
        let mut seen = 0u64;
        let mut first = 0u64;
        while first < 1 << 32 {
            for (i, value) in master.iter_mut().enumerate() {
                // The last chunk wraps round to patterns already seen.
                *value = f32::from_bits((first + i as u64 * stride) as u32);
            }
            split_slice(&master, &mut high, &mut low);
            join_slice(&high, &low, &mut restored);
            let wrong = master.iter().zip(&restored).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
            assert_eq!(wrong, 0, "in the {CHUNK} patterns from {first:#x}");
            seen += CHUNK as u64;
            first += CHUNK as u64 * stride;
        }
        assert!(seen * stride >= 1 << 32);
    }

    #[test]
    fn the_high_half_rounds_half_up() {
        for (bits, high) in [
            (0x3F80_7FFF, 0x3F80),
            (0x3F80_8000, 0x3F81),
            (0xBF80_8000, 0xBF81),
            (0x7F7F_8000, 0x7F80),
            (0x7FC0_0000, 0x7FC0),
            (0x7FFF_8000, 0x8000),
            (0xFFFF_FFFF, 0x0000),
        ] {
            assert_eq!(split(bits).0, high, "{bits:#010x}");
            let (high, low) = split(bits);
            assert_eq!(join_bits(high, low), bits);
        }
    }

    #[test]
    fn a_written_zero_is_no_nan() {
        for low in [0, 1, 0x7FFF, 0x8000, 0xFFFF] {
            for high in [0x0000, 0x8000, 0x0001, 0x3F80, 0xBF80, 0x7F7F] {
                let master = join_written(high, low);
                let weight = f32::from_bits((high as u32) << 16);
                let last_bit = f32::from_bits((high as u32 & 0x7F80) << 16) / 128.0;
                assert!(
                    (master - weight).abs() <= last_bit.max(f32::from_bits(0x8000)),
                    "{high:#x} {low:#x}"
                );
            }
        }
        // Halves that belong together give the master that they came from.
        for bits in [0x0000_7FFF, 0x8000_7FFF, 0x0000_8000, 0x3F80_8000, 0xBF80_FFFF] {
            let (high, low) = split(bits);
            assert_eq!(join_written(high, low).to_bits(), bits);
        }
    }

    #[test]
    #[should_panic(expected = "low half")]
    fn unequal_lengths_are_refused() {
        split_slice(&[0.0; 3], &mut [0; 3], &mut [0; 2]);
    }

    proptest! {
        #[test]
        fn every_isa_agrees_with_the_scalar_functions(bits in any_bits(0..200)) {
            let master: Vec<f32> = bits.iter().map(|&b| f32::from_bits(b)).collect();
            for isa in Isa::available() {
                let mut high = vec![0; bits.len()];
                let mut low = vec![0; bits.len()];
                let mut restored = vec![0.0; bits.len()];
                split_slice_with(isa, &master, &mut high, &mut low);
                join_slice_with(isa, &high, &low, &mut restored);
                for (i, &b) in bits.iter().enumerate() {
                    prop_assert_eq!((high[i], low[i]), split(b));
                    prop_assert_eq!(restored[i].to_bits(), b);
                }
            }
        }
    }
}
