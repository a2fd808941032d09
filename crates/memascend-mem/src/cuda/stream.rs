//! Streams: copies between host and device memory, one after another.

use std::ffi::{c_int, c_uint, c_void};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use crate::cuda::event::CudaEvents;
use crate::{CudaError, CudaEvent, Cudart, Origin, Result};

/// `cudaStreamNonBlocking`: the stream does not wait for the default stream, which libraries use on
/// their own.
const STREAM_FLAGS: c_uint = 1;
/// `cudaMemcpyHostToDevice`, `cudaMemcpyDeviceToHost`.
const TO_DEVICE: c_int = 1;
const TO_HOST: c_int = 2;

/// A stream of copies, carried out one after another and concurrently with other streams. Dropping
/// the value destroys the stream; copies enqueued before are still carried out.
#[derive(Debug)]
pub struct CudaStream {
    events: Arc<CudaEvents>,
    stream: NonNull<c_void>,
    origin: Origin,
}

// SAFETY: CUDA's functions on streams may be called from any thread; the stream is owned until
// drop.
unsafe impl Send for CudaStream {}
// SAFETY: CUDA allows several threads to put work into a stream.
unsafe impl Sync for CudaStream {}

impl CudaStream {
    /// Creates a stream on the calling thread's current device, which has to be the device of `events`.
    pub fn new(events: &Arc<CudaEvents>) -> Result<Self> {
        const CREATE: &str = "cudaStreamCreateWithFlags";
        let (cudart, mut stream) = (events.cudart(), ptr::null_mut());
        // SAFETY: the function writes one pointer.
        let code = unsafe { (cudart.functions.stream_create_with_flags)(&mut stream, STREAM_FLAGS) };
        cudart.check(CREATE, code)?;
        let stream = NonNull::new(stream).ok_or(CudaError::InvalidValue { call: CREATE })?;
        Ok(Self { events: Arc::clone(events), stream, origin: Origin::here() })
    }

    fn cudart(&self) -> &Cudart {
        self.events.cudart()
    }

    /// An event that is done when everything enqueued in the stream so far is done. The stream's
    /// device must be the calling thread's current device.
    pub fn record(&self) -> Result<CudaEvent> {
        // SAFETY: the stream is live.
        unsafe { self.events.record(self.stream.as_ptr()) }
    }

    /// Makes everything enqueued in the stream from now on wait for `event`. The calling thread
    /// does not wait.
    pub fn wait(&self, event: &CudaEvent) -> Result<()> {
        // SAFETY: the stream is live.
        unsafe { event.precede(self.stream.as_ptr()) }
    }

    /// Enqueues a copy of `bytes` bytes to device address `target`.
    ///
    /// # Safety
    /// Both ranges are live until the copy is done; `source` is not written before.
    pub unsafe fn copy_to_device(&self, target: usize, source: NonNull<u8>, bytes: usize) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.copy(target as *mut c_void, source.as_ptr().cast(), bytes, TO_DEVICE) }
    }

    /// Enqueues a copy of `bytes` bytes from device address `source`.
    ///
    /// # Safety
    /// Both ranges are live until the copy is done; `target` is not accessed before.
    pub unsafe fn copy_to_host(&self, target: NonNull<u8>, source: usize, bytes: usize) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.copy(target.as_ptr().cast(), source as *const c_void, bytes, TO_HOST) }
    }

    /// # Safety
    /// As the callers.
    unsafe fn copy(
        &self,
        target: *mut c_void,
        source: *const c_void,
        bytes: usize,
        kind: c_int,
    ) -> Result<()> {
        // SAFETY: the stream is live, and the ranges are by the caller's promise.
        let code = unsafe {
            (self.cudart().functions.memcpy_async)(target, source, bytes, kind, self.stream.as_ptr())
        };
        Ok(self.cudart().check("cudaMemcpyAsync", code)?)
    }
}

impl Drop for CudaStream {
    fn drop(&mut self) {
        // CUDA does not survive a fork, and the stream is the parent's.
        if !self.origin.is_here() {
            return;
        }
        // SAFETY: the stream is live and never used again. CUDA frees a stream with work in it only
        // once the work is done.
        let code = unsafe { (self.cudart().functions.stream_destroy)(self.stream.as_ptr()) };
        let _ = self.cudart().check("cudaStreamDestroy", code);
    }
}
