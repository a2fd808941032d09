//! An arena as the registered buffers of a ring: the kernel pins their pages once, instead of at every
//! transfer.
//!
//! The ring's thread holds the registered arena: the kernel knows it by its pages, and transfers would go to
//! the old pages if it were freed and other memory mapped at its addresses.
//!
//! An elastic arena is a sparse table with an entry for each buffer, or for each piece of a larger one, so
//! that returned memory can be unregistered by itself; the kernel would otherwise keep its pages. The pool
//! tells the ring's thread, and waits for it, before memory goes and after it came. Memory without an entry,
//! because the kernel refused it or the table is full, moves by ordinary reads and writes. Kernels without
//! sparse tables (before 5.19) register no elastic arena, and the engine's features say so.

use std::io;
use std::ops::Range;
use std::ptr;

use io_uring::Submitter;
use memascend_mem::{ClassPlace, PAGE_BYTES, Pool};

/// The largest buffer that the kernel registers.
const PIECE_BYTES_MAX: usize = 1 << 30;
/// The largest piece of an arena that grows and shrinks.
const SPARSE_PIECE_BYTES_MAX: usize = 64 << 20;
/// The most buffers that the kernel registers.
const PIECES_MAX: usize = 1 << 14;

/// The registered arena of a ring. Holding the pool keeps other memory from being mapped at the
/// arena's addresses while they are registered.
pub(super) struct Registered {
    _pool: Pool,
    /// Address of the arena.
    start: usize,
    /// In the order of the kernel's table, by their places in the arena.
    pieces: Vec<RegisteredPiece>,
}

/// A part of the arena, and whether it is registered.
struct RegisteredPiece {
    place: Range<usize>,
    /// Bytes that are not memory now.
    missing: usize,
    registered: bool,
}

impl RegisteredPiece {
    fn overlap(&self, part: &Range<usize>) -> usize {
        self.place.end.min(part.end).saturating_sub(self.place.start.max(part.start))
    }
}

impl Registered {
    /// Registers an arena whose size stays. Of one that grows and shrinks nothing is registered
    /// before [`Registered::committed`].
    pub(super) fn new(submitter: &Submitter<'_>, pool: Pool) -> io::Result<Self> {
        let (start, bytes) = pool.arena();
        let elastic = pool.is_elastic();
        let places = if elastic {
            sparse_pieces(&pool.arena_classes())
        } else {
            pieces(0..bytes, PIECE_BYTES_MAX).collect()
        };
        let piece = |place: Range<usize>| RegisteredPiece {
            missing: if elastic { place.len() } else { 0 },
            registered: !elastic,
            place,
        };
        let table = Self {
            _pool: pool,
            start: start.as_ptr().addr(),
            pieces: places.into_iter().map(piece).collect(),
        };
        if elastic {
            submitter.register_buffers_sparse(table.pieces.len() as u32)?;
        } else {
            let vectors: Vec<_> = table.pieces.iter().map(|piece| table.vector(piece)).collect();
            // SAFETY: the arena is mapped, and stays so while the table holds its pool; the table
            // outlives the ring.
            unsafe { submitter.register_buffers(&vectors) }?;
        }
        Ok(table)
    }

    /// Index of the registered buffer that contains the whole range, if there is one.
    pub(super) fn index_of(&self, address: usize, bytes: usize) -> Option<u16> {
        let offset = address.checked_sub(self.start)?;
        let index = self.pieces.partition_point(|piece| piece.place.end <= offset);
        let piece = self.pieces.get(index)?;
        let inside = piece.registered && piece.place.start <= offset && offset + bytes <= piece.place.end;
        inside.then(|| u16::try_from(index).ok()).flatten()
    }

    /// Registers the pieces that are memory now that `parts` of the arena are. The others move by
    /// ordinary transfers.
    ///
    /// # Errors
    /// The first refusal: its piece moves by ordinary transfers too.
    pub(super) fn committed(&mut self, submitter: &Submitter<'_>, parts: &[Range<usize>]) -> io::Result<()> {
        let mut outcome = Ok(());
        for part in parts {
            for index in self.overlapping(part) {
                let piece = &mut self.pieces[index];
                piece.missing -= piece.overlap(part);
                if piece.missing > 0 {
                    continue;
                }
                let vector = self.vector(&self.pieces[index]);
                // SAFETY: the piece is memory until `leaving` is called for a part of it.
                let registered = unsafe { submitter.register_buffers_update(index as u32, &[vector], None) };
                self.pieces[index].registered = registered.is_ok();
                outcome = outcome.and(registered);
            }
        }
        outcome
    }

