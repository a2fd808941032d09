//! Parts of a tensor under update that readers wait for one by one.

use std::sync::Arc;

use crate::{InFlight, InFlightCounter};

/// The elements of a tensor in groups, each with a count of its pieces that are not written yet.
pub(super) struct Groups {
    numel: usize,
    /// Elements of a group; the last one may have fewer.
    elements: usize,
    pending: Vec<Arc<InFlightCounter>>,
    /// Held until all pieces of a group have begun.
    beginning: Vec<Option<InFlight>>,
}

impl Groups {
    /// Groups of `elements` elements, without any begun piece.
    pub(super) fn new(numel: usize, elements: usize) -> Self {
        let pending: Vec<Arc<InFlightCounter>> =
            (0..numel.div_ceil(elements)).map(|_| Arc::default()).collect();
        let beginning = pending.iter().map(|group| Some(group.begin())).collect();
        Self { numel, elements, pending, beginning }
    }

    /// Counters of the pieces of each group.
    pub(super) fn pending(&self) -> Vec<Arc<InFlightCounter>> {
        self.pending.clone()
    }

    /// Begins the piece `first .. first + numel`, in the order of pieces. It is to be ended in all
    /// its groups once its weights are written.
    pub(super) fn begin(&mut self, first: usize, numel: usize) -> Vec<InFlight> {
        let end = first + numel;
        let groups = first / self.elements..end.div_ceil(self.elements);
        let begun = groups.clone().map(|group| self.pending[group].begin()).collect();
        for group in groups {
            if ((group + 1) * self.elements).min(self.numel) <= end
                && let Some(beginning) = self.beginning[group].take()
            {
                beginning.end(Ok(()));
            }
        }
        begun
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_is_written_when_all_its_pieces_are() {
        let mut groups = Groups::new(10, 4);
        let pending = groups.pending();
        assert_eq!(pending.len(), 3);
        let first = groups.begin(0, 3);
        let second = groups.begin(3, 3);
        assert_eq!((first.len(), second.len()), (1, 2));
        first.into_iter().for_each(|piece| piece.end(Ok(())));
        assert!(!pending[0].is_idle(), "a part of the second piece is in the first group");
        second.into_iter().for_each(|piece| piece.end(Ok(())));
        assert!(pending[0].is_idle());
        assert!(!pending[1].is_idle(), "its last piece has not begun");
        let third = groups.begin(6, 4);
        assert_eq!(third.len(), 2);
        third.into_iter().for_each(|piece| piece.end(Ok(())));
        assert!(pending.iter().all(|group| group.is_idle()));
    }

    #[test]
    fn groups_whose_pieces_never_begin_fail() {
        let groups = Groups::new(10, 4);
        let pending = groups.pending();
        drop(groups);
        assert!(pending.iter().all(|group| group.wait().is_err()));
    }
}
