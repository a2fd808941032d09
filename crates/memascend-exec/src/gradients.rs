//! Captured gradients: copied or added up in staging buffers, and spilled to the SSD.

mod adders;
mod arriving;
mod dtypes;
mod ranges;

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use memascend_mem::{Lease, LeaseSlice, LockExt, round_up_to_page};
use memascend_store::Extent;

use crate::{InFlightCounter, Result, STAGING_RESERVE, Staging};
use memascend_kernels::{GRADIENT_BLOCK, GradientStats, Projection, Projector, Scratch};

use self::adders::{AdderWork, Adders};
pub(crate) use self::arriving::{Arrivals, Arriving};
pub use self::dtypes::GradientDtypes;
pub(crate) use self::dtypes::widen;
pub use self::ranges::GradientRanges;

/// Chunks that several threads merge at once.
const CHUNKS_AT_ONCE: usize = 32;

/// Names a gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GradientId(pub usize);

/// The gradients of a training run: captured as autograd makes them, kept in spare staging buffers,
/// and spilled to the SSD chunk by chunk when no buffer is spare.
pub struct Gradients {
    staging: Staging,
    chunk_elements: usize,
    records: Mutex<Vec<Arc<Record>>>,
    scratch: Arc<Scratch>,
    adders: Adders,
}

struct Record {
    dtypes: GradientDtypes,
    numel: usize,
    packed: bool,
    pending: Arc<InFlightCounter>,
    /// Counts captures from a device that have not ended; everything else waits for them.
    arriving: Arc<InFlightCounter>,
    /// How often the gradient was captured, cleared or taken; changed under the place's lock.
    changes: AtomicU64,
    place: Mutex<GradientPlace>,
}

enum GradientPlace {
    /// Cut into chunks, each in a staging buffer or on the SSD.
    Chunks { extent: Extent, chunks: Vec<Chunk> },
    /// Small tensors packed together: a buffer of their own for the whole run.
    Packed { buffer: LeaseSlice },
}

/// Where one chunk of a gradient is.
#[derive(Clone)]
pub(crate) enum Chunk {
    /// There is no gradient yet.
    Empty,
    /// In a staging buffer.
    Host(Arc<Lease>),
    /// On the SSD.
    Ssd,
}

/// A gradient handed to an update. Host chunks return to the pool as the update consumes them.
#[derive(Clone)]
pub struct GradientSource {
    pub(crate) place: SourcePlace,
    /// Whether it is kept in bf16, and widened to fp32 before the update.
    pub(crate) rounded: bool,
}

#[derive(Clone)]
pub(crate) enum SourcePlace {
    Chunks {
        extent: Extent,
        chunk_elements: usize,
        chunks: Vec<Chunk>,
    },
    Packed {
        buffer: LeaseSlice,
    },
    /// Each chunk goes to the update as it arrives.
    Arriving {
        chunk_elements: usize,
    },
    /// Every segment of the update names its own address.
    Addresses,
}

impl GradientSource {
    /// The gradients lie at the addresses in the segments.
    pub fn addresses() -> Self {
        Self { place: SourcePlace::Addresses, rounded: false }
    }
}

impl Gradients {
    /// No gradients yet. They are cut into chunks of `chunk_elements` elements, as in the executor:
    /// a multiple of [`GRADIENT_BLOCK`], and at most a buffer of `staging`.
    pub fn new(staging: Staging, chunk_elements: usize) -> Self {
        assert!(chunk_elements.is_multiple_of(GRADIENT_BLOCK), "statistics are taken in whole blocks");
        let adders = Adders::new(1);
        Self { staging, chunk_elements, records: Mutex::default(), scratch: Arc::default(), adders }
    }

    /// Adds up gradients of a device in `threads` threads. Their number changes no bit.
    #[must_use]
    pub fn adding_in(self, threads: usize) -> Self {
        Self { adders: Adders::new(threads), ..self }
    }

    /// Allocates the gradient of a tensor that moves alone. `pending` counts its spills.
    pub fn create(
        &self,
        name: &str,
        dtypes: impl Into<GradientDtypes>,
        numel: usize,
        pending: Arc<InFlightCounter>,
    ) -> Result<GradientId> {
        let dtypes = dtypes.into();
        let bytes = numel * dtypes.kept_bytes();
        let extent = self.staging.store().allocate(name, bytes as u64)?;
        let chunks = vec![Chunk::Empty; numel.div_ceil(self.chunk_elements)];
        Ok(self.insert(dtypes, numel, pending, GradientPlace::Chunks { extent, chunks }))
    }

