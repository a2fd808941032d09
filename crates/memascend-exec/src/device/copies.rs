//! Copies in the streams of a device.

use std::collections::VecDeque;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use memascend_mem::{CudaError, CudaEvent, CudaStream, Cudart, Fence, Lease, LeaseSlice, MemError};

use crate::{ExecError, Result, Staging};
use memascend_kernels::GradientStats;

/// Pieces on their way from the device at once: one arriving, one queued behind it, one being
/// processed, and one more for a thread that wakes up late.
const IN_FLIGHT: usize = 4;
/// Bytes of a block's sum.
const SUM_BYTES: usize = size_of::<f64>();
/// Bytes of the flag behind the sums.
const FLAG_BYTES: usize = size_of::<u32>();

/// Copies so far, and how often a thread waited for the device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DeviceCounters {
    /// Bytes copied to the device.
    pub h2d_bytes: u64,
    /// Bytes copied from the device.
    pub d2h_bytes: u64,
    /// Copies to the device.
    pub h2d_copies: u64,
    /// Copies from the device.
    pub d2h_copies: u64,
    /// Times that the caller of this module waited for the device or for one of the module's
    /// threads.
    pub waits_caller: u64,
    /// Times that a thread of this module waited for the device.
    pub waits_worker: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Counters {
    h2d_bytes: AtomicU64,
    d2h_bytes: AtomicU64,
    h2d_copies: AtomicU64,
    d2h_copies: AtomicU64,
    pub(super) waits_caller: AtomicU64,
    waits_worker: AtomicU64,
}

impl Counters {
    pub(super) fn snapshot(&self) -> DeviceCounters {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        DeviceCounters {
            h2d_bytes: of(&self.h2d_bytes),
            d2h_bytes: of(&self.d2h_bytes),
            h2d_copies: of(&self.h2d_copies),
            d2h_copies: of(&self.d2h_copies),
            waits_caller: of(&self.waits_caller),
            waits_worker: of(&self.waits_worker),
        }
    }
}

/// A point in a stream of the device: done when everything put into the stream before it is.
#[derive(Debug, Clone)]
pub struct DeviceEvent {
    pub(super) event: Arc<CudaEvent>,
    counters: Arc<Counters>,
}

impl DeviceEvent {
    /// Whether it is done. Does not wait.
    pub fn is_done(&self) -> Result<bool> {
        self.event.is_done().map_err(device_error)
    }

    /// Waits until it is done.
    pub fn wait(&self) -> Result<()> {
        wait(&self.event, &self.counters.waits_caller)
    }
}

pub(super) fn device_error(error: MemError) -> ExecError {
    ExecError::Device(Arc::new(error))
}

fn wait(event: &CudaEvent, waits: &AtomicU64) -> Result<()> {
    if !event.is_done().map_err(device_error)? {
        waits.fetch_add(1, Ordering::Relaxed);
        event.wait().map_err(device_error)?;
    }
    Ok(())
}

/// Bytes to be copied from the device to host memory.
#[derive(Debug, Clone, Copy)]
pub struct HostCopy {
    /// Device address of the first byte.
    pub source: usize,
    /// Number of bytes.
    pub bytes: usize,
    /// Where they go.
    pub target: NonNull<u8>,
}

// SAFETY: the target is only an address; `DeviceLink::download` says what its caller vouches for.
unsafe impl Send for HostCopy {}
// SAFETY: as above.
unsafe impl Sync for HostCopy {}

/// What to copy from the device, and how to cut it.
pub(crate) struct Download {
    /// Device address of the first piece.
    pub(crate) source: usize,
    /// Indices of the pieces to copy.
    pub(crate) pieces: Range<usize>,
    /// Bytes of a piece: at most those of a chunk.
    pub(crate) piece_bytes: usize,
    /// Bytes of all pieces together, counted from piece 0.
    pub(crate) bytes: usize,
    /// Whether chunks may stay in host memory if enough are free.
    pub(crate) keep: bool,
}

/// The streams of copies to and from a device.
#[derive(Debug)]
pub(crate) struct Copies {
    cudart: Arc<Cudart>,
    index: i32,
    /// Weights on their way to the device.
    pub(super) upload: CudaStream,
    /// Bytes put aside, on their way back.
    pub(super) restore: CudaStream,
    /// Gradients, and bytes that are put aside.
    pub(super) download: CudaStream,
    counters: Arc<Counters>,
}

impl Copies {
    pub(super) fn open(cudart: Arc<Cudart>, index: i32, counters: Arc<Counters>) -> Result<Self> {
        let stream = || CudaStream::new(&cudart);
        let streams = cudart.on_device(index, || Ok((stream()?, stream()?, stream()?)));
        let (upload, restore, download) = streams.map_err(device_error)?;
        Ok(Self { cudart, index, upload, restore, download, counters })
    }

    /// Makes the device current in the calling thread, which is one of this module.
    pub(super) fn enter(&self) -> Result<()> {
        self.cudart.set_device(self.index).map_err(device_error)
    }

