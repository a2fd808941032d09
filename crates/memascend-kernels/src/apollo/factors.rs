//! The factors of a matrix's channels.

use super::super::adamw::{AdamwScalars, moments};
use super::super::bf16::canonical_nan;

/// Keeps quotients of norms finite.
const EPSILON: f64 = 1e-8;
/// How much a step's norm may grow: the limiter's gamma.
const GROWTH_MAX: f64 = 1.01;

/// What the factors of one step depend on, beside the gradient.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FactorOptions {
    /// The learning rate.
    pub lr: f64,
    /// Decay of the moments of the projected gradient.
    pub betas: (f64, f64),
    /// Added to the root of the second moment.
    pub eps: f64,
    /// The step is multiplied by its root.
    pub scale: f64,
    /// One factor for all channels (APOLLO-Mini).
    pub whole: bool,
    /// Whether the root of `scale` is part of the norm that is limited.
    pub scale_front: bool,
    /// Number of the step, the first being 1.
    pub step: u64,
    /// What gradients are multiplied by: clipping, unscaling, and the sign.
    pub grad_scale: f32,
    /// The norm of the step before; None for the first one, which is not limited.
    pub norm_before: Option<f64>,
}

/// A gradient as [`Projector`](super::Projector) has measured it.
#[derive(Clone, Copy)]
pub struct Measured<'a> {
    /// (channels, rank)
    pub projected: &'a [f32],
    /// Each channel's sum of squares.
    pub sums: &'a [f64],
}

/// Updates the moments of the projected gradient, (channels, rank) each, and finds the factor of each
/// channel, by which [`step_channels`](crate::step_channels) multiplies the scaled gradient. Returns
/// the norm of the step after the limiter, without the learning rate.
///
/// # Panics
/// When lengths differ, there are no channels, or `step` is 0.
pub fn channel_factors(
    options: &FactorOptions,
    measured: Measured<'_>,
    first_moment: &mut [f32],
    second_moment: &mut [f32],
    factors: &mut [f32],
) -> f64 {
    let Measured { projected, sums } = measured;
    let rank = projected.len() / sums.len();
    assert!(projected.len() == rank * sums.len() && factors.len() == sums.len(), "channels");
    assert!(first_moment.len() == projected.len() && second_moment.len() == projected.len(), "moments");
    let ratios = ratios(options, measured, rank, first_moment, second_moment);
    let root = options.scale.sqrt();
    let front = if options.scale_front { root } else { 1.0 };
    let grad_scale = f64::from(options.grad_scale) * front;
    let squares: f64 = ratios.iter().zip(sums).map(|(ratio, sum)| ratio * ratio * sum).sum();
    let norm = squares.sqrt() * grad_scale.abs();
    let limit = match options.norm_before {
        Some(before) => (norm / (before + EPSILON)).max(GROWTH_MAX) / GROWTH_MAX,
        None => 1.0,
    };
    let (step, (beta1, beta2)) = (options.step as f64, options.betas);
    let step_size = options.lr * (1.0 - beta2.powf(step)).sqrt() / (1.0 - beta1.powf(step));
    for (factor, ratio) in factors.iter_mut().zip(&ratios) {
        *factor = canonical_nan((step_size * root * ratio / limit) as f32);
    }
    norm / limit
}

/// Updates the moments; returns for each channel by how much the step of the projected gradient is
/// longer than the projected gradient.
fn ratios(
    options: &FactorOptions,
    measured: Measured<'_>,
    rank: usize,
    first_moment: &mut [f32],
    second_moment: &mut [f32],
) -> Vec<f64> {
    let scalars = AdamwScalars::new(options.lr, options.betas, options.eps, 0.0, options.step);
    let eps = options.eps as f32;
    let channels = measured.projected.chunks(rank).zip(first_moment.chunks_mut(rank));
    let squares = channels.zip(second_moment.chunks_mut(rank)).map(|((projected, first), second)| {
        let (mut before, mut after) = (0.0, 0.0);
        for ((&value, m), v) in projected.iter().zip(first).zip(second) {
            let value = value * options.grad_scale;
            (*m, *v) = moments(*m, *v, value, &scalars);
            (*m, *v) = (canonical_nan(*m), canonical_nan(*v));
            let stepped = *m / (v.sqrt() + eps);
            before += f64::from(value) * f64::from(value);
            after += f64::from(stepped) * f64::from(stepped);
        }
        (before, after)
    });
    let ratio = |(before, after): (f64, f64)| after.sqrt() / (before.sqrt() + EPSILON);
    let channels = measured.sums.len();
    if options.whole {
        let whole = squares.fold((0.0, 0.0), |sum, channel| (sum.0 + channel.0, sum.1 + channel.1));
        vec![ratio(whole); channels]
    } else {
        squares.map(ratio).collect()
    }
}