    /// Registers `buffer` for the gradients of small tensors packed together.
    pub fn create_packed(
        &self,
        dtypes: impl Into<GradientDtypes>,
        numel: usize,
        buffer: LeaseSlice,
    ) -> GradientId {
        let dtypes = dtypes.into();
        assert!(numel * dtypes.kept_bytes() <= buffer.bytes(), "the buffer holds the pack");
        self.insert(dtypes, numel, Arc::default(), GradientPlace::Packed { buffer })
    }

    /// [`Gradients::create_packed`] in a staging buffer, which has no other use from then on. `None` if no more
    /// than [`STAGING_RESERVE`] of them are free.
    ///
    /// # Panics
    /// If a chunk does not hold the pack.
    pub fn create_packed_in_staging(
        &self,
        dtypes: impl Into<GradientDtypes>,
        numel: usize,
    ) -> Result<Option<GradientId>> {
        let dtypes = dtypes.into();
        let Some(chunk) = self.staging.spare_chunk(STAGING_RESERVE)? else { return Ok(None) };
        let buffer = LeaseSlice::new(chunk, 0, round_up_to_page(numel * dtypes.kept_bytes()));
        Ok(Some(self.create_packed(dtypes, numel, buffer)))
    }

    /// Captures a gradient of `numel` elements that begins at element `start` of the tensor: copies
    /// it, or adds it to the gradient so far if `accumulate`. Returns the statistics of the result,
    /// as it is kept.
    ///
    /// # Safety
    /// `source` points to `numel` readable elements of the dtype that the gradient is made in, which
    /// are not written during the call.
    ///
    /// # Panics
    /// If the range leaves the tensor, or is only a part of a tensor that moves alone.
    pub unsafe fn capture(
        &self,
        id: GradientId,
        start: usize,
        source: *const u8,
        numel: usize,
        accumulate: bool,
    ) -> Result<GradientStats> {
        // SAFETY: the caller's promise.
        unsafe { self.capture_and_project(id, start, source, numel, accumulate, None) }
    }

    /// [`Gradients::capture`], while `projector` projects the result.
    ///
    /// # Safety
    /// As [`Gradients::capture`].
    pub unsafe fn capture_and_project(
        &self,
        id: GradientId,
        start: usize,
        source: *const u8,
        numel: usize,
        accumulate: bool,
        mut projector: Option<&mut Projector>,
    ) -> Result<GradientStats> {
        let record = self.record(id);
        record.check(start, numel);
        if numel == 0 {
            return Ok(GradientStats::default()); // torch gives an empty tensor the address 0
        }
        let dtypes = record.dtypes;
        // SAFETY: the caller vouches for `numel` readable elements.
        let source = unsafe { std::slice::from_raw_parts(source, numel * dtypes.made_bytes()) };
        let mut stats = GradientStats::default();
        // A gradient that is stored as it is made is projected as a whole, while its chunks are being
        // written.
        let whole = if accumulate || dtypes.rounded() { None } else { projector.take() };
        let mut place = record.settled();
        record.changed();
        match &mut *place {
            GradientPlace::Packed { buffer } => {
                let element = dtypes.kept_bytes();
                let target = buffer.narrow(start * element, numel * element);
                // SAFETY: the record's lock is held and the pack's buffer belongs to the record; an
                // update that reads it has been waited for before gradients are captured again.
                let target = unsafe { target.as_mut_slice() };
                dtypes.merge(target, source, accumulate, &mut stats);
                if let Some(projector) = &mut projector {
                    projector.add(target);
                }
            }
            GradientPlace::Chunks { extent, chunks } => {
                record.pending.wait()?;
                self.capture_chunks(&record, *extent, chunks, 0, source, accumulate, &mut stats, projector)?;
            }
        }
        if let Some(projector) = whole {
            projector.add(source);
        }
        Ok(stats)
    }

