//! Pieces on their way from a device, in groups of one event each.

use std::collections::VecDeque;
use std::sync::Arc;

use memascend_mem::{CudaError, CudaEvent, Fence, Lease, LeaseSlice};

use super::Copies;
use super::copies::device_error;
use crate::{Result, Staging};

/// Pieces on their way at once. At 55 GB/s 32 pieces of 512 KiB last 0.3 ms, several times as long as a thread
/// takes to wake up.
const IN_FLIGHT: usize = 32;
/// Groups of pieces on their way at once where chunks suffice: one arriving, two queued behind it, one being
/// processed. So an event stands for 8 pieces, and a thread wakes up once for 4 MiB.
const GROUPS: usize = 4;
/// Pieces that may take the last free chunks; more leave `CHUNKS_LEFT` to other threads.
const FEW: usize = 4;
/// Chunks that pieces beyond the first few leave free.
const CHUNKS_LEFT: usize = 4;

/// Pieces on their way from a device to host memory, one behind the other. Dropping the value waits for them.
pub(crate) struct Pieces<'a, T> {
    copies: &'a Copies,
    /// The oldest first. Only the last may be open.
    groups: VecDeque<Group<T>>,
    count: usize,
    /// How many pieces may be on their way with the chunks that are free: at least 1.
    room: usize,
}

/// Pieces whose arrival one event marks.
struct Group<T> {
    pieces: Vec<ChunkPiece<T>>,
    /// None while the group is open: pieces are added to it, and no event is behind them yet.
    end: Option<Result<Arc<CudaEvent>>>,
}

/// A piece in host memory, and its purpose.
pub(crate) struct ChunkPiece<T> {
    pub(crate) room: LeaseSlice,
    pub(crate) purpose: T,
    chunk: Arc<Lease>,
}

impl<T> ChunkPiece<T> {
    /// The purpose of the piece, and its chunk.
    pub(crate) fn into_parts(self) -> (T, Arc<Lease>) {
        (self.purpose, self.chunk)
    }
}

impl<'a, T> Pieces<'a, T> {
    pub(crate) fn new(copies: &'a Copies) -> Self {
        Self { copies, groups: VecDeque::new(), count: 0, room: 1 }
    }

    pub(crate) fn copies(&self) -> &'a Copies {
        self.copies
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// A chunk for the next piece and whether it may stay in host memory, as
    /// [`Staging::chunk_for`]. None, so that pieces have to be settled first, if enough are on their way, or no
    /// chunk is free while some are: a thread that waits for a chunk must hold none, since two threads that hold
    /// chunks and wait could deadlock.
    pub(crate) fn chunk(&mut self, staging: &Staging, keep: bool) -> Result<Option<(Arc<Lease>, bool)>> {
        self.measure(staging, 1);
        if self.is_empty() {
            return staging.chunk_for(keep).map(Some);
        }
        if self.count >= IN_FLIGHT {
            return Ok(None);
        }
        staging.try_chunk_for(keep, self.left_to_others())
    }

    /// As [`Pieces::chunk`], two chunks, which do not stay.
    pub(crate) fn two_chunks(&mut self, staging: &Staging) -> Result<Option<[Arc<Lease>; 2]>> {
        self.measure(staging, 2);
        if self.is_empty() {
            return staging.two_chunks().map(Some);
        }
        if self.count >= IN_FLIGHT {
            return Ok(None);
        }
        let left = self.left_to_others();
        let Some(first) = staging.spare_chunk(left + 1)? else { return Ok(None) };
        Ok(staging.spare_chunk(left)?.map(|second| [first, second]))
    }

    /// Finds how many pieces of so many chunks each may be on their way.
    fn measure(&mut self, staging: &Staging, chunks: usize) {
        let free = staging.free_chunks().saturating_sub(CHUNKS_LEFT) / chunks;
        self.room = (self.count + free).clamp(1, IN_FLIGHT);
    }

    fn left_to_others(&self) -> usize {
        if self.count < FEW { 0 } else { CHUNKS_LEFT }
    }

    /// Enqueues the copy of a piece of `bytes` bytes from device address `source` to `chunk` from `offset`
    /// on. The error of a copy that cannot be enqueued is returned at once, errors of its execution with the
    /// piece. A piece that `joins` is in the group of the piece before, if that group is open.
    ///
    /// # Safety
    /// `source` is the address of as many bytes of device memory, which live and are not written until the piece is
    /// settled. The range of the chunk is not accessed until then.
    pub(crate) unsafe fn enqueue(
        &mut self,
        source: usize,
        chunk: Arc<Lease>,
        offset: usize,
        bytes: usize,
        purpose: T,
        joins: bool,
    ) -> Result<()> {
        let group = self.room.div_ceil(GROUPS);
        if !joins && self.groups.back().is_some_and(|open| open.pieces.len() >= group) {
            self.close();
        }
        let room = LeaseSlice::new(Arc::clone(&chunk), offset, bytes);
        // SAFETY: the piece holds the chunk until the copy has ended; all else is the caller's promise.
        unsafe { self.copies.enqueue_download(room.address(), source, bytes)? };
        let piece = ChunkPiece { room, purpose, chunk };
        match self.groups.back_mut() {
            Some(group) if group.end.is_none() => group.pieces.push(piece),
            _ => self.groups.push_back(Group { pieces: vec![piece], end: None }),
        }
        self.count += 1;
        Ok(())
    }

    /// Ends the open group: its pieces do not wait for those to come.
    pub(crate) fn close(&mut self) {
        let Some(group) = self.groups.back_mut().filter(|group| group.end.is_none()) else { return };
        let end = self.copies.download.record().map(Arc::new).map_err(device_error);
        if end.is_err() {
            let never: Arc<dyn Fence> = Arc::new(Never);
            group.pieces.iter().for_each(|piece| piece.chunk.return_after(Arc::clone(&never)));
        }
        group.end = Some(end);
    }

    /// Waits for the oldest pieces. [`Pieces::settle`] then returns them, or their error, without waiting.
    pub(crate) fn wait(&mut self) {
        if self.groups.len() == 1 {
            self.close();
        }
        if let Some(Group { end: Some(Ok(event)), .. }) = self.groups.front() {
            let _ = self.copies.wait_worker(event);
        }
    }

    /// Waits for the oldest pieces, and returns them in order. After an error, of all of them, their bytes are not
    /// there.
    pub(crate) fn settle(&mut self) -> Option<(Result<()>, Vec<ChunkPiece<T>>)> {
        if self.groups.len() == 1 {
            self.close();
        }
        let Group { pieces, end } = self.groups.pop_front()?;
        self.count -= pieces.len();
        let arrived = match end.expect("only the last group is open") {
            Ok(event) => self.copies.wait_worker(&event).inspect_err(|_| {
                let event: Arc<dyn Fence> = event;
                pieces.iter().for_each(|piece| piece.chunk.return_after(Arc::clone(&event)));
            }),
            Err(error) => Err(error),
        };
        Some((arrived, pieces))
    }
}

impl<T> Drop for Pieces<'_, T> {
    fn drop(&mut self) {
        while self.settle().is_some() {}
    }
}

/// Never returns a buffer to its pool: the end of the copy is unknown, and the device may use the
/// buffer at any time.
pub(super) struct Never;

impl Fence for Never {
    fn is_done(&self) -> memascend_mem::Result<bool> {
        Err(CudaError::CopyLost.into())
    }
}
