//! Gradients on their way from a device: several at once, and each ends as a whole.
//!
//! The copies of the next gradient are enqueued before the one before has arrived. Nothing waits
//! for a chunk, a lock or a write while it holds chunks, since two threads that hold chunks and wait could
//! deadlock. So a capture does not hold its gradient's lock between pieces; other users of the gradient look
//! again, under the lock, whether a capture has begun.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};

use memascend_kernels::{GRADIENT_BLOCK, GradientStats};
use memascend_mem::{Lease, LeaseSlice, LockExt};

use super::adders::AdderWork;
use super::{Chunk, GradientId, GradientPlace, Gradients, Record};
use crate::device::{ChunkPiece, Copies, DeviceGradient, Pieces, Promise};
use crate::staging::ChunkRead;
use crate::{ExecError, InFlight, Result};

/// Bytes of a block's sum.
const SUM_BYTES: usize = size_of::<f64>();
/// Bytes of the flag behind the sums.
const FLAG_BYTES: usize = size_of::<u32>();

/// A gradient that a device has made. Until it is captured, or this value is dropped, every other use of the gradient
/// waits.
pub(crate) struct Arriving {
    gradients: Arc<Gradients>,
    record: Arc<Record>,
    source: DeviceGradient,
    underway: InFlight,
    promise: Promise<GradientStats>,
    stats: GradientStats,
    failure: Option<ExecError>,
    /// Pieces that were enqueued and not settled.
    unsettled: usize,
    enqueued: bool,
}

/// Purpose of a piece: part of a gradient, by the number of the gradient.
struct Purpose {
    gradient: usize,
    part: CopiedPart,
}

enum CopiedPart {
    /// The elements of a chunk.
    Elements { index: usize, base: Base },
    /// Sums of squares; the flag lies behind the last.
    Sums,
}

/// The destination of elements.
enum Base {
    /// Nothing; or a packed gradient, or a chunk in memory.
    Here {
        /// Whether the piece's own chunk may keep them.
        stays: bool,
    },
    /// A chunk on the SSD, which is being read.
    Ssd(ChunkRead),
}

/// Gradients on their way through one stream, in the order of their captures. The copies of the next are
/// enqueued before one has arrived.
pub(crate) struct Arrivals<'a> {
    pieces: Pieces<'a, Purpose>,
    /// The oldest first, which has the number `first`.
    gradients: VecDeque<Arriving>,
    first: usize,
    /// The chunk that sums are being copied to, and how far it is filled.
    sums: (Weak<Lease>, usize),
}

impl Gradients {
    /// Begins a capture from a device: until the capture has ended, every other use of the gradient
    /// waits. The promise gives the statistics of the result. A gradient whose copy fails is lost.
    ///
    /// # Panics
    /// As [`Gradients::capture`], if the gradient is kept in another dtype than it is made in, and if
    /// there are block sums of another number of blocks, or of a gradient that is added up.
    pub(crate) fn begin_capture(
        self: &Arc<Self>,
        id: GradientId,
        source: DeviceGradient,
        promise: Promise<GradientStats>,
    ) -> Arriving {
        let record = self.record(id);
        record.check(source.start, source.numel);
        assert!(!record.dtypes.rounded(), "gradients of a device are kept as they are made");
        if let Some((_, count)) = source.sums {
            assert!(!source.accumulate, "block sums of an addend are not those of the sum");
            assert_eq!(count, source.numel.div_ceil(GRADIENT_BLOCK), "one sum for each block");
        }
        Arriving {
            gradients: Arc::clone(self),
            underway: record.arriving.begin(),
            record,
            source,
            promise,
            stats: GradientStats::default(),
            failure: None,
            unsettled: 0,
            enqueued: false,
        }
    }
}

impl<'a> Arrivals<'a> {
    pub(crate) fn new(copies: &'a Copies) -> Self {
        Self { pieces: Pieces::new(copies), gradients: VecDeque::new(), first: 0, sums: (Weak::new(), 0) }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.gradients.is_empty()
    }

