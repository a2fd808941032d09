//! The factors of a matrix's channels.

use super::super::adamw::{AdamwScalars, moments};
use super::super::bf16::canonical_nan;
use super::super::dispatch::kernel;
use super::projected::Projected;

/// Keeps quotients of norms finite.
const EPSILON: f64 = 1e-8;
/// How much a step's norm may grow: the limiter's gamma.
const GROWTH_MAX: f64 = 1.01;
/// fp64 sums of a channel's squares.
const SUMS: usize = 16;
/// Numbers of a projected gradient below which no other thread is started.
const SINGLE_THREAD_MAX_NUMBERS: usize = 1 << 16;

/// Inputs of the factors of one step, beside the gradient.
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
    /// Factor of gradients: clipping, unscaling, and the sign.
    pub grad_scale: f32,
    /// The norm of the step before; None for the first one, which is not limited.
    pub norm_before: Option<f64>,
}

/// Of one channel: the sums of squares of the projected gradient, of its step, and of the gradient.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ChannelSquares {
    /// Of the projected gradient, scaled.
    pub projected: f64,
    /// Of the step that AdamW makes of it, without the learning rate.
    pub step: f64,
    /// Of the gradient, as it is kept.
    pub gradient: f64,
}

/// Updates the moments of the projected gradient, (channels, rank) each, and finds the factor of each
/// channel, by which [`step_channels`](crate::step_channels) multiplies the scaled gradient. Returns
/// the norm of the step after the limiter, without the learning rate. The bits do not depend on `threads`.
///
/// # Panics
/// When lengths differ, or `step` is 0.
pub fn channel_factors(
    options: &FactorOptions,
    measured: &Projected,
    first_moment: &mut [f32],
    second_moment: &mut [f32],
    factors: &mut [f32],
    threads: usize,
) -> f64 {
    factors_of(options, &squares_of(options, measured, first_moment, second_moment, threads), factors)
}