    /// Captures chunks of the gradient of a tensor that moves alone: `source` is whole chunks from
    /// chunk `first` on.
    #[allow(clippy::too_many_arguments)]
    fn capture_chunks(
        &self,
        record: &Record,
        extent: Extent,
        chunks: &mut [Chunk],
        first: usize,
        source: &[u8],
        accumulate: bool,
        stats: &mut GradientStats,
        mut projector: Option<&mut Projector>,
    ) -> Result<()> {
        let (dtypes, pending) = (record.dtypes, &record.pending);
        let part_bytes = self.chunk_elements * dtypes.made_bytes();
        let chunk_bytes = self.chunk_elements * dtypes.kept_bytes();
        let end = first + source.len().div_ceil(part_bytes);
        let mut index = first;
        while index < end {
            let part = |index: usize| {
                let start = (index - first) * part_bytes;
                &source[start..source.len().min(start + part_bytes)]
            };
            // Neighbouring spilled chunks are read ahead of the addition.
            let spilled = if accumulate {
                chunks[index..end].iter().take_while(|chunk| matches!(chunk, Chunk::Ssd)).count()
            } else {
                0
            };
            if spilled > 0 {
                self.staging.read_chunks(
                    extent,
                    chunk_bytes,
                    index..index + spilled,
                    record.numel * dtypes.kept_bytes(),
                    |index, chunk, length| {
                        let target = LeaseSlice::new(Arc::clone(&chunk), 0, length);
                        // SAFETY: the read has ended and the chunk is ours alone.
                        let kept = unsafe { target.as_mut_slice() };
                        dtypes.merge(kept, part(index), true, stats);
                        if let Some(projector) = &mut projector {
                            projector.add(kept);
                        }
                        self.staging.write_chunk(extent, index * chunk_bytes, chunk, length, pending);
                        Ok(())
                    },
                )?;
                index += spilled;
                continue;
            }
            let run = index..index + self.run_from(&chunks[index..end], accumulate);
            let (mut works, mut rooms) = (Vec::new(), Vec::new());
            for index in run {
                let part = part(index);
                let length = part.len() / dtypes.made_bytes() * dtypes.kept_bytes();
                let (room, stays, add) = match &chunks[index] {
                    Chunk::Host(lease) => {
                        (LeaseSlice::new(Arc::clone(lease), 0, length), Some(Arc::clone(lease)), accumulate)
                    }
                    // Only the first may be waited for: a thread that frees chunks may wait for the ones held
                    // here.
                    _ if rooms.is_empty() => {
                        let (room, stays) = self.staging.room_for(length)?;
                        (room, stays, false)
                    }
                    _ => match self.staging.spare_room_for(length)? {
                        Some((room, stays)) => (room, stays, false),
                        None => break,
                    },
                };
                let target = room.narrow(0, length);
                let address = NonNull::from(part).cast();
                // SAFETY: the source is there until this function returns, and the work ends before.
                let source = unsafe { LeaseSlice::of_caller(address, part.len()) };
                works.push(AdderWork::Merge { source, target: target.clone(), add });
                rooms.push((room, target, stays));
            }
            // SAFETY: the record's lock is held; the rooms are fresh or belong to the record.
            unsafe { self.adders.run(dtypes, works, stats)? };
            for (room, merged, stays) in rooms {
                if let Some(projector) = &mut projector {
                    // SAFETY: as above, and the work has ended.
                    projector.add(unsafe { merged.as_mut_slice() });
                }
                // The last to hold the buffer is its write, or the gradient.
                drop(merged);
                chunks[index] = match stays {
                    Some(lease) => Chunk::Host(lease),
                    None => {
                        self.staging.write_buffer(extent, index * chunk_bytes, room, pending);
                        Chunk::Ssd
                    }
                };
                index += 1;
            }
        }
        Ok(())
    }

    /// How many of these chunks, from the first on, are merged at once: none of them is read from the SSD for it.
    fn run_from(&self, chunks: &[Chunk], accumulate: bool) -> usize {
        let most = if self.adders.is_one() { 1 } else { CHUNKS_AT_ONCE };
        let is_read = |chunk: &Chunk| accumulate && matches!(chunk, Chunk::Ssd);
        chunks.iter().take(most).take_while(|chunk| !is_read(chunk)).count()
    }

