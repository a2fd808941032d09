//! Chunks of staging memory, through which ordinary memory moves to and from the store.
//!
//! Update slots are lent to spills (`Staging::lending`): a layer's gradients come faster than a drive writes,
//! few updates run in a backward pass, and the drive would idle while the next layer computes. A lent slot
//! holds several chunks and waits only for their writes.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, Weak, mpsc};
use std::time::{Duration, Instant};

use memascend_mem::{Lease, LeaseSlice, LockExt, PAGE_BYTES, Pool, round_up_to_page};
use memascend_nvme::Operation;
use memascend_store::{Extent, Store};

use crate::{ExecError, InFlightCounter, Result};
use memascend_kernels::{GRADIENT_BLOCK, Plane};

/// How long a staging buffer may take to come free before the drive counts as hung, in seconds.
const PATIENCE_SECONDS: u64 = 120;
/// How long a thread that needs two chunks lets others have the only free one.
const SECOND_CHUNK_POLL: Duration = Duration::from_micros(200);
/// Chunks that gradients and activations kept in host memory leave free for transfers.
pub const STAGING_RESERVE: usize = 8;
/// Update slots that are not lent, so that an update that begins meanwhile does not wait for writes.
const SLOTS_LEFT: usize = 2;
/// Chunks read ahead of the one being consumed.
const READ_AHEAD: usize = 4;

/// Moves ordinary memory to and from the store through aligned pool buffers, one chunk at a time.
#[derive(Clone)]
pub struct Staging {
    store: Arc<Store>,
    pool: Pool,
    chunk_bytes: usize,
    lent: Option<Arc<Lent>>,
}

/// Update slots that serve as chunks for a while.
struct Lent {
    slots: Pool,
    slot_bytes: usize,
    /// The slot with room left, while something in it is being written, and how far it is filled.
    open: Mutex<(Weak<Lease>, usize)>,
}

impl Lent {
    /// Room in a slot, if enough of them are free. Never waits.
    fn take(&self, bytes: usize) -> Result<Option<LeaseSlice>> {
        let mut open = self.open.locked();
        if open.1 + bytes <= self.slot_bytes
            && let Some(lease) = open.0.upgrade()
        {
            open.1 += bytes;
            return Ok(Some(LeaseSlice::new(lease, open.1 - bytes, bytes)));
        }
        if bytes > self.slot_bytes {
            return Ok(None);
        }
        let Some(lease) = self.slots.try_lease_spare(self.slot_bytes, SLOTS_LEFT)? else { return Ok(None) };
        let lease = Arc::new(lease);
        *open = (Arc::downgrade(&lease), bytes);
        Ok(Some(LeaseSlice::new(lease, 0, bytes)))
    }
}

/// A chunk that is being read from the SSD.
pub(crate) struct ChunkRead {
    chunk: Arc<Lease>,
    told: mpsc::Receiver<memascend_store::Result<()>>,
}

impl ChunkRead {
    /// Waits for the read.
    pub(crate) fn wait(self) -> Result<Arc<Lease>> {
        self.told.recv().map_err(|_| ExecError::Closed)?.map_err(ExecError::from)?;
        Ok(self.chunk)
    }
}

/// The first `whole` bytes of a chunk, and the chunk itself if it stays.
fn room_in((chunk, stays): (Arc<Lease>, bool), whole: usize) -> (LeaseSlice, Option<Arc<Lease>>) {
    (LeaseSlice::new(Arc::clone(&chunk), 0, whole), stays.then_some(chunk))
}

impl Staging {
    /// Staging through buffers of `chunk_bytes` bytes of `pool`.
    ///
    /// # Panics
    /// If `chunk_bytes` is not a multiple of the page: every chunk begins on a block of its extent.
    pub fn new(store: Arc<Store>, pool: Pool, chunk_bytes: usize) -> Self {
        assert!(
            chunk_bytes > 0 && chunk_bytes.is_multiple_of(PAGE_BYTES),
            "chunks of {chunk_bytes} bytes are not whole pages"
        );
        Self { store, pool, chunk_bytes, lent: None }
    }

