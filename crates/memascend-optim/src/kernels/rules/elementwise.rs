//! The algorithms, on blocks of fp32: gradient in, weight and moments changed in place. Sums of products are fused where
//! PyTorch's vector code fuses them (`add` with `alpha`, `lerp`, `addcmul`), and nowhere else.
//! A NaN has any payload here: storing gives it one.

use super::super::AdamwScalars;
use super::super::adamw;
use super::scalars::{Constants, StepScalars};
use super::{Algorithm, BLOCK, Block, STATES_MAX};

/// What the gradient is before the algorithm sees it: scaled, and with L2 weight decay added.
#[inline(always)]
pub(super) fn prepare(weight: &Block, gradient: &mut Block, scalars: &StepScalars) {
    let l2 = scalars.l2;
    let scale = scalars.signed_scale();
    for g in gradient.iter_mut() {
        *g *= scale;
    }
    // Zero times an infinite weight would be NaN.
    if l2 != 0.0 {
        for i in 0..BLOCK {
            gradient[i] = l2.mul_add(weight[i], gradient[i]);
        }
    }
}

/// One step. `states` beyond those of the algorithm are not looked at.
#[inline(always)]
pub(super) fn apply(
    algorithm: Algorithm,
    weight: &mut Block,
    gradient: &Block,
    states: &mut [Block; STATES_MAX],
    scalars: &StepScalars,
) {
    let [first, second, third] = states;
    match (algorithm, scalars.constants) {
        (Algorithm::AdamW { amsgrad: false }, Constants::Adamw(s)) => {
            adamw_block(weight, gradient, first, second, &s);
        }
        (Algorithm::AdamW { amsgrad: true }, Constants::Adamw(s)) => {
            amsgrad_block(weight, gradient, first, second, third, &s);
        }
        (
            Algorithm::Lion,
            Constants::Lion { beta1, one_minus_beta1, beta2, one_minus_beta2, decay, negative_lr },
        ) => {
            for i in 0..BLOCK {
                let (g, m) = (gradient[i], first[i]);
                let direction = sign(one_minus_beta1.mul_add(g, m * beta1));
                weight[i] = negative_lr.mul_add(direction, weight[i] * decay);
                first[i] = one_minus_beta2.mul_add(g, m * beta2);
            }
        }
        (Algorithm::Sgd { momentum: false }, Constants::Sgd { negative_lr, .. }) => {
            for i in 0..BLOCK {
                weight[i] = negative_lr.mul_add(gradient[i], weight[i]);
            }
        }
        (Algorithm::Sgd { momentum: true }, Constants::Sgd { momentum, undamped, nesterov, negative_lr }) => {
            // The first buffer is the gradient, undamped.
            let begins = scalars.step <= 1;
            for i in 0..BLOCK {
                let g = gradient[i];
                let buffer = if begins { g } else { undamped.mul_add(g, first[i] * momentum) };
                let step = if nesterov { momentum.mul_add(buffer, g) } else { buffer };
                weight[i] = negative_lr.mul_add(step, weight[i]);
                first[i] = buffer;
            }
        }
        _ => panic!("the scalars are those of another algorithm"),
    }
}

#[inline(always)]
fn adamw_block(
    weight: &mut Block,
    gradient: &Block,
    exp_avg: &mut Block,
    exp_avg_sq: &mut Block,
    s: &AdamwScalars,
) {
    for i in 0..BLOCK {
        let (m, v) = adamw::moments(exp_avg[i], exp_avg_sq[i], gradient[i], s);
        weight[i] = adamw::weight(weight[i], m, v, s);
        exp_avg[i] = m;
        exp_avg_sq[i] = v;
    }
}

#[inline(always)]
fn amsgrad_block(
    weight: &mut Block,
    gradient: &Block,
    exp_avg: &mut Block,
    exp_avg_sq: &mut Block,
    max_exp_avg_sq: &mut Block,
    s: &AdamwScalars,
) {
    for i in 0..BLOCK {
        let (m, v) = adamw::moments(exp_avg[i], exp_avg_sq[i], gradient[i], s);
        let before = max_exp_avg_sq[i];
        // A NaN stays the largest, as in `torch.maximum`.
        let largest = if v > before || v.is_nan() { v } else { before };
        weight[i] = adamw::weight(weight[i], m, largest, s);
        exp_avg[i] = m;
        exp_avg_sq[i] = v;
        max_exp_avg_sq[i] = largest;
    }
}

/// 1, -1, or the zero or NaN itself.
#[inline(always)]
fn sign(x: f32) -> f32 {
    if x > 0.0 {
        1.0
    } else if x < 0.0 {
        -1.0
    } else {
        x
    }
}
