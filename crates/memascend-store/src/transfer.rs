//! Transfers between buffers and extents, and their checksums.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};

use memascend_mem::{LeaseSlice, LockExt};
use memascend_nvme::{BLOCK_BYTES, Completion, IoError, Operation, Request};

use crate::checksums::{sum_pieces, sum_writes};
use crate::map::Map;
use crate::table::Bytes;
use crate::{Extent, Result, Store, StoreError};

/// Called once when a transfer has ended.
pub type Transferred = Box<dyn FnOnce(Result<()>) + Send>;

impl Store {
    /// Moves `buffer.bytes()` bytes between `buffer` and `extent` at `offset` within it, then calls
    /// `done` on an engine thread. Nothing may be read or written while it is being written.
    ///
    /// Reads are compared with the checksums of writes: one for each MiB, counted from the extent's start, or
    /// for less if less was written at once. The read that completes such a part compares it, and fails if
    /// the bytes differ.
    ///
    /// # Panics
    /// If the range leaves the extent or is not aligned to blocks, or the tensor was freed.
    pub fn transfer(
        &self,
        operation: Operation,
        extent: Extent,
        offset: u64,
        buffer: LeaseSlice,
        done: Transferred,
    ) {
        self.submit_in(operation, extent, offset, buffer, self.checksums, done);
    }

    /// As [`Store::transfer`] of a read that is not compared, for scattered parts: a comparison would wait
    /// for the remainder of each MiB, which is not read.
    ///
    /// # Panics
    /// As [`Store::transfer`].
    pub fn read_uncompared(&self, extent: Extent, offset: u64, buffer: LeaseSlice, done: Transferred) {
        self.submit_in(Operation::Read, extent, offset, buffer, false, done);
    }

    /// Keeps `buffer` in memory as the bytes from `offset` on of an extent's value: reads are served
    /// from there. `written` says that a transfer that was submitted writes them; otherwise the next
    /// commit does. Until it is kept no longer, the buffer changes only while nothing reads the
    /// extent.
    ///
    /// A resident part ends where a transfer writes the same bytes, when the tensor gets a new value in
    /// another extent, and with [`Store::take_kept`] and [`Store::release`].
    ///
    /// # Panics
    /// As [`Store::transfer`].
    pub fn keep(&self, extent: Extent, offset: u64, buffer: LeaseSlice, written: bool) {
        let of = self.part_of(extent, offset, buffer.bytes() as u64);
        if !written {
            of.sums().forget(offset, buffer.bytes() as u64);
        }
        of.kept().insert(offset, buffer, written);
    }

    /// Takes the buffer in which exactly `bytes` bytes from `offset` on are kept, to change them. The
    /// caller gives it back by [`Store::keep`], for the extent that has the new value.
    ///
    /// # Panics
    /// As [`Store::transfer`].
    pub fn take_kept(&self, extent: Extent, offset: u64, bytes: usize) -> Option<LeaseSlice> {
        self.part_of(extent, offset, bytes as u64).kept().take(offset, bytes as u64)
    }

    /// Forgets the resident parts of `bytes` bytes from `offset` on, which are about to change.
    ///
    /// # Panics
    /// As [`Store::transfer`].
    pub fn forget_kept(&self, extent: Extent, offset: u64, bytes: usize) {
        self.part_of(extent, offset, bytes as u64).kept().cut(offset, bytes as u64);
    }

    /// Whether the resident bytes at `offset` are this buffer.
    ///
    /// # Panics
    /// As [`Store::transfer`].
    pub fn is_kept(&self, extent: Extent, offset: u64, buffer: &LeaseSlice) -> bool {
        self.part_of(extent, offset, buffer.bytes() as u64).kept().is(offset, buffer)
    }

    /// Evicts resident parts that reach beyond the first `from` bytes of an extent. Bytes that only memory
    /// has are written; `done` is called once for each write.
    ///
    /// # Panics
    /// If the tensor was freed.
    pub fn release(&self, extent: Extent, from: u64, mut done: impl FnMut() -> Transferred) {
        let of = self.part_of(extent, 0, extent.bytes);
        let unwritten = of.kept().release(from);
        for (offset, buffer) in unwritten {
            self.submit(Operation::Write, Arc::clone(&of), offset, buffer, self.checksums, done());
        }
    }