    /// Writes gradients that are kept in staging buffers to the SSD, but for `stay` chunks, and waits
    /// for the end: the buffers are free when this returns.
    ///
    /// # Errors
    /// If a write fails.
    pub fn spill(&self, mut stay: usize) -> Result<()> {
        let records = self.records.locked().clone();
        for record in &records {
            let mut place = record.settled();
            let GradientPlace::Chunks { extent, chunks } = &mut *place else { continue };
            record.pending.wait()?;
            let chunk_bytes = self.chunk_elements * record.dtypes.kept_bytes();
            let bytes = record.numel * record.dtypes.kept_bytes();
            for (index, chunk) in chunks.iter_mut().enumerate() {
                if !matches!(chunk, Chunk::Host(_)) {
                    continue;
                }
                if stay > 0 {
                    stay -= 1;
                    continue;
                }
                let Chunk::Host(lease) = std::mem::replace(chunk, Chunk::Ssd) else {
                    unreachable!("matched")
                };
                let length = chunk_bytes.min(bytes - index * chunk_bytes);
                self.staging.write_chunk(*extent, index * chunk_bytes, lease, length, &record.pending);
            }
        }
        records.iter().try_for_each(|record| record.pending.wait())
    }

    /// Forgets a gradient's values; its extent on the SSD stays.
    pub fn clear(&self, id: GradientId) {
        let record = self.record(id);
        let mut place = record.settled();
        record.changed();
        if let GradientPlace::Chunks { chunks, .. } = &mut *place {
            chunks.fill(Chunk::Empty);
        }
    }

    /// Hands a gradient over to an update and forgets it.
    pub fn take(&self, id: GradientId) -> GradientSource {
        let record = self.record(id);
        let mut place = record.settled();
        record.changed();
        let place = match &mut *place {
            GradientPlace::Packed { buffer } => SourcePlace::Packed { buffer: buffer.clone() },
            GradientPlace::Chunks { extent, chunks } => {
                let empty = vec![Chunk::Empty; chunks.len()];
                let chunks = std::mem::replace(chunks, empty);
                SourcePlace::Chunks { extent: *extent, chunk_elements: self.chunk_elements, chunks }
            }
        };
        GradientSource { place, rounded: record.dtypes.rounded() }
    }

    /// Reads a gradient of `target.len()` bytes, in the dtype it is kept in. Resident chunks are not read
    /// from the drives.
    pub fn read(&self, id: GradientId, target: &mut [u8]) -> Result<()> {
        let numel = target.len() / self.record(id).dtypes.kept_bytes();
        let mut rest = target;
        self.visit(id, 0, numel, |piece| {
            let (part, after) = std::mem::take(&mut rest).split_at_mut(piece.len());
            part.copy_from_slice(piece);
            rest = after;
        })
    }

    /// Hands out `numel` elements of a gradient from element `start` on, as they are kept, in pieces and in
    /// order; a piece without a gradient is zeros.
    pub fn visit(
        &self,
        id: GradientId,
        start: usize,
        numel: usize,
        mut consume: impl FnMut(&[u8]),
    ) -> Result<()> {
        let record = self.record(id);
        record.check_within(start, numel);
        let element = record.dtypes.kept_bytes();
        let place = record.settled();
        record.pending.wait()?;
        let (extent, chunks) = match &*place {
            GradientPlace::Packed { buffer } => {
                let source = buffer.narrow(start * element, numel * element);
                // SAFETY: the record's lock is held, and no update is under way on a gradient that a
                // step has not taken yet.
                consume(unsafe { source.as_slice() });
                return Ok(());
            }
            GradientPlace::Chunks { extent, chunks } => (*extent, chunks),
        };
        let chunk_bytes = self.chunk_elements * element;
        let (first, end) = (start * element, (start + numel) * element);
        let (mut index, chunks) = (first / chunk_bytes, &chunks[..end.div_ceil(chunk_bytes)]);
        // The first byte of a chunk that is asked for.
        let begin = |index: usize| first.saturating_sub(index * chunk_bytes);
        while index < chunks.len() {
            let length = chunk_bytes.min(end - index * chunk_bytes);
            let spilled = chunks[index..].iter().take_while(|chunk| matches!(chunk, Chunk::Ssd)).count();
            if spilled > 0 {
                let range = index..index + spilled;
                self.staging.read_chunks(extent, chunk_bytes, range, end, |index, chunk, length| {
                    let source = LeaseSlice::new(chunk, begin(index), length - begin(index));
                    // SAFETY: the read has ended and the chunk is ours alone.
                    consume(unsafe { source.as_slice() });
                    Ok(())
                })?;
                index += spilled;
                continue;
            }
            if let Chunk::Host(lease) = &chunks[index] {
                let source = LeaseSlice::new(Arc::clone(lease), begin(index), length - begin(index));
                // SAFETY: the record's lock is held; only captures write its chunks.
                consume(unsafe { source.as_slice() });
            } else {
                consume(&vec![0; length - begin(index)]);
            }
            index += 1;
        }
        Ok(())
    }

