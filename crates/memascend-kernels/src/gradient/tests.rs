//! Captures of gradients against plain loops, on every instruction set.

use super::super::testing::{any_bits, bits_of};
use super::super::{Isa, round_bf16, round_f16, stats_f16_with, widen_bf16, widen_f16};
use super::*;
use proptest::prelude::*;

/// Deterministic bf16 gradient of ordinary magnitudes.
fn gradient_bf16(length: usize, seed: u32) -> Vec<u16> {
    let mut state = seed;
    (0..length)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            round_bf16((state >> 8) as f32 / (1 << 24) as f32 - 0.5)
        })
        .collect()
}

fn stats_in_chunks(gradient: &[u16], chunk: usize) -> GradientStats {
    let mut stats = GradientStats::default();
    for chunk in gradient.chunks(chunk) {
        stats_bf16(chunk, &mut stats);
    }
    stats
}

#[test]
fn the_sum_does_not_depend_on_chunks_or_isa() {
    let gradient = gradient_bf16(5 * GRADIENT_BLOCK + 777, 1);
    let whole = stats_in_chunks(&gradient, gradient.len());
    for blocks in 1..6 {
        let chunked = stats_in_chunks(&gradient, blocks * GRADIENT_BLOCK);
        assert_eq!(chunked.sum_squares.to_bits(), whole.sum_squares.to_bits());
    }
    for isa in Isa::available() {
        let mut stats = GradientStats::default();
        stats_bf16_with(isa, &gradient, &mut stats);
        assert_eq!(stats, whole, "{isa:?}");
        let mut copy = vec![0; gradient.len()];
        let mut stats = GradientStats::default();
        copy_bf16_with(isa, &mut copy, &gradient, &mut stats);
        assert_eq!(stats, whole, "{isa:?}");
        assert_eq!(copy, gradient);
    }
    let widened: Vec<f32> = gradient.iter().map(|&g| widen_bf16(g)).collect();
    let mut stats = GradientStats::default();
    stats_f32(&widened, &mut stats);
    assert_eq!(stats, whole, "the same values in fp32 have the same sum");
}

#[test]
fn the_sum_is_the_sum_of_squares() {
    let gradient = gradient_bf16(GRADIENT_BLOCK + 45, 2);
    let expected: f64 = gradient.iter().map(|&g| f64::from(widen_bf16(g)).powi(2)).sum();
    let stats = stats_in_chunks(&gradient, GRADIENT_BLOCK);
    assert!((stats.sum_squares / expected - 1.0).abs() < 1e-12);
    assert!(!stats.non_finite);
}

#[test]
fn one_non_finite_element_is_found_wherever_it_is() {
    let length = 3 * LANES + 5;
    for bad in [0x7F80u16, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF] {
        for at in 0..length {
            let mut gradient = vec![0x7F7Fu16; length]; // the largest finite bf16
            let mut stats = GradientStats::default();
            stats_bf16(&gradient, &mut stats);
            assert!(!stats.non_finite && stats.sum_squares.is_finite());
            gradient[at] = bad;
            stats_bf16(&gradient, &mut stats);
            assert!(stats.non_finite, "{bad:#06x} at {at}");
            assert!(!stats.sum_squares.is_finite());
            let widened: Vec<f32> = gradient.iter().map(|&g| widen_bf16(g)).collect();
            let mut stats = GradientStats::default();
            stats_f32(&widened, &mut stats);
            assert!(stats.non_finite, "{bad:#06x} at {at}");
        }
    }
}

#[test]
fn an_addition_that_overflows_is_reported() {
    let mut dst = vec![0x7F7Fu16; 40];
    let mut stats = GradientStats::default();
    add_bf16(&mut dst, &[0x7F7F; 40], &mut stats);
    assert!(stats.non_finite, "the statistics are those of the sum");
    assert!(dst.iter().all(|&d| d == 0x7F80));
}