    /// Enqueues the copies of a gradient. Takes earlier pieces over where there is no room for more.
    ///
    /// # Safety
    /// The source is device memory that lives and is not written from its event until the end of the capture.
    pub(crate) unsafe fn add(&mut self, gradient: Arriving) {
        self.gradients.push_back(gradient);
        // SAFETY: the caller's promise.
        let enqueued = unsafe { self.enqueue() };
        let gradient = self.last();
        if let Err(error) = enqueued {
            gradient.failure.get_or_insert(error);
        }
        gradient.enqueued = true;
        self.end_gradients();
    }

    /// Waits for the oldest pieces.
    pub(crate) fn wait(&mut self) {
        self.pieces.wait();
    }

    /// Waits for the oldest pieces, and takes them over.
    pub(crate) fn settle(&mut self) {
        let Some((arrived, pieces)) = self.pieces.settle() else { return };
        let mut pieces = pieces.into_iter().peekable();
        while let Some(piece) = pieces.next() {
            let number = piece.purpose.gradient;
            let mut own = vec![piece];
            while let Some(piece) = pieces.next_if(|piece| piece.purpose.gradient == number) {
                own.push(piece);
            }
            self.gradients[number - self.first].take_over(own, &arrived);
        }
        self.end_gradients();
    }

    /// Ends the oldest gradients that have nothing on its way.
    fn end_gradients(&mut self) {
        while self.gradients.front().is_some_and(|oldest| oldest.enqueued && oldest.unsettled == 0) {
            self.first += 1;
            self.gradients.pop_front().into_iter().for_each(Arriving::end);
        }
    }

    fn last(&mut self) -> &mut Arriving {
        self.gradients.back_mut().expect("a gradient was added")
    }

    /// Enqueues the copies of the last gradient.
    ///
    /// # Safety
    /// As [`Arrivals::add`].
    unsafe fn enqueue(&mut self) -> Result<()> {
        self.pieces.copies().enter()?;
        let Arriving { gradients, record, source, .. } = self.last();
        let (gradients, record, source) = (Arc::clone(gradients), Arc::clone(record), source.clone());
        if source.numel == 0 {
            return Ok(());
        }
        self.begin(&record, source.accumulate)?;
        if !source.ready.is_done()? {
            // Pieces before must not wait for the computation of this one.
            self.pieces.close();
        }
        self.pieces.copies().download_after(&source.ready)?;
        let element = record.dtypes.kept_bytes();
        let piece_bytes = gradients.chunk_elements * element;
        for index in 0..source.numel.div_ceil(gradients.chunk_elements) {
            // SAFETY: the caller's promise.
            unsafe { self.enqueue_elements(&gradients, &record, &source, index, piece_bytes)? };
        }
        match source.sums {
            // SAFETY: the caller's promise.
            Some((address, count)) => unsafe { self.enqueue_sums(&gradients, address, count) },
            None => Ok(()),
        }
    }

    /// Notes that a record is about to change. Waits for its other users, but not while it holds chunks: they
    /// may be waiting for one.
    fn begin(&mut self, record: &Arc<Record>, accumulate: bool) -> Result<()> {
        let earlier = self.gradients.len() - 1;
        let is_coming = |gradient: &Arriving| Arc::ptr_eq(&gradient.record, record);
        let is_coming = !record.packed && self.gradients.iter().take(earlier).any(is_coming);
        let is_free = !is_coming && record.pending.is_idle() && record.place.try_lock().is_ok();
        if !is_free {
            while !self.pieces.is_empty() {
                self.settle();
            }
        }
        let mut place = record.place.locked();
        record.changed();
        if let GradientPlace::Chunks { chunks, .. } = &mut *place {
            record.pending.wait()?;
            if !accumulate {
                chunks.fill(Chunk::Empty);
            }
        }
        Ok(())
    }