/// Finds the factor of each channel of a matrix from the squares of all of them, as [`channel_factors`] does.
///
/// # Panics
/// When lengths differ, or `step` is 0.
pub fn factors_of(options: &FactorOptions, squares: &[ChannelSquares], factors: &mut [f32]) -> f64 {
    assert_eq!(factors.len(), squares.len(), "channels");
    let ratios = ratios(options.whole, squares);
    let root = options.scale.sqrt();
    let front = if options.scale_front { root } else { 1.0 };
    let grad_scale = f64::from(options.grad_scale) * front;
    let sum: f64 = ratios.iter().zip(squares).map(|(ratio, of)| ratio * ratio * of.gradient).sum();
    let norm = sum.sqrt() * grad_scale.abs();
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

/// Returns for each channel by how much the step of the projected gradient is longer than the projected gradient.
fn ratios(whole: bool, squares: &[ChannelSquares]) -> Vec<f64> {
    let ratio = |before: f64, after: f64| after.sqrt() / (before.sqrt() + EPSILON);
    if whole {
        let (before, after) =
            squares.iter().fold((0.0, 0.0), |sum, of| (sum.0 + of.projected, sum.1 + of.step));
        vec![ratio(before, after); squares.len()]
    } else {
        squares.iter().map(|of| ratio(of.projected, of.step)).collect()
    }
}

/// Updates the moments of channels that were measured, (channels, rank) each, and returns their squares.
///
/// # Panics
/// When lengths differ, or `step` is 0.
pub fn squares_of(
    options: &FactorOptions,
    measured: &Projected,
    first_moment: &mut [f32],
    second_moment: &mut [f32],
    threads: usize,
) -> Vec<ChannelSquares> {
    let (projected, channels, rank) = (measured.values(), measured.channels(), measured.projection().rank);
    assert!(first_moment.len() == projected.len() && second_moment.len() == projected.len(), "moments");
    let FactorOptions { lr, betas, eps, step, grad_scale, .. } = *options;
    let scalars = ProjectedScalars::new(lr, betas, eps, step, grad_scale);
    let threads = if projected.len() < SINGLE_THREAD_MAX_NUMBERS { 1 } else { threads.max(1) };
    let share = channels.div_ceil(threads).max(1);
    let mut squares = vec![(0.0, 0.0); channels];
    std::thread::scope(|scope| {
        let moments = first_moment.chunks_mut(share * rank).zip(second_moment.chunks_mut(share * rank));
        let parts = projected.chunks(share * rank).zip(moments).zip(squares.chunks_mut(share));
        for ((projected, (first, second)), squares) in parts {
            let scalars = &scalars;
            let mut run = move || step_projected(scalars, projected, first, second, squares);
            if threads == 1 {
                run();
            } else {
                crate::threads::spawn_or_run(scope, run);
            }
        }
    });
    let of_channel = |((projected, step), gradient)| ChannelSquares { projected, step, gradient };
    squares.into_iter().zip(measured.sums()).map(of_channel).collect()
}

/// Inputs of the moments of one step, beside the projected gradient.
pub(super) struct ProjectedScalars {
    moments: AdamwScalars,
    eps: f32,
    grad_scale: f32,
}

impl ProjectedScalars {
    pub(super) fn new(lr: f64, betas: (f64, f64), eps: f64, step: u64, grad_scale: f32) -> Self {
        Self { moments: AdamwScalars::new(lr, betas, eps, 0.0, step), eps: eps as f32, grad_scale }
    }
}

kernel! {
    /// Updates the moments of channels, (channels, rank), and finds each channel's sums of squares: of the
    /// projected gradient and of its step.
    pub fn step_projected / step_projected_with(
        scalars: &ProjectedScalars,
        projected: &[f32],
        first_moment: &mut [f32],
        second_moment: &mut [f32],
        squares: &mut [(f64, f64)],
    ) = step_projected_body;
}

#[inline(always)]
fn step_projected_body(
    scalars: &ProjectedScalars,
    projected: &[f32],
    first_moment: &mut [f32],
    second_moment: &mut [f32],
    squares: &mut [(f64, f64)],
) {
    let rank = projected.len() / squares.len();
    for (channel, squares) in squares.iter_mut().enumerate() {
        let range = channel * rank..(channel + 1) * rank;
        let (values, rest) = projected[range.clone()].as_chunks::<SUMS>();
        let (first, first_rest) = first_moment[range.clone()].as_chunks_mut::<SUMS>();
        let (second, second_rest) = second_moment[range].as_chunks_mut::<SUMS>();
        let mut sums = ([0.0; SUMS], [0.0; SUMS]);
        for ((values, first), second) in values.iter().zip(first).zip(second) {
            sums = step_some(scalars, sums, values, first, second);
        }
        sums = step_some(scalars, sums, rest, first_rest, second_rest);
        *squares = (sums.0.iter().sum(), sums.1.iter().sum());
    }
}

/// Up to [`SUMS`] numbers of a channel. The sums go by value, so that compilers keep them in registers.
#[inline(always)]
fn step_some(
    scalars: &ProjectedScalars,
    (mut before, mut after): ([f64; SUMS], [f64; SUMS]),
    values: &[f32],
    first: &mut [f32],
    second: &mut [f32],
) -> ([f64; SUMS], [f64; SUMS]) {
    let sums = before.iter_mut().zip(&mut after);
    for (((value, m), v), (before, after)) in values.iter().zip(first).zip(second).zip(sums) {
        let value = value * scalars.grad_scale;
        (*m, *v) = moments(*m, *v, value, &scalars.moments);
        (*m, *v) = (canonical_nan(*m), canonical_nan(*v));
        let step = *m / (v.sqrt() + scalars.eps);
        *before += f64::from(value) * f64::from(value);
        *after += f64::from(step) * f64::from(step);
    }
    (before, after)
}