/// Sums of fp16 numbers: a tie to the even one, the largest one, overflow, NaN in one spelling.
#[test]
fn fp16_sums_are_rounded_to_nearest_even() {
    let cases = [
        (0x6800u16, 0x3C00u16, 0x6800u16), // 2048 + 1, a tie
        (0x6801, 0x3C00, 0x6802),          // 2050 + 1
        (0x7BFF, 0x4BFF, 0x7BFF),          // just less than half a unit above the largest
        (0x7BFF, 0x4C00, 0x7C00),
        (0x0001, 0x8003, 0x8002), // denormals
        (0x7C00, 0xFC00, 0x7E00),
        (0xFD01, 0x3C00, 0x7E00),
    ];
    for isa in Isa::available() {
        for (a, b, sum) in cases {
            for length in [1, LANES, LANES + 1] {
                let mut dst = vec![a; length];
                let mut stats = GradientStats::default();
                add_f16_with(isa, &mut dst, &vec![b; length], &mut stats);
                assert_eq!(dst, vec![sum; length], "{a:#06x} + {b:#06x} on {isa:?}");
                assert_eq!(stats.non_finite, sum & 0x7C00 == 0x7C00);
            }
        }
    }
}

#[test]
fn an_empty_gradient_changes_nothing() {
    let mut stats = GradientStats { sum_squares: 2.0, non_finite: true };
    copy_f32(&mut [], &[], &mut stats);
    assert_eq!((stats.sum_squares, stats.non_finite), (2.0, true));
}

#[test]
#[should_panic(expected = "gradient lengths")]
fn unequal_lengths_are_refused() {
    copy_bf16(&mut [0; 3], &[0; 4], &mut GradientStats::default());
}

/// The nearest bf16, written apart from the kernels: of the two neighbours the nearer one, or the even
/// one of two as near.
fn round_by_cases(value: f32) -> u16 {
    if value.is_nan() {
        return 0x7FC0;
    }
    let (bits, half) = ((value.to_bits() >> 16) as u16, value.to_bits() & 0xFFFF);
    match half.cmp(&0x8000) {
        std::cmp::Ordering::Less => bits,
        std::cmp::Ordering::Equal => bits + (bits & 1),
        std::cmp::Ordering::Greater => bits + 1, // the next after the largest is infinity
    }
}

#[test]
fn rounding_a_gradient_may_overflow_which_is_reported() {
    let largest = f32::from_bits(0x7F7F_7FFF); // rounds down to the largest bf16
    for (value, expected) in [(largest, 0x7F7F), (f32::MAX, 0x7F80), (-f32::MAX, 0xFF80)] {
        let (mut dst, mut stats) = (vec![0; 40], GradientStats::default());
        round_gradient(&mut dst, &[value; 40], &mut stats);
        assert_eq!(dst, [expected; 40]);
        assert_eq!(stats.non_finite, expected != 0x7F7F, "{value}");
    }
}

/// The definition of [`GradientStats`], lane by lane.
fn reference(values: &[f32]) -> (u64, bool) {
    let mut lanes = [0f64; LANES];
    for (i, &value) in values.iter().enumerate() {
        lanes[i % LANES] += f64::from(value) * f64::from(value);
    }
    for width in [16, 8, 4, 2, 1] {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
    }
    let sum = if lanes[0].is_nan() { f64::NAN } else { lanes[0] };
    (sum.to_bits(), values.iter().any(|value| !value.is_finite()))
}

fn measured(stats: &GradientStats) -> (u64, bool) {
    (stats.sum_squares.to_bits(), stats.non_finite)
}

