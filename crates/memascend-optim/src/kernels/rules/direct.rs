//! AdamW with fp32 moments, on fp32 weights or split masters: the commonest rules, and those that move the most bytes. Nothing needs
//! more than its own element, so no block is staged, which takes less time.

use super::super::AdamwScalars;
use super::super::adamw::update;
use super::super::split::{join, split};
use super::super::widen_bf16;
use super::scalars::{Constants, StepScalars};
use super::{Algorithm, Moments, Rule, Weight};

/// Takes the step if it is one of those, and says whether it did. Lengths are checked.
#[inline(always)]
pub(super) fn step(
    rule: Rule,
    weight: &mut [u8],
    planes: &mut [&mut [u8]],
    gradient: &[u8],
    scalars: &StepScalars,
) -> bool {
    let (Algorithm::AdamW { amsgrad: false }, Moments::F32) = (rule.algorithm, rule.moments) else {
        return false;
    };
    let (Constants::Adamw(mut s), true) = (scalars.constants, scalars.l2 == 0.0) else {
        return false;
    };
    s.grad_scale = scalars.signed_scale();
    match (rule.weight, planes) {
        (Weight::F32, [m, v]) => f32_body(
            weight.as_chunks_mut().0,
            m.as_chunks_mut().0,
            v.as_chunks_mut().0,
            gradient.as_chunks().0,
            &s,
        ),
        (Weight::Bf16Split, [m, v, low]) => split_body(
            weight.as_chunks_mut().0,
            low.as_chunks_mut().0,
            m.as_chunks_mut().0,
            v.as_chunks_mut().0,
            gradient.as_chunks().0,
            &s,
        ),
        _ => return false,
    }
    true
}

#[inline(always)]
fn f32_body(
    weight: &mut [[u8; 4]],
    exp_avg: &mut [[u8; 4]],
    exp_avg_sq: &mut [[u8; 4]],
    gradient: &[[u8; 4]],
    s: &AdamwScalars,
) {
    let length = gradient.len();
    // Equal already; said again for the compiler, which then leaves out the bounds checks.
    assert!(weight.len() == length && exp_avg.len() == length && exp_avg_sq.len() == length);
    for i in 0..length {
        let [w, m, v, g] = [weight[i], exp_avg[i], exp_avg_sq[i], gradient[i]].map(f32::from_ne_bytes);
        let (w, m, v) = update(w, m, v, g, s);
        (weight[i], exp_avg[i], exp_avg_sq[i]) = (w.to_ne_bytes(), m.to_ne_bytes(), v.to_ne_bytes());
    }
}

#[inline(always)]
fn split_body(
    high: &mut [[u8; 2]],
    low: &mut [[u8; 2]],
    exp_avg: &mut [[u8; 4]],
    exp_avg_sq: &mut [[u8; 4]],
    gradient: &[[u8; 2]],
    s: &AdamwScalars,
) {
    let length = gradient.len();
    assert!(high.len() == length && low.len() == length);
    assert!(exp_avg.len() == length && exp_avg_sq.len() == length);
    for i in 0..length {
        let master = join(u16::from_ne_bytes(high[i]), u16::from_ne_bytes(low[i]));
        let (m, v) = (f32::from_ne_bytes(exp_avg[i]), f32::from_ne_bytes(exp_avg_sq[i]));
        let (master, m, v) = update(master, m, v, widen_bf16(u16::from_ne_bytes(gradient[i])), s);
        let halves = split(master.to_bits());
        (high[i], low[i]) = (halves.0.to_ne_bytes(), halves.1.to_ne_bytes());
        (exp_avg[i], exp_avg_sq[i]) = (m.to_ne_bytes(), v.to_ne_bytes());
    }
}
