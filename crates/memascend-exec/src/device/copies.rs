//! Copies in the streams of a device.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use memascend_mem::{CudaEvent, CudaEvents, CudaStream, Cudart, Fence, Lease, LeaseSlice, MemError};

use super::pieces::{Never, Pieces};
use crate::{ExecError, Result, Staging};

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

/// The source of a copy from the device, and how to cut it.
pub(crate) struct Download {
    /// Device address of the first byte.
    pub(crate) source: usize,
    /// Bytes of a piece: at most a chunk.
    pub(crate) piece_bytes: usize,
    /// Bytes of all pieces together.
    pub(crate) bytes: usize,
    /// Whether chunks may stay in host memory if enough are free.
    pub(crate) keep: bool,
}

/// The streams of copies to and from a device.
#[derive(Debug)]
pub(crate) struct Copies {
    cudart: Arc<Cudart>,
    index: i32,
    events: Arc<CudaEvents>,
    /// Weights on their way to the device.
    pub(super) upload: CudaStream,
    /// Bytes put aside, on their way back.
    pub(super) restore: CudaStream,
    /// Gradients, and bytes that are put aside.
    pub(super) download: CudaStream,
    counters: Arc<Counters>,
}

impl Copies {
    pub(crate) fn open(cudart: Arc<Cudart>, index: i32, counters: Arc<Counters>) -> Result<Self> {
        let events = CudaEvents::new(&cudart);
        let stream = || CudaStream::new(&events);
        let streams = cudart.on_device(index, || Ok((stream()?, stream()?, stream()?)));
        let (upload, restore, download) = streams.map_err(device_error)?;
        Ok(Self { cudart, index, events, upload, restore, download, counters })
    }

    /// Makes the device current in the calling thread, which is one of this module.
    pub(crate) fn enter(&self) -> Result<()> {
        self.cudart.set_device(self.index).map_err(device_error)
    }

    /// Runs `work` with the device current, on a thread that may have another current device.
    pub(super) fn on_device<T: Send>(
        &self,
        work: impl FnOnce(&Arc<Cudart>) -> memascend_mem::Result<T> + Send,
    ) -> Result<T> {
        self.cudart.on_device(self.index, || work(&self.cudart)).map_err(device_error)
    }

    /// Records an event into a stream of the device.
    ///
    /// # Safety
    /// `stream` is 0, the device's default stream, or the handle of a live `cudaStream_t` of the device.
    pub(super) unsafe fn record(&self, stream: usize) -> Result<DeviceEvent> {
        // SAFETY: the caller's promise; the device is current.
        let event = self.on_device(|_| unsafe { self.events.record(stream as *mut _) })?;
        Ok(self.event(event))
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
        self.wait_worker(&event.event)
    }

    /// As [`Copies::wait_for`].
    pub(super) fn wait_worker(&self, event: &CudaEvent) -> Result<()> {
        wait(event, &self.counters.waits_worker)
    }

    /// Waits until all that was put into a stream is done.
    pub(super) fn drain(&self, stream: &CudaStream) -> Result<()> {
        self.wait_worker(&stream.record().map_err(device_error)?)
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

    /// Enqueues a copy from the device, behind those enqueued before.
    ///
    /// # Safety
    /// As [`CudaStream::copy_to_host`].
    pub(super) unsafe fn enqueue_download(
        &self,
        target: NonNull<u8>,
        source: usize,
        bytes: usize,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.download.copy_to_host(target, source, bytes) }.map_err(device_error)?;
        self.counters.d2h_copies.fetch_add(1, Ordering::Relaxed);
        self.counters.d2h_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        Ok(())
    }

    /// Copies bytes of the device into chunks of `staging`, and calls `consume(index, chunk, stays, bytes)` for each piece
    /// in order, once its bytes have arrived; `stays` says whether the chunk may stay in host memory. When this returns,
    /// with or without an error, no copy reads the source any more.
    ///
    /// # Safety
    /// [`Download::source`] is the address of [`Download::bytes`] bytes of device memory, which live and are not written
    /// during the call.
    pub(crate) unsafe fn download(
        &self,
        staging: &Staging,
        download: Download,
        mut consume: impl FnMut(usize, Arc<Lease>, bool, usize) -> Result<()>,
    ) -> Result<()> {
        let Download { source, piece_bytes, bytes, keep } = download;
        let mut pieces = Pieces::<(usize, bool)>::new(self);
        let mut settle = |pieces: &mut Pieces<(usize, bool)>| {
            let Some((arrived, settled)) = pieces.settle() else { return Ok(()) };
            arrived?;
            settled.into_iter().try_for_each(|piece| {
                let length = piece.room.bytes();
                let ((index, stays), chunk) = piece.into_parts();
                consume(index, chunk, stays, length)
            })
        };
        for (index, offset) in (0..bytes).step_by(piece_bytes).enumerate() {
            let (chunk, stays) = loop {
                match pieces.chunk(staging, keep)? {
                    Some(found) => break found,
                    None => settle(&mut pieces)?,
                }
            };
            let length = piece_bytes.min(bytes - offset);
            // SAFETY: the chunk is fresh; the source is the caller's promise.
            unsafe { pieces.enqueue(source + offset, chunk, 0, length, (index, stays), false)? };
        }
        while !pieces.is_empty() {
            settle(&mut pieces)?;
        }
        Ok(())
    }
}

/// Records an event behind a copy from `lease` that was just enqueued.
fn end_of_copy(stream: &CudaStream, lease: &Lease) -> memascend_mem::Result<Arc<CudaEvent>> {
    stream.record().map(Arc::new).inspect_err(|_| lease.return_after(Arc::new(Never)))
}