proptest! {
    #[test]
    fn every_isa_returns_the_reference_in_bf16(bits in any_bits(0..300), other in any_bits(300)) {
        let src: Vec<u16> = bits.iter().map(|b| (b >> 16) as u16).collect();
        let old: Vec<u16> = other[..src.len()].iter().map(|b| (b >> 16) as u16).collect();
        let sum: Vec<u16> = src
            .iter()
            .zip(&old)
            .map(|(&s, &o)| round_bf16(widen_bf16(o) + widen_bf16(s)))
            .collect();
        let widen = |g: &[u16]| g.iter().map(|&g| widen_bf16(g)).collect::<Vec<_>>();
        for isa in Isa::available() {
            let mut dst = old.clone();
            let mut stats = GradientStats::default();
            add_bf16_with(isa, &mut dst, &src, &mut stats);
            prop_assert_eq!(&dst, &sum);
            prop_assert_eq!(measured(&stats), reference(&widen(&sum)));

            let mut stats = GradientStats::default();
            copy_bf16_with(isa, &mut dst, &src, &mut stats);
            prop_assert_eq!(&dst, &src);
            prop_assert_eq!(measured(&stats), reference(&widen(&src)));

            let mut stats = GradientStats::default();
            stats_bf16_with(isa, &src, &mut stats);
            prop_assert_eq!(measured(&stats), reference(&widen(&src)));
        }
    }

    #[test]
    fn every_isa_rounds_an_fp32_gradient_as_the_reference(bits in any_bits(0..300), other in any_bits(300)) {
        let src: Vec<f32> = bits.iter().map(|&b| f32::from_bits(b)).collect();
        let old: Vec<u16> = other[..src.len()].iter().map(|b| (b >> 16) as u16).collect();
        let rounded: Vec<u16> = src.iter().map(|&s| round_by_cases(s)).collect();
        let sum: Vec<u16> = src.iter().zip(&old).map(|(&s, &o)| round_by_cases(widen_bf16(o) + s)).collect();
        let widen = |g: &[u16]| g.iter().map(|&g| widen_bf16(g)).collect::<Vec<_>>();
        for isa in Isa::available() {
            let mut dst = old.clone();
            let mut stats = GradientStats::default();
            round_gradient_sum_with(isa, &mut dst, &src, &mut stats);
            prop_assert_eq!(&dst, &sum);
            prop_assert_eq!(measured(&stats), reference(&widen(&sum)));

            let mut stats = GradientStats::default();
            round_gradient_with(isa, &mut dst, &src, &mut stats);
            prop_assert_eq!(&dst, &rounded);
            prop_assert_eq!(measured(&stats), reference(&widen(&rounded)));
        }
    }

    #[test]
    fn every_isa_returns_the_reference_in_f16(bits in any_bits(0..300), other in any_bits(300)) {
        let src: Vec<u16> = bits.iter().map(|b| (b >> 16) as u16).collect();
        let old: Vec<u16> = other[..src.len()].iter().map(|b| (b >> 16) as u16).collect();
        let sum: Vec<u16> =
            src.iter().zip(&old).map(|(&s, &o)| round_f16(widen_f16(o) + widen_f16(s))).collect();
        let widen = |g: &[u16]| g.iter().map(|&g| widen_f16(g)).collect::<Vec<_>>();
        for isa in Isa::available() {
            let mut dst = old.clone();
            let mut stats = GradientStats::default();
            add_f16_with(isa, &mut dst, &src, &mut stats);
            prop_assert_eq!(&dst, &sum);
            prop_assert_eq!(measured(&stats), reference(&widen(&sum)));

            let mut stats = GradientStats::default();
            copy_f16_with(isa, &mut dst, &src, &mut stats);
            prop_assert_eq!(&dst, &src);
            prop_assert_eq!(measured(&stats), reference(&widen(&src)));

            let mut stats = GradientStats::default();
            stats_f16_with(isa, &src, &mut stats);
            prop_assert_eq!(measured(&stats), reference(&widen(&src)));
        }
    }

    #[test]
    fn every_isa_returns_the_reference_in_f32(bits in any_bits(0..300), other in any_bits(300)) {
        let src: Vec<f32> = bits.iter().map(|&b| f32::from_bits(b)).collect();
        let old: Vec<f32> = other[..src.len()].iter().map(|&b| f32::from_bits(b)).collect();
        let sum: Vec<f32> = src.iter().zip(&old).map(|(s, o)| canonical_nan(o + s)).collect();
        for isa in Isa::available() {
            let mut dst = old.clone();
            let mut stats = GradientStats::default();
            add_f32_with(isa, &mut dst, &src, &mut stats);
            prop_assert_eq!(bits_of(&dst), bits_of(&sum));
            prop_assert_eq!(measured(&stats), reference(&sum));

            let mut stats = GradientStats::default();
            copy_f32_with(isa, &mut dst, &src, &mut stats);
            prop_assert_eq!(bits_of(&dst), bits_of(&src));
            prop_assert_eq!(measured(&stats), reference(&src));

            let mut stats = GradientStats::default();
            stats_f32_with(isa, &src, &mut stats);
            prop_assert_eq!(measured(&stats), reference(&src));
        }
    }
}