    /// # Safety
    /// As [`Arrivals::add`].
    unsafe fn enqueue_elements(
        &mut self,
        gradients: &Gradients,
        record: &Record,
        source: &DeviceGradient,
        index: usize,
        piece_bytes: usize,
    ) -> Result<()> {
        let (staging, offset) = (&gradients.staging, index * piece_bytes);
        let length = piece_bytes.min(source.numel * record.dtypes.kept_bytes() - offset);
        let (extent, keeps) = match &*record.place.locked() {
            GradientPlace::Chunks { extent, chunks } => (
                matches!(chunks[index], Chunk::Ssd).then_some(*extent),
                matches!(chunks[index], Chunk::Empty),
            ),
            GradientPlace::Packed { .. } => (None, false),
        };
        let (chunk, base) = loop {
            let found = match extent {
                Some(extent) => self.pieces.two_chunks(staging)?.map(|[chunk, read]| {
                    (chunk, Base::Ssd(staging.read_chunk(extent, offset, read, length)))
                }),
                None => {
                    self.pieces.chunk(staging, keeps)?.map(|(chunk, stays)| (chunk, Base::Here { stays }))
                }
            };
            match found {
                Some(found) => break found,
                None => self.settle(),
            }
        };
        let part = CopiedPart::Elements { index, base };
        // SAFETY: the chunk is fresh; the source is the caller's promise.
        unsafe { self.enqueue_part(source.address + offset, chunk, 0, length, part) }
    }

    /// Enqueues the copy of `count` sums at device address `source`, and of the flag behind them, after the elements.
    ///
    /// # Safety
    /// As [`Arrivals::add`].
    unsafe fn enqueue_sums(&mut self, gradients: &Gradients, source: usize, count: usize) -> Result<()> {
        let (bytes, chunk_bytes) = (count * SUM_BYTES + FLAG_BYTES, gradients.staging.chunk_bytes());
        for offset in (0..bytes).step_by(chunk_bytes) {
            let length = chunk_bytes.min(bytes - offset);
            let (chunk, begin) = match self.sums.0.upgrade() {
                Some(chunk) if self.sums.1 + length <= chunk_bytes => (chunk, self.sums.1),
                _ => loop {
                    match self.pieces.chunk(&gradients.staging, false)? {
                        Some((chunk, _)) => break (chunk, 0),
                        None => self.settle(),
                    }
                },
            };
            self.sums = (Arc::downgrade(&chunk), (begin + length).next_multiple_of(SUM_BYTES));
            // SAFETY: no other piece is at that place of the chunk; the source is the caller's promise.
            unsafe { self.enqueue_part(source + offset, chunk, begin, length, CopiedPart::Sums)? };
        }
        Ok(())
    }

    /// # Safety
    /// As [`Pieces::enqueue`].
    unsafe fn enqueue_part(
        &mut self,
        source: usize,
        chunk: Arc<Lease>,
        offset: usize,
        length: usize,
        part: CopiedPart,
    ) -> Result<()> {
        let joins = matches!(part, CopiedPart::Sums);
        let purpose = Purpose { gradient: self.first + self.gradients.len() - 1, part };
        // SAFETY: the caller's promise.
        unsafe { self.pieces.enqueue(source, chunk, offset, length, purpose, joins)? };
        self.last().unsettled += 1;
        Ok(())
    }
}

impl Drop for Arrivals<'_> {
    fn drop(&mut self) {
        while !self.pieces.is_empty() {
            self.settle();
        }
    }
}

impl Arriving {
    /// Takes consecutive pieces over that have `arrived`, or failed to.
    fn take_over(&mut self, pieces: Vec<ChunkPiece<Purpose>>, arrived: &Result<()>) {
        self.unsettled -= pieces.len();
        if self.failure.is_some() {
            return;
        }
        let taken = arrived.clone().and_then(|()| self.keep(pieces));
        self.failure = taken.err();
    }

    /// Adds pieces to the stored gradient, and measures the result.
    fn keep(&mut self, pieces: Vec<ChunkPiece<Purpose>>) -> Result<()> {
        let (gradients, record) = (Arc::clone(&self.gradients), Arc::clone(&self.record));
        let mut place = record.place.locked();
        let (mut works, mut kept) = (Vec::new(), Vec::new());
        for piece in pieces {
            match &piece.purpose.part {
                CopiedPart::Sums => self.add_sums(&piece.room),
                CopiedPart::Elements { .. } => {
                    let (work, chunk) = self.find_work(&place, piece)?;
                    works.extend(work);
                    kept.extend(chunk);
                }
            }
        }
        // SAFETY: the record's lock is held, and copies and reads have ended: what is written is the record's or ours
        // alone. An update that reads a pack's buffer has been waited for before gradients are captured again.
        unsafe { gradients.adders.run(record.dtypes, works, &mut self.stats)? };
        let GradientPlace::Chunks { extent, chunks } = &mut *place else { return Ok(()) };
        for NewChunk { index, chunk, stays, length } in kept {
            chunks[index] = if stays {
                Chunk::Host(chunk)
            } else {
                let offset = index * gradients.chunk_elements * record.dtypes.kept_bytes();
                gradients.staging.write_chunk(*extent, offset, chunk, length, &record.pending);
                Chunk::Ssd
            };
        }
        Ok(())
    }

