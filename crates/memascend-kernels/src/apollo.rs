//! APOLLO and APOLLO-Mini (Zhu et al. 2024, arXiv 2412.05270): one learning rate for each channel of
//! a matrix, from a random projection of its gradient.
//!
//! - `matrix.rs`: the random matrix, a function of seed, redraw and index;
//! - `projection.rs`: the projected gradient and each channel's sum of squares, as gradients pass by;
//! - `projected.rs`: the measurements, and how they are stored until the step;
//! - `share.rs`: the same of elements that one of several processes has, from the sums of those before it;
//! - `scratch.rs`: the memory that these take;
//! - `factors.rs`: from these the moments, the channels' factors and the limit on the norm's growth.
//!
//! The step itself works element by element, in any chunks:
//! [`step_channels`](crate::step_channels).
//!
//! A channel is a row or a column of the gradient, whichever there are more of; the *depth* is the number of
//! its elements. Projected values lie channel by channel, whichever way the matrix lies.
//!
//! The factors need the projected gradient and the channels' sums of squares, since the limiter looks at the
//! norm of factors times channels. Each number of the projected gradient is one chain of fused products in
//! the order of its channel, and each sum of squares has an order that depends only on an element's place in
//! its channel: neither pieces nor threads change a bit. Clipping and unscaling multiply the projected
//! gradient, so they may be decided later.

mod factors;
mod matrix;
mod projected;
mod projection;
mod scratch;
mod share;

pub use factors::{ChannelSquares, FactorOptions, channel_factors, factors_of, squares_of};
pub use projected::Projected;
pub use projection::{Projection, Projector};
pub use scratch::{Numbers, Purpose, Scratch};

#[cfg(test)]
mod tests;