    /// Writes the unwritten resident parts of current values, and waits for the end.
    pub(crate) fn write_kept(&self) -> Result<()> {
        let all = self.table().all_current();
        let (sender, receiver) = mpsc::channel();
        for of in all {
            let unwritten = of.kept().unwritten();
            for (offset, buffer) in unwritten {
                let (sender, written, kept) = (sender.clone(), Arc::clone(&of), buffer.clone());
                let done = Box::new(move |result: Result<()>| {
                    if result.is_ok() {
                        written.kept().mark_written(offset, &kept);
                    }
                    drop(sender.send(result));
                });
                self.submit(Operation::Write, Arc::clone(&of), offset, buffer, self.checksums, done);
            }
        }
        drop(sender);
        // All of them end before an error is returned: a buffer that is being written must not change.
        let outcomes: Vec<Result<()>> = receiver.iter().collect();
        outcomes.into_iter().collect()
    }

    /// The bytes of an extent.
    ///
    /// # Panics
    /// If the range leaves the extent or is not aligned to blocks, or the tensor was freed.
    pub(crate) fn part_of(&self, extent: Extent, offset: u64, bytes: u64) -> Arc<Bytes> {
        assert!(offset + bytes <= extent.bytes, "{bytes} bytes at {offset} leave {extent:?}");
        assert!(
            (offset | bytes).is_multiple_of(BLOCK_BYTES as u64),
            "{bytes} bytes at {offset} are not aligned"
        );
        let of = self.table().bytes(extent.offset).cloned();
        of.expect("the extent was not freed")
    }

    fn submit_in(
        &self,
        operation: Operation,
        extent: Extent,
        offset: u64,
        buffer: LeaseSlice,
        compare: bool,
        done: Transferred,
    ) {
        let bytes = buffer.bytes() as u64;
        if bytes == 0 {
            return done(Ok(()));
        }
        let of = self.part_of(extent, offset, bytes);
        match operation {
            Operation::Write => of.kept().cut(offset, bytes),
            Operation::Read => {
                let kept = of.kept().within(offset, bytes);
                if !kept.is_empty() {
                    return self.read_around(&of, offset, buffer, kept, compare, done);
                }
            }
        }
        self.submit(operation, of, offset, buffer, compare, done);
    }

    /// Reads bytes that are resident in part: resident parts are copied, the others come from the drives.
    fn read_around(
        &self,
        of: &Arc<Bytes>,
        offset: u64,
        buffer: LeaseSlice,
        kept: Vec<(u64, LeaseSlice)>,
        compare: bool,
        done: Transferred,
    ) {
        let (mut gaps, mut at) = (Vec::new(), 0);
        for (start, part) in kept {
            let start = (start - offset) as usize;
            let target = buffer.narrow(start, part.bytes());
            if target.address() != part.address() {
                // SAFETY: no other code uses the buffer before `done` is called, and what is kept
                // does not change while it is read; see `keep`.
                unsafe { target.as_mut_slice().copy_from_slice(part.as_slice()) };
            }
            gaps.push(at..start);
            at = start + part.bytes();
        }
        gaps.push(at..buffer.bytes());
        gaps.retain(|gap| !gap.is_empty());
        let parts: Vec<_> =
            gaps.into_iter().map(|gap| (gap.start as u64, buffer.narrow(gap.start, gap.len()))).collect();
        // From here on only the reads hold the buffer.
        drop(buffer);
        if parts.is_empty() {
            return done(Ok(()));
        }
        let join =
            Arc::new(Gaps { left: AtomicUsize::new(parts.len()), end: Mutex::new((Ok(()), Some(done))) });
        for (start, part) in parts {
            let join = Arc::clone(&join);
            let done = Box::new(move |result| join.finish(result));
            self.submit(Operation::Read, Arc::clone(of), offset + start, part, compare, done);
        }
    }