    /// Unregisters the pieces that are not memory any more. No request uses the parts that go. One of
    /// another part of the same piece keeps the pages until it ends.
    ///
    /// # Errors
    /// The first refusal: its pages return to the system when something else is registered there.
    pub(super) fn leaving(&mut self, submitter: &Submitter<'_>, parts: &[Range<usize>]) -> io::Result<()> {
        let mut outcome = Ok(());
        for part in parts {
            for index in self.overlapping(part) {
                let piece = &mut self.pieces[index];
                piece.missing += piece.overlap(part);
                // Whatever the kernel says: it would transfer to and from the old pages.
                if std::mem::take(&mut piece.registered) {
                    let none = libc::iovec { iov_base: ptr::null_mut(), iov_len: 0 };
                    // SAFETY: no memory is registered.
                    outcome = outcome
                        .and(unsafe { submitter.register_buffers_update(index as u32, &[none], None) });
                }
            }
        }
        outcome
    }

    fn overlapping(&self, part: &Range<usize>) -> Range<usize> {
        let first = self.pieces.partition_point(|piece| piece.place.end <= part.start);
        first..self.pieces.partition_point(|piece| piece.place.start < part.end)
    }

    fn vector(&self, piece: &RegisteredPiece) -> libc::iovec {
        libc::iovec {
            iov_base: ptr::with_exposed_provenance_mut(self.start + piece.place.start),
            iov_len: piece.place.len(),
        }
    }
}

/// A range cut into pieces of `most` bytes.
fn pieces(whole: Range<usize>, most: usize) -> impl Iterator<Item = Range<usize>> {
    let end = whole.end;
    whole.step_by(most).map(move |start| start..end.min(start + most))
}

/// The pieces of an arena that grows and shrinks: each is one buffer or a part of one, so that returned
/// memory is a piece of its own. Where those would be too many, a piece has several small buffers.
fn sparse_pieces(classes: &[ClassPlace]) -> Vec<Range<usize>> {
    let group =
        |class: &ClassPlace, together: usize| together.min(SPARSE_PIECE_BYTES_MAX / class.bytes).max(1);
    let count = |class: &ClassPlace, together: usize| {
        let group = group(class, together);
        class.count_max.div_ceil(group) * (group * class.bytes).div_ceil(SPARSE_PIECE_BYTES_MAX)
    };
    let mut together = 1;
    // At the latest, pieces of pages are as large as they may be.
    while together < SPARSE_PIECE_BYTES_MAX / PAGE_BYTES
        && classes.iter().map(|class| count(class, together)).sum::<usize>() > PIECES_MAX
    {
        together *= 2;
    }
    let of_class = |class: &ClassPlace| {
        let end = class.start + class.count_max * class.bytes;
        let groups = pieces(class.start..end, group(class, together) * class.bytes);
        groups.flat_map(|group| pieces(group, SPARSE_PIECE_BYTES_MAX))
    };
    // Bytes behind the last piece move by ordinary transfers.
    classes.iter().flat_map(of_class).take(PIECES_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_buffers_unless_they_would_be_too_many() {
        let mib = 1 << 20;
        let classes = |classes: &[(usize, usize)]| {
            let mut end = 0;
            let place = |(bytes, count_max): &(usize, usize)| {
                let start = end;
                end += bytes * count_max;
                ClassPlace { start, bytes: *bytes, count_max: *count_max }
            };
            classes.iter().map(place).collect::<Vec<_>>()
        };
        let few = sparse_pieces(&classes(&[(mib, 3), (150 * mib, 2)]));
        let sizes: Vec<_> = few.iter().map(|piece| piece.len() / mib).collect();
        assert_eq!(sizes, [1, 1, 1, 64, 64, 22, 64, 64, 22]);
        for (many, together) in
            [(&[(4096, 16_384)][..], 1), (&[(4096, 16_380), (mib, 10)], 2), (&[(4096, 1 << 20)], 64)]
        {
            let classes = classes(many);
            let pieces = sparse_pieces(&classes);
            assert!(pieces.len() <= PIECES_MAX && pieces[0].len() == together * 4096, "{:?}", pieces[0]);
            let end = pieces.iter().fold(0, |end, piece| {
                assert!(piece.start == end && piece.len() <= SPARSE_PIECE_BYTES_MAX);
                piece.end
            });
            let last = classes.last().unwrap();
            assert_eq!(end, last.start + last.bytes * last.count_max);
        }
        // More than the kernel's table holds.
        assert_eq!(sparse_pieces(&classes(&[(64 * mib, PIECES_MAX + 5)])).len(), PIECES_MAX);
    }
}
