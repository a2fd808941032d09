//! One fused AdamW step, as `torch.optim.AdamW` computes it (`foreach=False`).

use super::bf16::{canonical_nan, widen_bf16};
use super::dispatch::kernel;
use super::split::{join, split};

/// The constants of one AdamW step: computed in fp64 and rounded once to fp32, as PyTorch does.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamwScalars {
    /// Multiplies the gradient first: the clipping coefficient. 1 changes nothing.
    pub(super) grad_scale: f32,
    /// `1 - lr * weight_decay`.
    decay: f32,
    /// The first moment moves from `exp_avg` (or back from the gradient, when `from_gradient`) by this
    /// much of their difference: whichever end is nearer, as `torch.lerp` does.
    lerp: f32,
    from_gradient: bool,
    beta2: f32,
    /// `1 - beta2`, rounded once.
    one_minus_beta2: f32,
    /// `sqrt(1 - beta2^step)`.
    bias_correction2_sqrt: f32,
    eps: f32,
    /// `-lr / (1 - beta1^step)`.
    negative_step_size: f32,
}

impl AdamwScalars {
    /// The constants of step number `step`, the first being 1.
    ///
    /// # Panics
    /// When `step` is 0: the bias corrections would divide by zero.
    pub fn new(
        lr: f64,
        beta1: f64,
        beta2: f64,
        eps: f64,
        weight_decay: f64,
        step: u64,
        grad_scale: f32,
    ) -> Self {
        assert!(step > 0, "the first AdamW step is number 1");
        let step = step as f64;
        let weight = (1.0 - beta1) as f32;
        let from_gradient = weight.abs() >= 0.5;
        let step_size = lr / (1.0 - beta1.powf(step));
        AdamwScalars {
            grad_scale,
            decay: (1.0 - lr * weight_decay) as f32,
            lerp: if from_gradient { weight - 1.0 } else { weight },
            from_gradient,
            beta2: beta2 as f32,
            one_minus_beta2: (1.0 - beta2) as f32,
            bias_correction2_sqrt: (1.0 - beta2.powf(step)).powf(0.5) as f32,
            eps: eps as f32,
            negative_step_size: -step_size as f32,
        }
    }
}

kernel! {
    /// One step on split masters with a bf16 gradient: `weight_hi` and `low` hold the master of
    /// [`split`](super::split()), and `weight_hi` alone is the bf16 weight.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn adamw_bf16_split / adamw_bf16_split_with(
        weight_hi: &mut [u16],
        low: &mut [u16],
        exp_avg: &mut [f32],
        exp_avg_sq: &mut [f32],
        grad: &[u16],
        scalars: &AdamwScalars,
    ) = split_body;
}

kernel! {
    /// One step on fp32 weights with an fp32 gradient.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn adamw_f32 / adamw_f32_with(
        weight: &mut [f32],
        exp_avg: &mut [f32],
        exp_avg_sq: &mut [f32],
        grad: &[f32],
        scalars: &AdamwScalars,
    ) = f32_body;
}

#[inline(always)]
fn split_body(
    weight_hi: &mut [u16],
    low: &mut [u16],
    exp_avg: &mut [f32],
    exp_avg_sq: &mut [f32],
    grad: &[u16],
    scalars: &AdamwScalars,
) {
    let length = grad.len();
    assert_eq!(weight_hi.len(), length, "weight");
    assert_eq!(low.len(), length, "low half");
    assert_eq!(exp_avg.len(), length, "exp_avg");
    assert_eq!(exp_avg_sq.len(), length, "exp_avg_sq");
    let s = *scalars;
    for i in 0..length {
        let master = join(weight_hi[i], low[i]);
        let (master, m, v) = update(master, exp_avg[i], exp_avg_sq[i], widen_bf16(grad[i]), &s);
        (weight_hi[i], low[i]) = split(master.to_bits());
        exp_avg[i] = m;
        exp_avg_sq[i] = v;
    }
}

#[inline(always)]
fn f32_body(
    weight: &mut [f32],
    exp_avg: &mut [f32],
    exp_avg_sq: &mut [f32],
    grad: &[f32],
    scalars: &AdamwScalars,
) {
    let length = grad.len();
    assert_eq!(weight.len(), length, "weight");
    assert_eq!(exp_avg.len(), length, "exp_avg");
    assert_eq!(exp_avg_sq.len(), length, "exp_avg_sq");
    let s = *scalars;
    for i in 0..length {
        (weight[i], exp_avg[i], exp_avg_sq[i]) = update(weight[i], exp_avg[i], exp_avg_sq[i], grad[i], &s);
    }
}

/// One element: (master, exp_avg, exp_avg_sq) after the step. The order of operations is PyTorch's
/// `lerp_`, `mul_().addcmul_`, `sqrt / … + eps` and `addcdiv_`. Two roundings differ: PyTorch's vector code
/// fuses a multiply-add in `lerp_` and in `addcmul_`, and its `sqrt` (MKL) is not correctly rounded.
#[inline(always)]
pub(super) fn update(w: f32, m: f32, v: f32, grad: f32, s: &AdamwScalars) -> (f32, f32, f32) {
    let g = grad * s.grad_scale;
    let (m, v) = moments(m, v, g, s);
    let w = weight(w, m, v, s);
    (canonical_nan(w), canonical_nan(m), canonical_nan(v))
}

/// (exp_avg, exp_avg_sq) after the step, for a scaled gradient.
#[inline(always)]
pub(super) fn moments(m: f32, v: f32, g: f32, s: &AdamwScalars) -> (f32, f32) {
    let nearer = if s.from_gradient { g } else { m };
    // Fused where PyTorch's vector code fuses (lerp_ and addcmul_). `mul_add` rounds once everywhere, so every
    // instruction set gives the same bits; only x86-64 without FMA pays for it.
    let m = s.lerp.mul_add(g - m, nearer);
    let v = (s.one_minus_beta2 * g).mul_add(g, v * s.beta2);
    (m, v)
}

/// The master after the step, for moments after it.
#[inline(always)]
pub(super) fn weight(w: f32, m: f32, v: f32, s: &AdamwScalars) -> f32 {
    let w = w * s.decay;
    let denominator = v.sqrt() / s.bias_correction2_sqrt + s.eps;
    w + s.negative_step_size * m / denominator
}

#[cfg(test)]
mod tests;
