//! AdamW against PyTorch and against a plain loop.

use super::super::bf16::{canonical_nan, widen_bf16};
use super::super::split::join_written;
use super::super::testing::{adamw_bf16_split, adamw_f32, any_bits, bits_of};
use super::super::{Isa, StepScalars, join_slice, split_slice};
use super::*;
use proptest::prelude::*;

const LR: f64 = 1e-3;
const EPS: f64 = 1e-8;

fn scalars(step: u64, grad_scale: f32) -> StepScalars {
    StepScalars::adamw(LR, (0.9, 0.999), EPS, 0.01, step).with_grad_scale(grad_scale)
}

/// A step on the widest instruction set.
fn step_f32(w: &mut [f32], m: &mut [f32], v: &mut [f32], g: &[f32], s: &StepScalars) {
    adamw_f32(Isa::best(), w, [m, v], g, 0, s);
}

/// The textbook step in fp64: (master, exp_avg, exp_avg_sq).
fn exact_step(w: f64, m: f64, v: f64, g: f64, betas: (f64, f64), step: u64) -> (f64, f64, f64) {
    let m = betas.0 * m + (1.0 - betas.0) * g;
    let v = betas.1 * v + (1.0 - betas.1) * g * g;
    let m_hat = m / (1.0 - betas.0.powf(step as f64));
    let v_hat = v / (1.0 - betas.1.powf(step as f64));
    (w * (1.0 - LR * 0.01) - LR * m_hat / (v_hat.sqrt() + EPS), m, v)
}

/// Fails when the value is further from the exact one than `ulps` units of fp32 at `scale`.
fn assert_close(value: f32, exact: f64, scale: f64, ulps: f64) {
    let unit = scale.abs().max(f64::from(f32::MIN_POSITIVE)) * f64::from(f32::EPSILON);
    let error = (f64::from(value) - exact).abs() / unit;
    assert!(error <= ulps, "{value} against {exact}: {error} ulp");
}

#[test]
fn one_step_is_the_textbook_step_to_two_ulp() {
    for (beta1, beta2) in [(0.9, 0.999), (0.0, 0.95), (0.3, 0.5), (0.5, 0.99)] {
        for step in [1, 2, 10, 1000, 1_000_000] {
            for i in 0..1000 {
                let x = f64::from(i) - 500.0;
                let mut w = [(x * 0.013).sin() as f32];
                let mut m = [(x * 0.7).cos() as f32 * 1e-3];
                let mut v = [(x * 0.3).cos().powi(2) as f32 * 1e-4];
                let g = [(x * 1.3).sin() as f32 * 1e-2];
                let [w0, m0, v0, g0] = [w[0], m[0], v[0], g[0]].map(f64::from);
                let exact = exact_step(w0, m0, v0, g0, (beta1, beta2), step);
                let s = StepScalars::adamw(LR, (beta1, beta2), EPS, 0.01, step);
                step_f32(&mut w, &mut m, &mut v, &g, &s);
                assert_close(w[0], exact.0, w0.abs() + 1e-3, 2.0);
                assert_close(m[0], exact.1, m0.abs() + g0.abs(), 2.0);
                assert_close(v[0], exact.2, exact.2, 2.0);
            }
        }
    }
}

/// Steps of `torch.optim.AdamW(lr=1e-3, betas=(0.9, 0.999), weight_decay=0.1, foreach=False)` 2.13
/// on weight 1.0 with gradients 0.5, -0.25, 2.0, 1e-3.
#[test]
fn follows_torch_from_the_first_step() {
    let expected = TORCH_WEIGHTS;
    let (mut w, mut m, mut v) = ([1.0f32], [0.0f32], [0.0f32]);
    for (i, grad) in [0.5f32, -0.25, 2.0, 1e-3].into_iter().enumerate() {
        let s = StepScalars::adamw(LR, (0.9, 0.999), EPS, 0.1, i as u64 + 1);
        step_f32(&mut w, &mut m, &mut v, &[grad], &s);
        let ulps = w[0].to_bits().abs_diff(expected[i]);
        assert!(ulps <= 1, "step {}: {ulps} ulp", i + 1);
    }
}
const TORCH_WEIGHTS: [u32; 4] = [0x3F7F_B7E9, 0x3F7F_9FE9, 0x3F7F_6D69, 0x3F7F_42DA];

#[test]
fn no_decay_and_no_gradient_leave_the_weight_alone() {
    let s = StepScalars::adamw(LR, (0.9, 0.999), EPS, 0.0, 1);
    let mut w = [1.5f32, -0.0, f32::MIN_POSITIVE / 4.0];
    let before = bits_of(&w);
    step_f32(&mut w, &mut [0.0; 3], &mut [0.0; 3], &[0.0; 3], &s);
    assert_eq!(bits_of(&w)[0], before[0]);
    assert_eq!(bits_of(&w)[2], before[2], "denormals are kept");
}

