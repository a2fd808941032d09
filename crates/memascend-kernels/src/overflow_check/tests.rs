//! The overflow check over lists of tensors, on any number of threads.

use super::*;
use crate::{round_bf16, widen_bf16};

fn numbers(length: usize, mut state: u32) -> Vec<f32> {
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 24) as f32 - 0.5
    };
    (0..length).map(|_| next()).collect()
}

fn tensor<T>(elements: &mut [T], dtype: Dtype) -> CheckedTensor<'_> {
    // SAFETY: the slice is borrowed for as long as the tensor, and `T` is the type of `dtype`.
    unsafe { CheckedTensor::new(dtype, elements.len(), elements.as_mut_ptr().cast()) }
}

const LENGTHS: [usize; 8] =
    [0, 1, 777, GRADIENT_BLOCK, 0, 3 * GRADIENT_BLOCK + 5, 2 * GRADIENT_BLOCK, 21 * GRADIENT_BLOCK - 1];

#[test]
fn sums_are_those_of_whole_tensors_on_any_number_of_threads() {
    let mut lists: Vec<Vec<f32>> =
        LENGTHS.iter().zip(1..).map(|(&length, seed)| numbers(length, seed)).collect();
    let expected: Vec<u64> = lists
        .iter()
        .map(|list| {
            let mut stats = GradientStats::default();
            stats_f32(list, &mut stats);
            stats.sum_squares.to_bits()
        })
        .collect();
    let tensors: Vec<_> = lists.iter_mut().map(|list| tensor(list, Dtype::F32)).collect();
    for threads in [0, 1, 2, 3, 7, 16] {
        let mut sums = vec![1.0; tensors.len()];
        let outcome = check_overflow(&tensors, CheckedWork::Look, threads, &mut sums);
        assert!(!outcome.non_finite);
        assert_eq!(outcome.blocks, 30);
        assert_eq!(sums.iter().map(|sum| sum.to_bits()).collect::<Vec<_>>(), expected, "{threads} threads");
    }
}

#[test]
fn dtypes_mix_and_unscaling_reaches_everything() {
    let values = numbers(5 * GRADIENT_BLOCK + 3, 9);
    let mut single = values.clone();
    let mut brain: Vec<u16> = values.iter().map(|&v| round_bf16(v)).collect();
    let (before, mut half) = (brain.clone(), vec![0x3C00u16; GRADIENT_BLOCK + 1]);
    brain[7] = 0x7F80;
    let mut sums = [0.0; 3];
    let outcome = {
        let tensors =
            [tensor(&mut single, Dtype::F32), tensor(&mut brain, Dtype::Bf16), tensor(&mut half, Dtype::F16)];
        check_overflow(&tensors, CheckedWork::Unscale(0.25), 3, &mut sums)
    };
    assert_eq!(outcome, CheckedOutcome { non_finite: true, blocks: 14 });
    assert!(sums.iter().all(|sum| sum.is_nan()));
    assert!(single.iter().zip(&values).all(|(now, then)| *now == then * 0.25));
    assert!(half.iter().all(|&bits| bits == 0x3400));
    assert_eq!(brain[7], 0x7F80);
    let expected = before.iter().map(|&bits| round_bf16(widen_bf16(bits) * 0.25));
    assert!(brain.iter().zip(expected).enumerate().all(|(i, (now, then))| i == 7 || *now == then));
}

#[test]
fn an_early_infinity_ends_the_check_early() {
    let mut values = numbers(64 * GRADIENT_BLOCK, 5);
    values[100] = f32::INFINITY;
    for mut sums in [vec![], vec![0.0]] {
        let work = CheckedWork::Look;
        let outcome = check_overflow(&[tensor(&mut values, Dtype::F32)], work, 1, &mut sums);
        assert_eq!(outcome, CheckedOutcome { non_finite: true, blocks: 1 });
        assert!(sums.iter().all(|sum| sum.is_nan()));
        for threads in [2, 5] {
            let outcome = check_overflow(&[tensor(&mut values, Dtype::F32)], work, threads, &mut sums);
            assert!(outcome.non_finite && outcome.blocks >= 1);
        }
    }
    values[100] = 0.0;
    let last = values.len() - 1;
    values[last] = f32::NAN;
    let outcome = check_overflow(&[tensor(&mut values, Dtype::F32)], CheckedWork::Look, 1, &mut []);
    assert_eq!(outcome, CheckedOutcome { non_finite: true, blocks: 64 });
    // Another thread may still be in a block before the last one, and ends there.
    let outcome = check_overflow(&[tensor(&mut values, Dtype::F32)], CheckedWork::Look, 2, &mut []);
    assert!(outcome.non_finite && (1..=64).contains(&outcome.blocks));
}

#[test]
fn a_thread_that_runs_ahead_waits_for_the_sum_before_it() {
    // One slow tensor after another: many more blocks than the ring holds, taken by more threads
    // than processors.
    let mut values = numbers(3 * GRADIENT_BLOCK, 3);
    let expected: f64 = {
        let mut stats = GradientStats::default();
        stats_f32(&values, &mut stats);
        stats.sum_squares
    };
    let one = tensor(&mut values, Dtype::F32);
    let tensors = vec![one; 400];
    let mut sums = vec![0.0; tensors.len()];
    check_overflow(&tensors, CheckedWork::Look, 32, &mut sums);
    assert!(sums.iter().all(|sum| sum.to_bits() == expected.to_bits()));
}
