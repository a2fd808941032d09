//! AdamW on one element, as `torch.optim.AdamW` computes it (`foreach=False`): the order of operations
//! follows its `lerp_`, `mul_().addcmul_`, `sqrt / … + eps` and `addcdiv_`. One rounding differs: PyTorch's
//! `sqrt` (MKL) is not correctly rounded.

/// The constants of one AdamW step: computed in fp64 and rounded once to fp32, as PyTorch does.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct AdamwScalars {
    /// `1 - lr * weight_decay`.
    decay: f32,
    /// The first moment moves from `exp_avg` (or back from the gradient, when `from_gradient`) by
    /// this much of their difference: whichever end is nearer, as `torch.lerp` does.
    lerp: f32,
    pub(super) from_gradient: bool,
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
    pub(super) fn new(lr: f64, betas: (f64, f64), eps: f64, weight_decay: f64, step: u64) -> Self {
        assert!(step > 0, "the first AdamW step is number 1");
        let (step, (beta1, beta2)) = (step as f64, betas);
        let weight = (1.0 - beta1) as f32;
        let from_gradient = weight.abs() >= 0.5;
        let step_size = lr / (1.0 - beta1.powf(step));
        AdamwScalars {
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

/// (exp_avg, exp_avg_sq) after the step, for a scaled gradient.
#[inline(always)]
pub(super) fn moments(m: f32, v: f32, g: f32, s: &AdamwScalars) -> (f32, f32) {
    let nearer = if s.from_gradient { g } else { m };
    // Fused where PyTorch's vector code fuses (lerp_ and addcmul_). `mul_add` rounds once
    // everywhere, so every instruction set gives the same bits; only x86-64 without FMA pays for
    // it.
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
