//! The constants of a step.

use super::super::adamw::AdamwScalars;
use super::Algorithm;

/// The constants of one step of a parameter: computed in fp64 and rounded once to fp32, as PyTorch
/// does.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepScalars {
    /// Multiplies the gradient first.
    pub(super) grad_scale: f32,
    pub(super) maximize: bool,
    /// Times the weight, added to the gradient (L2); 0 for decoupled weight decay.
    pub(super) l2: f32,
    /// Whether there is any: asked in the loop, where a comparison of fp32 takes longer.
    pub(super) has_l2: bool,
    pub(super) seed: u64,
    pub(super) step: u64,
    pub(super) constants: Constants,
}

/// Constants of one algorithm alone.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Constants {
    Adamw(AdamwScalars),
    Lion {
        beta1: f32,
        one_minus_beta1: f32,
        beta2: f32,
        one_minus_beta2: f32,
        /// `1 - lr * weight_decay`.
        decay: f32,
        negative_lr: f32,
    },
    Sgd {
        momentum: f32,
        /// `1 - dampening`.
        undamped: f32,
        nesterov: bool,
        negative_lr: f32,
    },
    Apollo {
        /// `-lr * weight_decay`.
        negative_decay: f32,
    },
}

impl StepScalars {
    /// Step number `step` (the first is 1) of `torch.optim.AdamW`: the weight decays by itself.
    ///
    /// # Panics
    /// When `step` is 0.
    pub fn adamw(lr: f64, betas: (f64, f64), eps: f64, weight_decay: f64, step: u64) -> Self {
        let constants = AdamwScalars::new(lr, betas, eps, weight_decay, step);
        Self::new(Constants::Adamw(constants), 0.0, step)
    }

    /// Step number `step` (the first is 1) of `torch.optim.Adam`: weight decay is part of the
    /// gradient.
    ///
    /// # Panics
    /// When `step` is 0.
    pub fn adam(lr: f64, betas: (f64, f64), eps: f64, weight_decay: f64, step: u64) -> Self {
        let constants = AdamwScalars::new(lr, betas, eps, 0.0, step);
        Self::new(Constants::Adamw(constants), weight_decay, step)
    }

    /// Step number `step` of Lion (Chen et al. 2023, arXiv 2302.06675), with decoupled weight
    /// decay.
    pub fn lion(lr: f64, betas: (f64, f64), weight_decay: f64, step: u64) -> Self {
        let constants = Constants::Lion {
            beta1: betas.0 as f32,
            one_minus_beta1: (1.0 - betas.0) as f32,
            beta2: betas.1 as f32,
            one_minus_beta2: (1.0 - betas.1) as f32,
            decay: (1.0 - lr * weight_decay) as f32,
            negative_lr: -lr as f32,
        };
        Self::new(constants, 0.0, step)
    }

    /// Step number `step` of `torch.optim.SGD`; at step 1 the momentum buffer becomes the gradient.
    /// `momentum`, `dampening` and `nesterov` mean nothing to
    /// [`Algorithm::Sgd`](super::Algorithm::Sgd) without momentum.
    pub fn sgd(lr: f64, momentum: f64, dampening: f64, weight_decay: f64, nesterov: bool, step: u64) -> Self {
        let constants = Constants::Sgd {
            momentum: momentum as f32,
            undamped: (1.0 - dampening) as f32,
            nesterov,
            negative_lr: -lr as f32,
        };
        Self::new(constants, weight_decay, step)
    }

    /// Step number `step` of APOLLO on the elements of a matrix: their factors come with
    /// [`step_channels`](super::step_channels), and the weight decays by itself afterwards.
    pub fn apollo(lr: f64, weight_decay: f64, step: u64) -> Self {
        Self::new(Constants::Apollo { negative_decay: (-lr * weight_decay) as f32 }, 0.0, step)
    }

    /// Step number `step` of an algorithm with usual constants, for tests and benchmarks.
    pub fn usual(algorithm: Algorithm, lr: f64, weight_decay: f64, step: u64) -> Self {
        match algorithm {
            Algorithm::AdamW { .. } => Self::adamw(lr, (0.9, 0.95), 1e-8, weight_decay, step),
            Algorithm::Lion => Self::lion(lr / 10.0, (0.9, 0.99), weight_decay, step),
            Algorithm::Sgd { .. } => Self::sgd(lr, 0.9, 0.1, weight_decay, false, step),
            Algorithm::Apollo => Self::apollo(lr, weight_decay, step),
        }
    }

    fn new(constants: Constants, l2: f64, step: u64) -> Self {
        let l2 = l2 as f32;
        Self { grad_scale: 1.0, maximize: false, l2, has_l2: l2 != 0.0, seed: 0, step, constants }
    }

    /// Multiplies the gradient by `scale` first: the clipping coefficient, and one over a loss
    /// scale. 1 changes nothing.
    #[must_use]
    pub fn with_grad_scale(self, scale: f32) -> Self {
        Self { grad_scale: scale, ..self }
    }

    /// Follows the gradient upwards.
    #[must_use]
    pub fn maximizing(self) -> Self {
        Self { maximize: true, ..self }
    }

    /// Factor of the gradient. A change of sign is exact, so it may come with the
    /// scale.
    pub(super) fn signed_scale(&self) -> f32 {
        if self.maximize { -self.grad_scale } else { self.grad_scale }
    }

    /// Seeds stochastic rounding: a number of the run and of the tensor, the same in every step.
    /// Two tensors with the same seed round by the same random numbers.
    #[must_use]
    pub fn with_seed(self, seed: u64) -> Self {
        Self { seed, ..self }
    }
}