    /// As [`Store::transfer`]; compares checksums only if `compare`.
    pub(crate) fn submit(
        &self,
        operation: Operation,
        of: Arc<Bytes>,
        offset: u64,
        buffer: LeaseSlice,
        compare: bool,
        done: Transferred,
    ) {
        let pieces = self.map.pieces(&of.ranges, offset, buffer.bytes() as u64);
        let bytes = buffer.bytes() as u64;
        let after = match operation {
            Operation::Write => {
                if compare {
                    // SAFETY: the caller leaves the buffer unchanged until the transfer has ended.
                    let sums = sum_writes(offset, unsafe { buffer.as_slice() });
                    of.sums().write(&sums);
                } else {
                    of.sums().forget(offset, bytes);
                }
                After::Written { offset, bytes }
            }
            Operation::Read if compare => {
                After::Compare { offset, buffer: buffer.clone(), map: Arc::clone(&self.map) }
            }
            Operation::Read => After::Nothing,
        };
        let join = Arc::new(Join {
            left: AtomicUsize::new(pieces.len()),
            outcome: Mutex::new((None, Some((after, done)))),
            of,
        });
        // Cut the slices before the first is submitted: from then on only the requests hold the
        // buffer.
        let slices: Vec<_> = pieces.iter().map(|piece| buffer.narrow(piece.start, piece.bytes)).collect();
        drop(buffer);
        for (piece, slice) in pieces.into_iter().zip(slices) {
            let join = Arc::clone(&join);
            self.members[piece.volume].engine.submit(Request {
                operation,
                offset: piece.offset,
                buffer: slice,
                on_complete: Box::new(move |Completion { buffer, result }| {
                    // Drop the buffer before signalling, so the waiter can reuse it.
                    drop(buffer);
                    join.finish(result.err());
                }),
            });
        }
    }

    /// As [`Store::transfer`], and waits until it has ended.
    pub fn transfer_wait(
        &self,
        operation: Operation,
        extent: Extent,
        offset: u64,
        buffer: LeaseSlice,
    ) -> Result<()> {
        let (sender, receiver) = mpsc::sync_channel(1);
        self.transfer(operation, extent, offset, buffer, Box::new(move |result| drop(sender.send(result))));
        receiver.recv().unwrap_or(Err(StoreError::Volume(IoError::Closed)))
    }
}

/// Counts the reads of one transfer around resident parts.
struct Gaps {
    left: AtomicUsize,
    end: Mutex<(Result<()>, Option<Transferred>)>,
}

impl Gaps {
    fn finish(&self, result: Result<()>) {
        let mut end = self.end.locked();
        if end.0.is_ok() {
            end.0 = result;
        }
        if self.left.fetch_sub(1, Ordering::AcqRel) != 1 {
            return;
        }
        let outcome = std::mem::replace(&mut end.0, Ok(()));
        let done = end.1.take().expect("the last part finishes once");
        drop(end);
        done(outcome);
    }
}

/// Work that remains when a transfer has ended.
enum After {
    Nothing,
    /// A failed write leaves unknown bytes: their checksums have to go.
    Written {
        offset: u64,
        bytes: u64,
    },
    Compare {
        offset: u64,
        buffer: LeaseSlice,
        map: Arc<Map>,
    },
}

impl After {
    fn ended(self, of: &Bytes, moved: bool) -> Result<()> {
        match self {
            Self::Written { offset, bytes } if !moved => of.sums().forget(offset, bytes),
            Self::Compare { offset, buffer, map } if moved => {
                let pieces = of.sums().cut(offset, buffer.bytes() as u64);
                // SAFETY: the transfer has moved its bytes, and no other code uses them before
                // `done` is called.
                let sums = sum_pieces(pieces, unsafe { buffer.as_slice() });
                let damage = of.sums().read(&sums);
                if let Some((offset, bytes)) = damage {
                    return Err(map.damage(of, offset, bytes).into());
                }
            }
            _ => {}
        }
        Ok(())
    }
}

/// The first error of a transfer, and the work at its end.
type Outcome = (Option<IoError>, Option<(After, Transferred)>);

/// Counts the parts of one transfer that have not ended.
struct Join {
    left: AtomicUsize,
    outcome: Mutex<Outcome>,
    of: Arc<Bytes>,
}

impl Join {
    fn finish(&self, error: Option<IoError>) {
        if let Some(error) = error {
            self.outcome.locked().0.get_or_insert(error);
        }
        if self.left.fetch_sub(1, Ordering::AcqRel) != 1 {
            return;
        }
        let (error, end) = {
            let mut outcome = self.outcome.locked();
            (outcome.0.take(), outcome.1.take())
        };
        let (after, done) = end.expect("the last part finishes once");
        // This drops the buffer before `done` signals the end, so the waiter can reuse it.
        let compared = after.ended(&self.of, error.is_none());
        done(match error {
            None => compared,
            Some(source) => Err(StoreError::Tensor { tensor: self.of.name.to_string(), source }),
        });
    }
}