    /// The operation on the elements of a piece, and the chunk that has them then, unless the record has it.
    fn find_work(
        &self,
        place: &GradientPlace,
        piece: ChunkPiece<Purpose>,
    ) -> Result<(Option<AdderWork>, Option<NewChunk>)> {
        let (source, length) = (piece.room.clone(), piece.room.bytes());
        let DeviceGradient { start, accumulate: add, sums, .. } = self.source;
        let (Purpose { part, .. }, arrived) = piece.into_parts();
        let CopiedPart::Elements { index, base } = part else { unreachable!("sums are no elements") };
        let element = self.record.dtypes.kept_bytes();
        let of = |chunk: &Arc<Lease>| LeaseSlice::new(Arc::clone(chunk), 0, length);
        Ok(match (place, base) {
            (GradientPlace::Packed { buffer }, _) => {
                let offset = (start + index * self.gradients.chunk_elements) * element;
                let target = buffer.narrow(offset, length);
                let work = match sums {
                    Some(_) => AdderWork::Copy { source, target },
                    None => AdderWork::Merge { source, target, add },
                };
                (Some(work), None)
            }
            (GradientPlace::Chunks { .. }, Base::Ssd(read)) => {
                let chunk = read.wait()?;
                let work = AdderWork::Merge { source, target: of(&chunk), add: true };
                (Some(work), Some(NewChunk { index, chunk, stays: false, length }))
            }
            (GradientPlace::Chunks { chunks, .. }, Base::Here { stays }) => match &chunks[index] {
                Chunk::Host(kept) => (Some(AdderWork::Merge { source, target: of(kept), add: true }), None),
                _ => {
                    let work = sums.is_none().then(|| AdderWork::Measure { kept: source });
                    (work, Some(NewChunk { index, chunk: arrived, stays, length }))
                }
            },
        })
    }

    /// Adds sums of squares up as the kernels do.
    fn add_sums(&mut self, room: &LeaseSlice) {
        // SAFETY: the copy has ended, and no other piece is at this place of the chunk.
        let (words, flag) = unsafe { room.as_slice() }.as_chunks::<SUM_BYTES>();
        // Chunks are whole pages and hold whole sums: the flag, which is shorter than a sum, is the remainder of the
        // last piece.
        words.iter().for_each(|word| self.stats.add_block(f64::from_ne_bytes(*word)));
        self.stats.non_finite |= flag.iter().any(|byte| *byte != 0);
    }

    /// Ends the capture: no copy reads the source any more.
    fn end(self) {
        let Self { gradients, record, underway, promise, stats, failure, .. } = self;
        if failure.is_some()
            && let GradientPlace::Chunks { chunks, .. } = &mut *record.place.locked()
        {
            chunks.fill(Chunk::Empty);
        }
        // Drop the gradients before signalling, so that a caller that closes the store then is the
        // last to hold it.
        drop((gradients, record));
        underway.end(Ok(()));
        promise.resolve(failure.map_or(Ok(stats), Err));
    }
}

/// A chunk of a gradient with its new elements, of `length` bytes.
struct NewChunk {
    index: usize,
    chunk: Arc<Lease>,
    stays: bool,
    length: usize,
}

#[cfg(test)]
#[path = "../../../memascend-mem/tests/fake/mod.rs"]
mod fake;

#[cfg(test)]
mod tests {
    use memascend_kernels::Dtype;
    use memascend_mem::{CudaAllocator, PAGE_BYTES, PageableAllocator, Pool, SizeClass};
    use memascend_store::{Store, StoreOptions};

