//! The overflow check against plain loops, on every instruction set.

use super::super::testing::any_bits;
use super::super::{
    Isa, round_bf16, round_f16, stats_bf16, stats_f32, stats_f32_with, widen_bf16, widen_f16,
};
use super::*;
use proptest::prelude::*;

#[test]
fn every_pattern_is_judged_by_its_exponent_wherever_it_is() {
    let lengths = [1, 2, 31, 32, 33, 63, 64, 65, 3 * 64 + 5];
    for isa in Isa::available() {
        for bits in 0..=u16::MAX {
            let length = lengths[usize::from(bits) % lengths.len()];
            let mut elements = vec![0x0001u16; length];
            elements[usize::from(bits >> 3) % length] = bits;
            let mut found = false;
            check_bf16_with(isa, &elements, &mut found);
            assert_eq!(found, !widen_bf16(bits).is_finite(), "bf16 {bits:#06x} {isa:?}");
            let mut found = false;
            check_f16_with(isa, &elements, &mut found);
            assert_eq!(found, !f64::from(widen_f16(bits)).is_finite(), "fp16 {bits:#06x} {isa:?}");
            let widened: Vec<f32> = elements.iter().map(|&element| widen_bf16(element)).collect();
            let mut found = false;
            check_f32_with(isa, &widened, &mut found);
            assert_eq!(found, !widen_bf16(bits).is_finite(), "fp32 {bits:#06x} {isa:?}");
        }
    }
}

#[test]
fn one_bad_element_is_found_at_every_position_of_a_long_array() {
    let length = CHECK_ELEMENTS + 2 * 64 + 3;
    let mut elements = vec![f32::MAX; length];
    for at in (0..length).step_by(97).chain(length - 600..length) {
        elements[at] = f32::NEG_INFINITY;
        let mut found = false;
        check_f32(&elements, &mut found);
        assert!(found, "at {at}");
        elements[at] = -f32::MAX;
        let mut found = false;
        check_f32(&elements, &mut found);
        assert!(!found, "at {at}");
    }
}

#[test]
fn fp16_has_the_sum_of_its_values_in_fp32() {
    let elements: Vec<u16> = (0..=u16::MAX).filter(|&bits| f64::from(widen_f16(bits)).is_finite()).collect();
    let widened: Vec<f32> = elements.iter().map(|&bits| widen_f16(bits)).collect();
    let mut expected = GradientStats::default();
    stats_f32(&widened, &mut expected);
    for isa in Isa::available() {
        let mut stats = GradientStats::default();
        stats_f16_with(isa, &elements, &mut stats);
        assert_eq!(stats, expected, "{isa:?}");
    }
    let exact: f64 = elements.iter().map(|&bits| f64::from(widen_f16(bits)).powi(2)).sum();
    assert!((expected.sum_squares / exact - 1.0).abs() < 1e-12);
    assert!(!expected.non_finite);
}

/// The statistics of fp16 and of bf16 on an instruction set, and of the same numbers in fp32.
fn measure_halves(isa: Isa, halves: &[u16]) -> [((u64, bool), (u64, bool)); 2] {
    let of = |sum: fn(Isa, &[u16], &mut GradientStats), widen: fn(u16) -> f32| {
        let (mut stats, mut expected) = (GradientStats::default(), GradientStats::default());
        sum(isa, halves, &mut stats);
        let wide: Vec<f32> = halves.iter().map(|&half| widen(half)).collect();
        stats_f32_with(Isa::Baseline, &wide, &mut expected);
        (measured(&stats), measured(&expected))
    };
    [of(stats_f16_with, widen_f16), of(sum_bf16_with, widen_bf16)]
}

/// From subnormals to the largest, whose squares no fp32 holds, in an order without pattern; at every
/// place in a word, and in more than a block.
#[test]
fn all_finite_numbers_have_the_sum_of_fp32_whatever_their_alignment() {
    for exponent in [0x7C00, 0x7F80] {
        let finite = |bits: &u16| bits & exponent != exponent;
        let scattered = (0..=u16::MAX).map(|i| i.wrapping_mul(40_503)).filter(finite);
        let elements: Vec<u16> = scattered.chain((0..=u16::MAX).filter(finite)).collect();
        for isa in Isa::available() {
            for start in 0..5 {
                for length in [0, 1, 31, 32, 33, 95, GRADIENT_BLOCK - 1, GRADIENT_BLOCK + 97] {
                    for (stats, expected) in measure_halves(isa, &elements[start..start + length]) {
                        assert_eq!(stats, expected, "{isa:?}, {length} from {start}");
                    }
                }
            }
        }
    }
}

