//! Stochastic rounding to bf16, by random numbers that are a function of the element and the step.
//!
//! The index counts in the whole parameter, also where a rank's store has a share of it: an element gets
//! the same number on whichever rank it lies.

use super::super::bf16::canonical_nan;

/// The random numbers of one step.
///
/// Each is a hash of the seed, the step, the element's index and the rounded output of the element, so that
/// neither the number of threads, nor the cut into chunks, nor the instruction set changes a bit.
#[derive(Clone, Copy)]
pub(super) struct Randomness(u64);

/// [`Randomness`] where the upper half of the index is known: elements `2^32 * n ..`.
#[derive(Clone, Copy)]
pub(super) struct Keys(u32, u32);

impl Randomness {
    pub(super) fn new(seed: u64, step: u64) -> Self {
        Self(mix(mix(seed) ^ step))
    }

    /// The keys of the elements whose index has the same upper half as `element`.
    #[inline(always)]
    pub(super) fn keys(self, element: u64) -> Keys {
        let key = mix(self.0 ^ (element >> 32));
        Keys(key as u32, (key >> 32) as u32)
    }
}

impl Keys {
    /// 16 random bits for each of the states and, last, for the weight of the element with this
    /// lower half of the index.
    ///
    /// Two rounds of a 32-bit mixer (multipliers by C. Wellons), each with a key, give the first two numbers,
    /// and one more product the others: every instruction set can do 32-bit products, and hashing is a fifth
    /// of a step in bf16. Any two of the numbers are independent; all four have 32 bits of randomness between
    /// them.
    #[inline(always)]
    pub(super) fn numbers(self, index: u32) -> [u32; 4] {
        let x = index.wrapping_add(self.0);
        let x = (x ^ (x >> 16)).wrapping_mul(0x7FEB_352D);
        let x = (x ^ (x >> 15) ^ self.1).wrapping_mul(0x846C_A68B);
        let x = x ^ (x >> 16);
        let y = x.wrapping_mul(0x7FEB_352D);
        [x >> 16, x & 0xFFFF, (y ^ (y >> 15)) & 0xFFFF, y >> 16]
    }
}

/// The finalizer of SplitMix64 (Steele et al. 2014).
pub(crate) const fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

/// One of the two bf16 next to `value`, the nearer one with the greater probability, so that the
/// mean is `value`; `random` is below 2^16. A number that is a bf16 already stays, infinities too, and a NaN
/// becomes `0x7FC0`.
#[inline(always)]
pub(super) fn round_stochastic(value: f32, random: u32) -> u16 {
    (stochastic_bits(value, random) >> 16) as u16
}

/// [`round_stochastic`] in the upper half of the result.
#[inline(always)]
pub(super) fn stochastic_bits(value: f32, random: u32) -> u32 {
    // A finite value can carry into infinity only from above the largest finite bf16.
    canonical_nan(value).to_bits() + random
}

#[cfg(test)]
mod tests {
    use super::super::super::widen_bf16;
    use super::*;

    #[test]
    fn bf16_numbers_stay_and_no_finite_one_becomes_infinite_below_the_largest() {
        for high in 0..=u16::MAX {
            let value = widen_bf16(high);
            let expected = if value.is_nan() { 0x7FC0 } else { high };
            for random in [0, 1, 0x7FFF, 0x8000, 0xFFFF] {
                assert_eq!(round_stochastic(value, random), expected, "{high:#06x}");
            }
        }
        for random in [0, 0xFFFF] {
            assert_eq!(round_stochastic(widen_bf16(0xFF7F), random), 0xFF7F);
        }
        let above = f32::from_bits(0x7F7F_8000);
        assert_eq!((round_stochastic(above, 0), round_stochastic(above, 0x8000)), (0x7F7F, 0x7F80));
    }

    /// Random number for output `which` of an element.
    fn draw(seed: u64, step: u64, which: usize, element: u64) -> u32 {
        Randomness::new(seed, step).keys(element).numbers(element as u32)[which]
    }

    /// The mean over many steps, and over many elements, is the value, within four standard
    /// deviations of the mean.
    #[test]
    fn rounding_is_unbiased() {
        const DRAWS: u64 = 100_000;
        for (index, bits) in
            [0x3F80_0001u32, 0x3F80_4000, 0xBF81_8000, 0x0000_F000, 0x7F00_1234].into_iter().enumerate()
        {
            for which in 0..4 {
                for over_steps in [true, false] {
                    let fraction = f64::from(bits & 0xFFFF) / 65536.0;
                    let ups = (0..DRAWS)
                        .filter(|&i| {
                            let (step, element) =
                                if over_steps { (i, index as u64) } else { (index as u64, i) };
                            let random = draw(42, step, which, element);
                            round_stochastic(f32::from_bits(bits), random) != (bits >> 16) as u16
                        })
                        .count();
                    let sigma = (fraction * (1.0 - fraction) / DRAWS as f64).sqrt();
                    let mean = ups as f64 / DRAWS as f64;
                    assert!(
                        (mean - fraction).abs() <= 4.0 * sigma,
                        "{bits:#010x}: {mean} against {fraction}"
                    );
                }
            }
        }
    }

    /// Neighbours, steps, seeds and outputs of an element are independent: every bit of the
    /// difference is set half the time.
    #[test]
    fn random_bits_depend_on_all_of_seed_step_index_and_what_is_rounded() {
        const DRAWS: u32 = 100_000;
        for which in 0..4 {
            let mut differing = [[0u32; 16]; 9];
            for i in 0..DRAWS {
                let element = u64::from(i);
                let here = draw(7, 3, which, element);
                let others = [
                    draw(8, 3, which, element),
                    draw(7, 4, which, element),
                    draw(7, 3, which, element + 1),
                    draw(7, 3, which, element + 16),
                    draw(7, 3, which, element + 256),
                    draw(7, 3, which, element + (1 << 32)),
                    draw(7, 3, (which + 1) % 4, element),
                    draw(7, 3, (which + 2) % 4, element),
                    draw(7, 3, (which + 1) % 4, element + 1),
                ];
                assert!(here < 1 << 16);
                for (counts, other) in differing.iter_mut().zip(others) {
                    for (bit, count) in counts.iter_mut().enumerate() {
                        *count += (here ^ other) >> bit & 1;
                    }
                }
            }
            // Five standard deviations of a fair coin: 576 coins are thrown.
            let allowed = 2.5 * f64::from(DRAWS).sqrt();
            for (other, counts) in differing.iter().enumerate() {
                for (bit, &count) in counts.iter().enumerate() {
                    let off = (f64::from(count) - f64::from(DRAWS) / 2.0).abs();
                    assert!(off <= allowed, "{which}, other {other}, bit {bit}: {count} of {DRAWS}");
                }
            }
        }
    }
}