    /// Lends the update slots, of `slot_bytes` bytes each, to spills: gradients are captured in a backward
    /// pass, in which few updates run.
    #[must_use]
    pub fn lending(self, slots: Pool, slot_bytes: usize) -> Self {
        Self { lent: Some(Arc::new(Lent { slots, slot_bytes, open: Mutex::default() })), ..self }
    }

    /// Bytes of one chunk.
    pub fn chunk_bytes(&self) -> usize {
        self.chunk_bytes
    }

    /// The store that the chunks are transferred to and from.
    pub fn store(&self) -> &Arc<Store> {
        &self.store
    }

    /// A chunk, waiting for one to come free, and whether it may keep its data in host memory: only
    /// if `keep`, and not if it is one of the last free chunks.
    pub(crate) fn chunk_for(&self, keep: bool) -> Result<(Arc<Lease>, bool)> {
        match self.try_chunk_for(keep, 0)? {
            Some(chunk) => Ok(chunk),
            None => Ok((self.chunk()?, false)),
        }
    }

    /// Room for `bytes` bytes of a chunk, and the chunk itself if it may keep its data in host memory.
    /// Waits for a chunk only when no update slot is free either.
    pub(crate) fn room_for(&self, bytes: usize) -> Result<(LeaseSlice, Option<Arc<Lease>>)> {
        let whole = round_up_to_page(bytes);
        let found = match self.try_chunk_for(true, 0)? {
            Some(chunk) => chunk,
            None => match self.lent.as_ref().map(|lent| lent.take(whole)).transpose()?.flatten() {
                Some(room) => return Ok((room, None)),
                None => self.chunk_for(true)?,
            },
        };
        Ok(room_in(found, whole))
    }

    /// As [`Staging::room_for`], without waiting, and only in a chunk that may keep its data.
    pub(crate) fn spare_room_for(&self, bytes: usize) -> Result<Option<(LeaseSlice, Option<Arc<Lease>>)>> {
        let found = self.spare_chunk(STAGING_RESERVE)?;
        Ok(found.map(|chunk| room_in((chunk, true), round_up_to_page(bytes))))
    }

    /// As [`Staging::chunk_for`], without waiting, and only if more than `reserve` chunks are free.
    pub(crate) fn try_chunk_for(&self, keep: bool, reserve: usize) -> Result<Option<(Arc<Lease>, bool)>> {
        if keep && let Some(chunk) = self.spare_chunk(STAGING_RESERVE)? {
            return Ok(Some((chunk, true)));
        }
        Ok(self.spare_chunk(reserve)?.map(|chunk| (chunk, false)))
    }

    /// Two chunks, waiting until two are free at once. A thread that held one while it waits for the other
    /// could deadlock with another thread.
    pub(crate) fn two_chunks(&self) -> Result<[Arc<Lease>; 2]> {
        let deadline = Instant::now() + Duration::from_secs(PATIENCE_SECONDS);
        loop {
            let first = self.chunk()?;
            if let Some(second) = self.spare_chunk(0)? {
                return Ok([first, second]);
            }
            drop(first);
            if Instant::now() > deadline {
                return Err(ExecError::Stalled { seconds: PATIENCE_SECONDS });
            }
            std::thread::sleep(SECOND_CHUNK_POLL);
        }
    }

    /// How many chunks are free.
    pub(crate) fn free_chunks(&self) -> usize {
        self.pool.free_buffers(self.chunk_bytes)
    }

    /// A chunk, if more than `reserve` are free.
    pub(crate) fn spare_chunk(&self, reserve: usize) -> Result<Option<Arc<Lease>>> {
        Ok(self.pool.try_lease_spare(self.chunk_bytes, reserve)?.map(Arc::new))
    }