#[test]
fn one_bad_element_is_found_wherever_it_is_in_a_sum() {
    for isa in Isa::available() {
        for bad in [0x7C00, 0xFC00, 0x7C01, 0xFFFF, 0x7F80, 0xFF80, 0x7F81] {
            for length in [32, 96, 101] {
                for at in 0..length {
                    let mut elements = vec![0x0001; length];
                    elements[at] = bad;
                    for (stats, expected) in measure_halves(isa, &elements) {
                        assert_eq!(stats, expected, "{bad:#06x} at {at} of {length}, {isa:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_product_that_overflows_is_not_an_overflow_of_the_gradient() {
    let mut elements = vec![f32::MAX; 40];
    let mut found = false;
    unscale_f32(&mut elements, 2.0, &mut found);
    assert!(!found);
    assert_eq!(elements, [f32::INFINITY; 40]);
    unscale_f32(&mut elements, 0.0, &mut found);
    assert!(found && elements.iter().all(|element| element.is_nan()));
}

fn measured(stats: &GradientStats) -> (u64, bool) {
    (stats.sum_squares.to_bits(), stats.non_finite)
}

proptest! {
    #[test]
    fn sixteen_bits_are_measured_the_same_on_every_isa(bits in any_bits(0..300)) {
        let halves: Vec<u16> = bits.iter().map(|b| (b >> 16) as u16).collect();
        let wide: Vec<f32> = halves.iter().map(|&h| widen_f16(h)).collect();
        let mut expected = GradientStats::default();
        stats_f32(&wide, &mut expected);
        for isa in Isa::available() {
            let mut stats = GradientStats::default();
            stats_f16_with(isa, &halves, &mut stats);
            prop_assert_eq!(measured(&stats), measured(&expected));
        }
        let mut expected = GradientStats::default();
        stats_bf16(&halves, &mut expected);
        for isa in Isa::available() {
            let mut stats = GradientStats::default();
            sum_bf16_with(isa, &halves, &mut stats);
            prop_assert_eq!(measured(&stats), measured(&expected));
        }
    }

    /// Without non-finite numbers: they would be in nearly every array, and the sum would not matter.
    #[test]
    fn finite_numbers_are_measured_the_same_on_every_isa(bits in any_bits(0..3000), start in 0..4usize) {
        for exponent in [0x7C00, 0x7F80] {
            let halves: Vec<u16> =
                bits.iter().map(|b| (b >> 16) as u16).filter(|half| half & exponent != exponent).collect();
            for isa in Isa::available() {
                for (stats, expected) in measure_halves(isa, &halves[start.min(halves.len())..]) {
                    prop_assert_eq!(stats, expected);
                }
            }
        }
    }

    #[test]
    fn unscaling_is_one_rounded_product_on_every_isa(bits in any_bits(0..3000), scale in -4.0f32..4.0) {
        let halves: Vec<u16> = bits.iter().map(|b| (b >> 16) as u16).collect();
        let wide: Vec<f32> = bits.iter().map(|&b| f32::from_bits(b)).collect();
        for isa in Isa::available() {
            let (mut dst, mut found) = (wide.clone(), false);
            unscale_f32_with(isa, &mut dst, scale, &mut found);
            let expected: Vec<u32> = wide.iter().map(|v| canonical_nan(v * scale).to_bits()).collect();
            prop_assert_eq!(dst.iter().map(|v| v.to_bits()).collect::<Vec<_>>(), expected);
            prop_assert_eq!(found, wide.iter().any(|v| !v.is_finite()));

            let (mut dst, mut found) = (halves.clone(), false);
            unscale_bf16_with(isa, &mut dst, scale, &mut found);
            let expected: Vec<u16> = halves.iter().map(|&h| round_bf16(widen_bf16(h) * scale)).collect();
            prop_assert_eq!(dst, expected);
            prop_assert_eq!(found, halves.iter().any(|&h| !widen_bf16(h).is_finite()));

            let (mut dst, mut found) = (halves.clone(), false);
            unscale_f16_with(isa, &mut dst, scale, &mut found);
            let expected: Vec<u16> = halves.iter().map(|&h| round_f16(widen_f16(h) * scale)).collect();
            prop_assert_eq!(dst, expected);
            prop_assert_eq!(found, halves.iter().any(|&h| !widen_f16(h).is_finite()));
        }
    }
}