    /// Runs `work` with the device current, on a thread that may have another current device.
    pub(super) fn on_device<T: Send>(
        &self,
        work: impl FnOnce(&Arc<Cudart>) -> memascend_mem::Result<T> + Send,
    ) -> Result<T> {
        self.cudart.on_device(self.index, || work(&self.cudart)).map_err(device_error)
    }

    pub(super) fn event(&self, event: impl Into<Arc<CudaEvent>>) -> DeviceEvent {
        DeviceEvent { event: event.into(), counters: Arc::clone(&self.counters) }
    }

    /// Makes later copies from the device wait for `event`.
    pub(crate) fn download_after(&self, event: &DeviceEvent) -> Result<()> {
        self.download.wait(&event.event).map_err(device_error)
    }

    /// Has the calling thread, which is one of this module, wait for `event`.
    pub(super) fn wait_for(&self, event: &DeviceEvent) -> Result<()> {
        wait(&event.event, &self.counters.waits_worker)
    }

    /// Waits until all that was put into a stream is done.
    pub(super) fn drain(&self, stream: &CudaStream) -> Result<()> {
        wait(&stream.record().map_err(device_error)?, &self.counters.waits_worker)
    }

    /// Enqueues a copy of a range of `lease` to device address `target` in one of the streams.
    /// Returns the event that marks its end; the lease returns to its pool only after that event.
    ///
    /// # Safety
    /// `target` is the address of as many bytes of device memory, which live until the event is
    /// done. The range is not written until then.
    pub(super) unsafe fn copy_to_device(
        &self,
        stream: &CudaStream,
        lease: &Arc<Lease>,
        offset: usize,
        bytes: usize,
        target: usize,
    ) -> memascend_mem::Result<Arc<CudaEvent>> {
        let source = LeaseSlice::new(Arc::clone(lease), offset, bytes);
        // SAFETY: the fence below holds the lease; the target is the caller's promise.
        unsafe { stream.copy_to_device(target, source.address(), bytes)? };
        self.counters.h2d_copies.fetch_add(1, Ordering::Relaxed);
        self.counters.h2d_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        let event = end_of_copy(stream, lease)?;
        lease.return_after(Arc::clone(&event) as Arc<dyn Fence>);
        Ok(event)
    }

    /// Enqueues copies from the device to host memory, after `after`. Returns the event that marks
    /// the end of all.
    ///
    /// # Safety
    /// Each part's ranges live until the event is done. The source is not written, and the target
    /// not accessed, from `after` until then.
    pub(super) unsafe fn copy_to_host(
        &self,
        parts: &[HostCopy],
        after: &CudaEvent,
    ) -> memascend_mem::Result<CudaEvent> {
        let enqueue = || {
            self.download.wait(after)?;
            for part in parts {
                // SAFETY: the caller's promise.
                unsafe { self.download.copy_to_host(part.target, part.source, part.bytes)? };
                self.counters.d2h_copies.fetch_add(1, Ordering::Relaxed);
                self.counters.d2h_bytes.fetch_add(part.bytes as u64, Ordering::Relaxed);
            }
            self.download.record()
        };
        enqueue().inspect_err(|_| {
            // Without an event the caller would not know when the earlier copies have ended.
            let _ = self.drain(&self.download);
        })
    }

    /// Copies bytes of the device into chunks of `staging`, and calls `consume(index, chunk, stays,
    /// bytes)` for each piece in order, once its bytes have arrived; `stays` says whether the chunk
    /// may stay in host memory. When this returns, with or without an error, no copy reads the
    /// source any more.
    ///
    /// # Safety
    /// [`Download::source`] is the address of [`Download::bytes`] bytes of device memory, which
    /// live and are not written during the call.
    pub(crate) unsafe fn download(
        &self,
        staging: &Staging,
        download: Download,
        mut consume: impl FnMut(usize, Arc<Lease>, bool, usize) -> Result<()>,
    ) -> Result<()> {
        let Download { source, pieces, piece_bytes, bytes, keep } = download;
        let mut arriving: VecDeque<Arriving> = VecDeque::new();
        for index in pieces {
            let (chunk, stays) = loop {
                let room = arriving.len() < IN_FLIGHT;
                if let Some(chunk) = if room { staging.try_chunk_for(keep)? } else { None } {
                    break chunk;
                }
                match arriving.pop_front() {
                    Some(first) => first.settle(&mut consume)?,
                    // Wait only without holding a chunk: two threads that hold chunks and wait
                    // could deadlock.
                    None => break staging.chunk_for(keep)?,
                }
            };
            let length = piece_bytes.min(bytes - index * piece_bytes);
            let target = LeaseSlice::new(Arc::clone(&chunk), 0, length);
            // SAFETY: the chunk is fresh, and is dropped only after the copy; the source is the
            // caller's promise.
            unsafe { self.download.copy_to_host(target.address(), source + index * piece_bytes, length) }
                .map_err(device_error)?;
            drop(target);
            self.counters.d2h_copies.fetch_add(1, Ordering::Relaxed);
            self.counters.d2h_bytes.fetch_add(length as u64, Ordering::Relaxed);
            let event = end_of_copy(&self.download, &chunk).map_err(device_error)?;
            arriving.push_back(Arriving { copies: self, index, chunk: Some(chunk), stays, length, event });
        }
        arriving.into_iter().try_for_each(|piece| piece.settle(&mut consume))
    }

