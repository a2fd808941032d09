//! The algorithms, on an element in fp32: gradient in, weight and moments out. Sums of products are
//! fused where PyTorch's vector code fuses them (`add` with `alpha`, `lerp`, `addcmul`), and
//! nowhere else. A NaN has any payload here: storing gives it one.

use super::super::adamw::{self, AdamwScalars};
use super::STATES_MAX;
use super::scalars::StepScalars;

/// The update of one element.
pub(super) trait Update: Sized {
    /// How many states it has; the others are zeros, and are not kept.
    const STATES: usize;
    /// Weight and states after the step, for a gradient that is [`prepare`]d.
    fn step(&self, w: f32, g: f32, states: [f32; STATES_MAX]) -> (f32, [f32; STATES_MAX]);

    /// Whether it has none of the choices that are seldom made, for which there are loops of their own.
    fn is_common(&self) -> bool {
        true
    }
    /// The same, with the other choices known to the compiler.
    #[inline(always)]
    fn common(self) -> Self {
        self
    }
}

/// The gradient that the algorithm sees: scaled, and with L2 weight decay added.
#[inline(always)]
pub(super) fn prepare(w: f32, g: f32, scalars: &StepScalars) -> f32 {
    let g = g * scalars.signed_scale();
    // Zero times an infinite weight would be NaN.
    if scalars.has_l2 { scalars.l2.mul_add(w, g) } else { g }
}

pub(super) struct Adamw(pub AdamwScalars);

impl Update for Adamw {
    const STATES: usize = 2;
    fn is_common(&self) -> bool {
        !self.0.from_gradient
    }
    #[inline(always)]
    fn common(mut self) -> Self {
        self.0.from_gradient = false;
        self
    }
    #[inline(always)]
    fn step(&self, w: f32, g: f32, [m, v, _]: [f32; STATES_MAX]) -> (f32, [f32; STATES_MAX]) {
        let (m, v) = adamw::moments(m, v, g, &self.0);
        (adamw::weight(w, m, v, &self.0), [m, v, 0.0])
    }
}

pub(super) struct Amsgrad(pub AdamwScalars);

impl Update for Amsgrad {
    const STATES: usize = 3;
    fn is_common(&self) -> bool {
        !self.0.from_gradient
    }
    #[inline(always)]
    fn common(mut self) -> Self {
        self.0.from_gradient = false;
        self
    }
    #[inline(always)]
    fn step(&self, w: f32, g: f32, [m, v, before]: [f32; STATES_MAX]) -> (f32, [f32; STATES_MAX]) {
        let (m, v) = adamw::moments(m, v, g, &self.0);
        // A NaN stays the largest, as in `torch.maximum`.
        let largest = if v > before || v.is_nan() { v } else { before };
        (adamw::weight(w, m, largest, &self.0), [m, v, largest])
    }
}

pub(super) struct Lion {
    pub beta1: f32,
    pub one_minus_beta1: f32,
    pub beta2: f32,
    pub one_minus_beta2: f32,
    pub decay: f32,
    pub negative_lr: f32,
}

impl Update for Lion {
    const STATES: usize = 1;
    #[inline(always)]
    fn step(&self, w: f32, g: f32, [m, ..]: [f32; STATES_MAX]) -> (f32, [f32; STATES_MAX]) {
        let direction = sign(self.one_minus_beta1.mul_add(g, m * self.beta1));
        let w = self.negative_lr.mul_add(direction, w * self.decay);
        (w, [self.one_minus_beta2.mul_add(g, m * self.beta2), 0.0, 0.0])
    }
}

pub(super) struct Momentum {
    pub momentum: f32,
    pub undamped: f32,
    pub nesterov: bool,
    pub negative_lr: f32,
    /// The first buffer is the gradient, undamped.
    pub begins: bool,
}

impl Update for Momentum {
    const STATES: usize = 1;
    #[inline(always)]
    fn step(&self, w: f32, g: f32, [buffer, ..]: [f32; STATES_MAX]) -> (f32, [f32; STATES_MAX]) {
        let buffer = if self.begins { g } else { self.undamped.mul_add(g, buffer * self.momentum) };
        let step = if self.nesterov { self.momentum.mul_add(buffer, g) } else { buffer };
        (self.negative_lr.mul_add(step, w), [buffer, 0.0, 0.0])
    }
}

pub(super) struct Descent {
    pub negative_lr: f32,
}

impl Update for Descent {
    const STATES: usize = 0;
    #[inline(always)]
    fn step(&self, w: f32, g: f32, states: [f32; STATES_MAX]) -> (f32, [f32; STATES_MAX]) {
        (self.negative_lr.mul_add(g, w), states)
    }
}

/// A step along the gradient, whose factor is given as the only state.
#[derive(Clone, Copy)]
pub(super) struct Channelwise {
    /// `-lr * weight_decay`.
    pub negative_decay: f32,
}

impl Update for Channelwise {
    const STATES: usize = 1;
    #[inline(always)]
    fn step(&self, w: f32, g: f32, [factor, ..]: [f32; STATES_MAX]) -> (f32, [f32; STATES_MAX]) {
        let w = (-factor).mul_add(g, w);
        // Zero times an infinite weight would be NaN.
        let w = if self.negative_decay == 0.0 { w } else { self.negative_decay.mul_add(w, w) };
        (w, [factor, 0.0, 0.0])
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
