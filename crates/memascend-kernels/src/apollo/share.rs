//! The projection of a gradient whose elements several processes have, each some that follow one another.
//!
//! Each number is one chain of products in the order of its channel. So a process begins with the sums of
//! incomplete channels from the process before it, and hands on its own.

use std::ops::Range;
use std::sync::Arc;

use super::projected::Projected;
use super::projection::{Projection, Projector};
use super::scratch::Scratch;

impl Projection {
    /// The channels that some of the elements `share` are in.
    pub fn channels_of(&self, share: &Range<usize>) -> Range<usize> {
        if share.is_empty() {
            0..0
        } else if self.by_column() {
            0..self.columns
        } else {
            share.start / self.columns..share.end.div_ceil(self.columns)
        }
    }

    /// The channels that are incomplete before element `end`; where channels are columns, all of them within the matrix.
    pub fn incomplete(&self, end: usize) -> Range<usize> {
        if end == 0 || end == self.elements() || (!self.by_column() && end.is_multiple_of(self.columns)) {
            0..0
        } else {
            self.channels_of(&(end - 1..end))
        }
    }

    /// The channels that are complete with the elements `share`, after those before.
    pub fn completed(&self, share: &Range<usize>) -> Range<usize> {
        if share.is_empty() {
            0..0
        } else if self.by_column() {
            if share.end == self.elements() { 0..self.columns } else { 0..0 }
        } else {
            share.start / self.columns..share.end / self.columns
        }
    }

    /// Bytes of the sums that are handed on before element `end`.
    pub fn carried_bytes(&self, end: usize) -> usize {
        let each = self.rank * size_of::<f32>() + self.sums_each() * size_of::<f64>();
        self.incomplete(end).len() * each
    }
}

impl Projector {
    /// The elements that are projected.
    pub fn share(&self) -> &Range<usize> {
        &self.share
    }

    /// Begins with the sums that [`Projector::hand_on`] gave before the first element.
    ///
    /// # Panics
    /// When there are not [`Projection::carried_bytes`].
    pub fn go_on(&mut self, carried: &[u8]) {
        let rank = self.projection.rank;
        let count = self.projection.incomplete(self.share.start).len();
        let (values, sums) = carried.split_at(count * rank * size_of::<f32>());
        let targets = &mut self.projected.values_mut()[..count * rank];
        assert_eq!(sums.len(), count * self.projection.sums_each() * size_of::<f64>(), "sums of channels");
        for (target, bytes) in targets.iter_mut().zip(values.as_chunks().0) {
            *target = f32::from_ne_bytes(*bytes);
        }
        for (target, bytes) in self.sums.iter_mut().zip(sums.as_chunks().0) {
            *target = f64::from_ne_bytes(*bytes);
        }
    }

    /// Writes the sums of incomplete channels, and returns the measurements of complete ones.
    ///
    /// # Panics
    /// When elements are missing, or `carried` has not [`Projection::carried_bytes`].
    pub fn hand_on(mut self, carried: &mut [u8], scratch: &Arc<Scratch>) -> Projected {
        self.complete();
        let (projection, rank) = (self.projection, self.projection.rank);
        let begin = projection.channels_of(&self.share).start;
        let left = projection.incomplete(self.share.end);
        assert_eq!(carried.len(), projection.carried_bytes(self.share.end), "bytes that are handed on");
        let (values, sums) = carried.split_at_mut(left.len() * rank * size_of::<f32>());
        let of_values = &self.projected.values()[(left.start.max(begin) - begin) * rank..];
        for (bytes, value) in values.as_chunks_mut().0.iter_mut().zip(of_values) {
            *bytes = value.to_ne_bytes();
        }
        let of_sums = &self.sums[(left.start.max(begin) - begin) * projection.sums_each()..];
        for (bytes, sum) in sums.as_chunks_mut().0.iter_mut().zip(of_sums) {
            *bytes = sum.to_ne_bytes();
        }
        let complete = projection.completed(&self.share);
        self.set_sums();
        if complete == projection.channels_of(&self.share) {
            return self.projected;
        }
        let mut measured = Projected::room_of(projection, complete.len(), scratch);
        if !complete.is_empty() {
            let part = complete.start - begin..complete.end - begin;
            self.projected.copy_part(part, measured.numbers_mut());
        }
        measured
    }
}
