//! The measurements of a gradient by a projection.

use std::ops::Range;
use std::sync::Arc;

use super::projection::Projection;
use super::scratch::{Numbers, Purpose, Scratch};

/// A projected gradient, or some of its channels, (channels, rank), and behind it each channel's sum of squares: the bits
/// of an fp64 as two fp32, so that all of it can be put aside as numbers of one kind.
#[derive(Debug)]
pub struct Projected {
    projection: Projection,
    channels: usize,
    numbers: Numbers,
}

impl Projected {
    /// Uninitialised room for the measurements of `projection`.
    pub fn room(projection: Projection, scratch: &Arc<Scratch>) -> Self {
        Self::room_of(projection, projection.channels(), scratch)
    }

    /// Uninitialised room for the measurements of some channels.
    pub fn room_of(projection: Projection, channels: usize, scratch: &Arc<Scratch>) -> Self {
        let numbers = scratch.take(Purpose::Projected, channels * (projection.rank + 2));
        Self { projection, channels, numbers }
    }

    /// How many numbers there are.
    pub fn count(projection: &Projection) -> usize {
        projection.channels() * (projection.rank + 2)
    }

    /// How the gradient was projected.
    pub fn projection(&self) -> &Projection {
        &self.projection
    }

    /// How many channels there are of it.
    pub fn channels(&self) -> usize {
        self.channels
    }

    /// Some of its channels, as all of them are put aside.
    ///
    /// # Panics
    /// When there are fewer channels, or `target` has another length.
    pub fn copy_part(&self, channels: Range<usize>, target: &mut [f32]) {
        let rank = self.projection.rank;
        let (values, sums) = target.split_at_mut(channels.len() * rank);
        values.copy_from_slice(&self.values()[channels.start * rank..channels.end * rank]);
        sums.copy_from_slice(&self.numbers[self.elements()..][2 * channels.start..2 * channels.end]);
    }

    /// All of it, as it is put aside.
    pub fn numbers(&self) -> &[f32] {
        &self.numbers
    }

    /// All of it, to be filled with stored values.
    pub fn numbers_mut(&mut self) -> &mut [f32] {
        &mut self.numbers
    }

    /// The projected gradient, (channels, rank).
    pub fn values(&self) -> &[f32] {
        &self.numbers[..self.elements()]
    }

    pub(super) fn values_mut(&mut self) -> &mut [f32] {
        let elements = self.elements();
        &mut self.numbers[..elements]
    }

    /// Each channel's sum of squares.
    pub fn sums(&self) -> Vec<f64> {
        let sum = |[low, high]: &[f32; 2]| {
            f64::from_bits(u64::from(low.to_bits()) | u64::from(high.to_bits()) << 32)
        };
        self.numbers[self.elements()..].as_chunks().0.iter().map(sum).collect()
    }

    pub(super) fn set_sums(&mut self, sums: impl Iterator<Item = f64>) {
        let elements = self.elements();
        for (halves, sum) in self.numbers[elements..].as_chunks_mut::<2>().0.iter_mut().zip(sums) {
            let bits = sum.to_bits();
            *halves = [f32::from_bits(bits as u32), f32::from_bits((bits >> 32) as u32)];
        }
    }

    fn elements(&self) -> usize {
        self.channels * self.projection.rank
    }
}