    /// Copies `count` sums of squares of blocks from device address `source`, and the flag behind
    /// them that says whether an element is not finite, and adds them up as the kernels do.
    ///
    /// # Safety
    /// As [`Copies::download`]; the flag is a `u32`.
    pub(crate) unsafe fn block_sums(
        &self,
        staging: &Staging,
        source: usize,
        count: usize,
    ) -> Result<GradientStats> {
        let mut stats = GradientStats::default();
        let (piece_bytes, bytes) = (staging.chunk_bytes(), count * SUM_BYTES + FLAG_BYTES);
        let add = |_: usize, chunk: Arc<Lease>, _: bool, length: usize| {
            let piece = LeaseSlice::new(chunk, 0, length);
            // SAFETY: the copy has ended and the chunk is ours alone.
            let (words, flag) = unsafe { piece.as_slice() }.as_chunks::<SUM_BYTES>();
            // Chunks are whole pages and hold whole sums: the flag, which is shorter than a sum, is
            // the remainder of the last chunk.
            words.iter().for_each(|word| stats.add_block(f64::from_ne_bytes(*word)));
            stats.non_finite |= flag.iter().any(|byte| *byte != 0);
            Ok(())
        };
        // SAFETY: the caller's promise.
        unsafe {
            let pieces = 0..bytes.div_ceil(piece_bytes);
            self.download(staging, Download { source, pieces, piece_bytes, bytes, keep: false }, add)?;
        }
        Ok(stats)
    }
}

/// Records an event behind a copy from or to `lease` that was just enqueued.
fn end_of_copy(stream: &CudaStream, lease: &Lease) -> memascend_mem::Result<Arc<CudaEvent>> {
    stream.record().map(Arc::new).inspect_err(|_| lease.return_after(Arc::new(Never)))
}

/// Never returns a buffer to its pool: the end of the copy is unknown, and the device may use the
/// buffer at any time.
struct Never;

impl Fence for Never {
    fn is_done(&self) -> memascend_mem::Result<bool> {
        Err(CudaError::CopyLost.into())
    }
}

/// A piece on its way from the device.
struct Arriving<'a> {
    copies: &'a Copies,
    index: usize,
    chunk: Option<Arc<Lease>>,
    stays: bool,
    length: usize,
    event: Arc<CudaEvent>,
}

impl Arriving<'_> {
    /// Waits for the copy, and passes the piece to its consumer.
    fn settle(
        mut self,
        consume: &mut impl FnMut(usize, Arc<Lease>, bool, usize) -> Result<()>,
    ) -> Result<()> {
        wait(&self.event, &self.copies.counters.waits_worker)?;
        match self.chunk.take() {
            Some(chunk) => consume(self.index, chunk, self.stays, self.length),
            None => Ok(()),
        }
    }
}

impl Drop for Arriving<'_> {
    fn drop(&mut self) {
        // The piece is dropped under way because an earlier one failed.
        if let Some(chunk) = self.chunk.take()
            && wait(&self.event, &self.copies.counters.waits_worker).is_err()
        {
            chunk.return_after(Arc::clone(&self.event) as Arc<dyn Fence>);
        }
    }
}

#[cfg(test)]
#[path = "../../../memascend-mem/tests/fake/mod.rs"]
mod fake;

#[cfg(test)]
mod tests {
    use memascend_mem::{CudaAllocator, PAGE_BYTES, Pool, SizeClass};
    use memascend_store::{Store, StoreOptions};

    use super::fake::Fake;
    use super::*;

    /// 16,384 sums fill the smallest chunk of bf16 gradients: those of a tensor of 2 GiB. Here
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
            let copies = Copies::open(cudart, 0, Arc::default()).unwrap();
            // The flag is behind the last sum, and where the sums fill their chunks, in one of its
            // own.
            for (count, non_finite) in [(1, false), (1500, true), (1024, true), (1024, false)] {
                let sums: Vec<f64> = (0..count).map(|index| 1.0 / f64::from(index + 1)).collect();
                let mut source: Vec<u8> = sums.iter().flat_map(|sum| sum.to_ne_bytes()).collect();
                source.extend((u32::from(non_finite) << 8).to_ne_bytes());
                let address = source.as_ptr().addr();
                // SAFETY: the source lives, unchanged, beyond the call.
                let stats = unsafe { copies.block_sums(&staging, address, sums.len()) }.unwrap();
                let expected = sums.iter().fold(0.0, |sum, next| sum + next);
                assert_eq!((stats.sum_squares.to_bits(), stats.non_finite), (expected.to_bits(), non_finite));
            }
        }
        fake.assert_clean();
    }
}