    /// A chunk, waiting for one to come free.
    pub fn chunk(&self) -> Result<Arc<Lease>> {
        let lease = self.pool.lease(self.chunk_bytes, Duration::from_secs(PATIENCE_SECONDS))?;
        lease.map(Arc::new).ok_or(ExecError::Stalled { seconds: PATIENCE_SECONDS })
    }

    /// Starts writing the first `bytes` bytes of `chunk` to `extent` at `offset`; `pending` counts
    /// the write.
    pub fn write_chunk(
        &self,
        extent: Extent,
        offset: usize,
        chunk: Arc<Lease>,
        bytes: usize,
        pending: &Arc<InFlightCounter>,
    ) {
        let buffer = LeaseSlice::new(chunk, 0, round_up_to_page(bytes));
        self.write_buffer(extent, offset, buffer, pending);
    }

    /// Starts writing `buffer`, whole pages, to `extent` at `offset`; `pending` counts the write.
    pub(crate) fn write_buffer(
        &self,
        extent: Extent,
        offset: usize,
        buffer: LeaseSlice,
        pending: &Arc<InFlightCounter>,
    ) {
        let write = pending.begin();
        let done =
            Box::new(move |result: std::result::Result<(), _>| write.end(result.map_err(ExecError::from)));
        self.store.transfer(Operation::Write, extent, offset as u64, buffer, done);
    }

    /// Writes `source` to `extent`. Returns when all of it is copied; `pending` counts the writes.
    pub fn write(&self, extent: Extent, source: &[u8], pending: &Arc<InFlightCounter>) -> Result<()> {
        self.write_at(extent, 0, source, pending)
    }

    /// As [`Staging::write`], from `offset` on, a multiple of the page.
    pub fn write_at(
        &self,
        extent: Extent,
        offset: usize,
        source: &[u8],
        pending: &Arc<InFlightCounter>,
    ) -> Result<()> {
        for (index, part) in source.chunks(self.chunk_bytes).enumerate() {
            let chunk = self.chunk()?;
            let buffer = LeaseSlice::new(Arc::clone(&chunk), 0, part.len());
            // SAFETY: the lease is fresh, and no other code has it.
            unsafe { buffer.as_mut_slice() }.copy_from_slice(part);
            self.write_chunk(extent, offset + index * self.chunk_bytes, chunk, part.len(), pending);
        }
        Ok(())
    }

    /// Reads `target.len()` bytes of `extent`, whose writes have ended.
    pub fn read(&self, extent: Extent, target: &mut [u8]) -> Result<()> {
        self.read_at(extent, 0, target)
    }

    /// As [`Staging::read`], from `offset` on, a multiple of the page.
    pub fn read_at(&self, extent: Extent, offset: usize, target: &mut [u8]) -> Result<()> {
        let (chunk_bytes, bytes) = (self.chunk_bytes, target.len());
        let mut parts = target.chunks_mut(chunk_bytes);
        let range = 0..bytes.div_ceil(chunk_bytes);
        self.read_chunks_at(extent, offset, chunk_bytes, range, bytes, |_, chunk, length| {
            let part = parts.next().expect("as many chunks as parts");
            let source = LeaseSlice::new(chunk, 0, length);
            // SAFETY: the read has ended and the chunk is ours alone.
            part.copy_from_slice(unsafe { source.as_slice() });
            Ok(())
        })
    }

    /// Reads a plane of as many elements as `values`, whose writes have ended, as fp32.
    ///
    /// # Panics
    /// If the plane holds the low halves of masters, which are not numbers by themselves.
    pub fn read_plane(&self, extent: Extent, plane: Plane, values: &mut [f32]) -> Result<()> {
        let elements = self.elements_of(plane);
        let (chunk_bytes, bytes) = (plane.span(0, elements).len(), plane.bytes(values.len()));
        let mut parts = values.chunks_mut(elements);
        self.read_chunks(extent, chunk_bytes, 0..parts.len(), bytes, |index, chunk, length| {
            let part = parts.next().expect("as many chunks as parts");
            let source = LeaseSlice::new(chunk, 0, length);
            // SAFETY: the read has ended and the chunk is ours alone.
            plane.read(unsafe { source.as_slice() }, index * elements, part);
            Ok(())
        })
    }