    use super::fake::Fake;
    use super::*;
    use std::thread;
    use std::time::Duration;

    use crate::device::DeviceFuture;
    use crate::{DeviceLink, Staging};

    /// 16,384 sums fill the smallest chunk of bf16 gradients: a tensor of 2 GiB. Here
    /// chunks are a page.
    #[test]
    fn sums_that_fill_more_than_a_chunk_are_added_in_order() {
        let fake = Fake::new(&[]);
        {
            let cudart = fake.open().unwrap();
            let directory = tempfile::tempdir().unwrap();
            let store = Store::create(&[directory.path().to_owned()], &StoreOptions::default()).unwrap();
            let class = SizeClass::new("test", PAGE_BYTES, 3);
            let pool = Pool::new(&CudaAllocator::with(Arc::clone(&cudart)), &[class]).unwrap();
            let staging = Staging::new(Arc::new(store), pool, PAGE_BYTES);
            let gradients = Arc::new(Gradients::new(staging, GRADIENT_BLOCK));
            let id = gradients.create("test", Dtype::F32, 1, Arc::default()).unwrap();
            let link = DeviceLink::open(Arc::clone(&cudart), 0).unwrap();
            let copies = Copies::open(cudart, 0, Arc::default()).unwrap();
            let mut arrivals = Arrivals::new(&copies);
            // The flag is behind the last sum, and where the sums fill their chunks, in one of its
            // own. The last two are in one chunk.
            for (count, non_finite) in
                [(1, false), (1500, true), (1024, true), (1024, false), (7, true), (2, false)]
            {
                let sums: Vec<f64> = (0..count).map(|index| 1.0 / f64::from(index + 1)).collect();
                let mut source: Vec<u8> = sums.iter().flat_map(|sum| sum.to_ne_bytes()).collect();
                source.extend((u32::from(non_finite) << 8).to_ne_bytes());
                // SAFETY: the stream is the default one.
                let ready = unsafe { link.record(0) }.unwrap();
                let none =
                    DeviceGradient { start: 0, address: 0, numel: 0, accumulate: false, sums: None, ready };
                let none = DeviceGradient { numel: 1, ..none };
                let (future, promise) = DeviceFuture::new(&Arc::default());
                arrivals.gradients.push_back(gradients.begin_capture(id, none, promise));
                // SAFETY: the source lives, unchanged, beyond the call.
                unsafe { arrivals.enqueue_sums(&gradients, source.as_ptr().addr(), sums.len()) }.unwrap();
                arrivals.last().enqueued = true;
                if count > 7 || count == 2 {
                    while !arrivals.is_empty() {
                        arrivals.settle();
                    }
                    let stats = future.wait().unwrap();
                    let expected = sums.iter().fold(0.0, |sum, next| sum + next);
                    assert_eq!(
                        (stats.sum_squares.to_bits(), stats.non_finite),
                        (expected.to_bits(), non_finite)
                    );
                }
            }
        }
        fake.assert_clean();
    }

    /// A capture locks its gradient for each of its pieces: a reader that came before it, and gets the lock after its
    /// first piece, must not see a part.
    #[test]
    fn a_reader_that_waits_for_the_lock_lets_a_capture_that_begins_meanwhile_end() {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::create(&[directory.path().to_owned()], &StoreOptions::default()).unwrap();
        let class = SizeClass::new("test", PAGE_BYTES, 1);
        let pool = Pool::new(&PageableAllocator::default(), &[class]).unwrap();
        let gradients = Gradients::new(Staging::new(Arc::new(store), pool, PAGE_BYTES), GRADIENT_BLOCK);
        let id = gradients.create("test", Dtype::F32, 1, Arc::default()).unwrap();
        let record = gradients.record(id);
        thread::scope(|scope| {
            let place = record.place.locked();
            let reader = scope.spawn(|| drop(record.settled()));
            thread::sleep(Duration::from_millis(100)); // it waits for the lock
            let capture = record.arriving.begin();
            drop(place);
            thread::sleep(Duration::from_millis(100));
            assert!(!reader.is_finished(), "it has the gradient amid a capture");
            capture.end(Ok(()));
            reader.join().unwrap();
        });
    }
}