#[test]
fn the_gradient_scale_is_a_product_in_f32() {
    let grad: Vec<f32> = (0..100).map(|i| (i as f32 - 50.0) * 0.37).collect();
    let scaled: Vec<f32> = grad.iter().map(|g| g * 0.123).collect();
    let run = |grad: &[f32], scale| {
        let (mut w, mut m, mut v) = (vec![0.5; 100], vec![0.1; 100], vec![0.2; 100]);
        step_f32(&mut w, &mut m, &mut v, grad, &scalars(3, scale));
        (bits_of(&w), bits_of(&m), bits_of(&v))
    };
    assert_eq!(run(&grad, 0.123), run(&scaled, 1.0));
}

#[test]
fn a_nan_never_becomes_a_number() {
    // `split` alone would turn this NaN's bf16 weight into zero.
    let (mut hi, mut low) = ([0x7F80u16; 40], [0x0001u16; 40]);
    let (mut m, mut v) = ([0.0; 40], [0.0; 40]);
    let grad = [0xFFFFu16; 40];
    adamw_bf16_split(Isa::best(), [&mut hi, &mut low], [&mut m, &mut v], &grad, 0, &scalars(1, 1.0));
    assert!(hi.iter().all(|&h| h == 0x7FC0) && low.iter().all(|&l| l == 0));
    assert!(m.iter().chain(&v).all(|x| x.to_bits() == 0x7FC0_0000));
}

#[test]
#[should_panic(expected = "number 1")]
fn step_zero_is_refused() {
    scalars(0, 1.0);
}

#[test]
#[should_panic(expected = "exp_avg_sq")]
fn unequal_lengths_are_refused() {
    step_f32(&mut [0.0; 4], &mut [0.0; 4], &mut [0.0; 3], &[0.0; 4], &scalars(1, 1.0));
}

/// One element by itself: (master, exp_avg, exp_avg_sq).
fn update(w: f32, m: f32, v: f32, g: f32, s: &AdamwScalars) -> [f32; 3] {
    let (m, v) = moments(m, v, g, s);
    [weight(w, m, v, s), m, v].map(canonical_nan)
}

fn floats(bits: &[u32]) -> Vec<f32> {
    bits.iter().map(|&b| f32::from_bits(b)).collect()
}

proptest! {
    /// Baseline is the reference, element by element so that nothing is vectorised.
    #[test]
    fn every_isa_returns_the_same_bits(
        weight in any_bits(0..200),
        moment in any_bits(200),
        square in any_bits(200),
        gradient in any_bits(200),
        step in 1u64..100_000,
        beta1 in prop::sample::select(vec![0.0, 0.4, 0.9]),
        scale in prop::sample::select(vec![1.0f32, 0.3, 1e-3]),
        first in 0u64..1000,
    ) {
        let length = weight.len();
        let s = StepScalars::adamw(LR, (beta1, 0.999), EPS, 0.1, step).with_grad_scale(scale);
        let plain = AdamwScalars::new(LR, (beta1, 0.999), EPS, 0.1, step);
        let weight = floats(&weight);
        let moment = floats(&moment[..length]);
        let square = floats(&square[..length]);
        let low_gradient: Vec<u16> = gradient[..length].iter().map(|g| (g >> 16) as u16).collect();
        let gradient: Vec<f32> = low_gradient.iter().map(|&g| widen_bf16(g)).collect();

        let (mut w, mut m, mut v) = (weight.clone(), moment.clone(), square.clone());
        for i in 0..length {
            [w[i], m[i], v[i]] = update(w[i], m[i], v[i], gradient[i] * scale, &plain);
        }
        let expected = (bits_of(&w), bits_of(&m), bits_of(&v));

        for isa in Isa::available() {
            let (mut w, mut m, mut v) = (weight.clone(), moment.clone(), square.clone());
            adamw_f32(isa, &mut w, [&mut m, &mut v], &gradient, first, &s);
            prop_assert_eq!(&(bits_of(&w), bits_of(&m), bits_of(&v)), &expected);

            // The split form holds the same master, but for a NaN that reads as a written zero.
            let (mut m, mut v) = (moment.clone(), square.clone());
            let (mut hi, mut low) = (vec![0; length], vec![0; length]);
            split_slice(&weight, &mut hi, &mut low);
            let read: Vec<f32> = hi.iter().zip(&low).map(|(&hi, &low)| join_written(hi, low)).collect();
            let weights = (0..length).map(|i| {
                let [w, _, _] = update(read[i], moment[i], square[i], gradient[i] * scale, &plain);
                w.to_bits()
            });
            let expected = (weights.collect::<Vec<u32>>(), expected.1.clone(), expected.2.clone());
            adamw_bf16_split(isa, [&mut hi, &mut low], [&mut m, &mut v], &low_gradient, first, &s);
            join_slice(&hi, &low, &mut w);
            prop_assert_eq!((bits_of(&w), bits_of(&m), bits_of(&v)), expected);
        }
    }
}