    /// Projects the gradient that begins at element `start` of a tensor's, as it is kept.
    pub fn project(
        &self,
        id: GradientId,
        start: usize,
        projection: Projection,
        threads: usize,
    ) -> Result<Projector> {
        let mut projector = self.projector(id, projection, threads);
        self.visit(id, start, projection.rows * projection.columns, |piece| projector.add(piece))?;
        Ok(projector)
    }

    /// Adds the elements from element `start` of a tensor's on to a projector of a share, as many as it takes.
    pub fn project_share(&self, id: GradientId, start: usize, projector: &mut Projector) -> Result<()> {
        let record = self.record(id);
        let count = projector.share().len();
        // The bytes behind the share of an unpacked tensor are padding.
        let visited = if record.packed { count } else { record.numel };
        let mut left = count * record.dtypes.kept_bytes();
        self.visit(id, start, visited, |piece| {
            let taken = piece.len().min(left);
            projector.add(&piece[..taken]);
            left -= taken;
        })
    }

    /// The projector of the share that `id` has of a gradient.
    pub fn share_projector(
        &self,
        id: GradientId,
        projection: Projection,
        share: Range<usize>,
        threads: usize,
    ) -> Projector {
        Projector::of_share(projection, share, self.record(id).dtypes.kept(), threads, &self.scratch)
    }

    /// The projector of a gradient that is about to be captured into `id`.
    pub fn projector(&self, id: GradientId, projection: Projection, threads: usize) -> Projector {
        Projector::new(projection, self.record(id).dtypes.kept(), threads, &self.scratch)
    }

    /// The memory of the projections of these gradients, and of the moments that steps keep of them.
    pub fn scratch(&self) -> &Arc<Scratch> {
        &self.scratch
    }

    fn insert(
        &self,
        dtypes: GradientDtypes,
        numel: usize,
        pending: Arc<InFlightCounter>,
        place: GradientPlace,
    ) -> GradientId {
        let packed = matches!(place, GradientPlace::Packed { .. });
        let (arriving, place) = (Arc::default(), Mutex::new(place));
        let mut records = self.records.locked();
        let changes = AtomicU64::new(0);
        records.push(Arc::new(Record { dtypes, numel, packed, pending, arriving, changes, place }));
        GradientId(records.len() - 1)
    }

    fn record(&self, id: GradientId) -> Arc<Record> {
        Arc::clone(&self.records.locked()[id.0])
    }
}

impl Record {
    fn check_within(&self, start: usize, numel: usize) {
        let end = start.checked_add(numel).expect("the end overflows");
        assert!(end <= self.numel, "elements {start}+{numel} of a gradient of {}", self.numel);
    }

    fn check(&self, start: usize, numel: usize) {
        self.check_within(start, numel);
        let whole = start == 0 && numel == self.numel;
        assert!(numel == 0 || whole || self.packed, "a large tensor's gradient is captured whole");
    }

    /// Counts a change; returns its number. The place is locked.
    fn changed(&self) -> u64 {
        self.changes.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Locks the place once no capture from a device is under way. The error of a failed one went
    /// to its caller.
    fn settled(&self) -> MutexGuard<'_, GradientPlace> {
        loop {
            let _ = self.arriving.wait();
            let place = self.place.locked();
            // A capture that has begun meanwhile locks the place for each of its pieces.
            if self.arriving.is_idle() {
                return place;
            }
        }
    }
}