    /// Writes fp32 `values` as a plane, rounded to the nearest. Returns when all are copied;
    /// `pending` counts the writes.
    ///
    /// # Panics
    /// As [`Staging::read_plane`].
    pub fn write_plane(
        &self,
        extent: Extent,
        plane: Plane,
        values: &[f32],
        pending: &Arc<InFlightCounter>,
    ) -> Result<()> {
        let elements = self.elements_of(plane);
        for (index, part) in values.chunks(elements).enumerate() {
            let span = plane.span(index * elements, part.len());
            let chunk = self.chunk()?;
            let buffer = LeaseSlice::new(Arc::clone(&chunk), 0, span.len());
            // SAFETY: the lease is fresh, and no other code has it.
            let target = unsafe { buffer.as_mut_slice() };
            target.fill(0);
            plane.write(target, index * elements, part);
            self.write_chunk(extent, span.start, chunk, span.len(), pending);
        }
        Ok(())
    }

    /// Elements of a plane that a chunk holds: whole records, or whole pages.
    fn elements_of(&self, plane: Plane) -> usize {
        let unit = if plane.has_records() { GRADIENT_BLOCK } else { PAGE_BYTES };
        let units = self.chunk_bytes / plane.span(0, unit).len();
        assert!(units > 0, "chunks of {} bytes hold no part of a plane", self.chunk_bytes);
        units * unit
    }

    /// Starts reading `bytes` bytes of `extent` at `offset` into `chunk`.
    pub(crate) fn read_chunk(
        &self,
        extent: Extent,
        offset: usize,
        chunk: Arc<Lease>,
        bytes: usize,
    ) -> ChunkRead {
        let buffer = LeaseSlice::new(Arc::clone(&chunk), 0, round_up_to_page(bytes));
        let (sender, told) = mpsc::sync_channel(1);
        let done = Box::new(move |result| drop(sender.send(result)));
        self.store.transfer(Operation::Read, extent, offset as u64, buffer, done);
        ChunkRead { chunk, told }
    }

    /// Reads the first `bytes` bytes of `extent` in pieces of `chunk_bytes`, and calls
    /// `consume(index, chunk, bytes)` for each piece in `range`, in order. Reads ahead as far as
    /// chunks are free.
    pub fn read_chunks(
        &self,
        extent: Extent,
        chunk_bytes: usize,
        range: std::ops::Range<usize>,
        bytes: usize,
        consume: impl FnMut(usize, Arc<Lease>, usize) -> Result<()>,
    ) -> Result<()> {
        self.read_chunks_at(extent, 0, chunk_bytes, range, bytes, consume)
    }

    /// As [`Staging::read_chunks`], of the bytes from `offset` on.
    fn read_chunks_at(
        &self,
        extent: Extent,
        offset: usize,
        chunk_bytes: usize,
        range: std::ops::Range<usize>,
        bytes: usize,
        mut consume: impl FnMut(usize, Arc<Lease>, usize) -> Result<()>,
    ) -> Result<()> {
        let mut ahead = VecDeque::new();
        let mut next = range.start;
        while next < range.end || !ahead.is_empty() {
            while next < range.end && ahead.len() < READ_AHEAD {
                // Only the first chunk may be waited for: a thread that holds chunks and waits
                // could deadlock with another one.
                let chunk = if ahead.is_empty() { Some(self.chunk()?) } else { self.spare_chunk(1)? };
                let Some(chunk) = chunk else { break };
                let length = chunk_bytes.min(bytes - next * chunk_bytes);
                let at = offset + next * chunk_bytes;
                ahead.push_back((next, length, self.read_chunk(extent, at, chunk, length)));
                next += 1;
            }
            let (index, length, read) = ahead.pop_front().expect("a chunk was just requested");
            consume(index, read.wait()?, length)?;
        }
        Ok(())
    }
}
