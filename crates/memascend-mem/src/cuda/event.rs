//! Events: points in a stream that say when everything before them is done.

use std::ffi::{c_uint, c_void};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use crate::cuda::library::NOT_READY;
use crate::{CudaError, Cudart, Fence, Origin, Result};

/// `cudaEventBlockingSync | cudaEventDisableTiming`: a waiting thread sleeps, and an event without
/// times is cheapest.
const EVENT_FLAGS: c_uint = 1 | 2;

/// A point in a CUDA stream: done when everything enqueued before it is done. Dropping the value
/// destroys the event.
#[derive(Debug)]
pub struct CudaEvent {
    cudart: Arc<Cudart>,
    event: NonNull<c_void>,
    origin: Origin,
}

// SAFETY: CUDA's functions on events may be called from any thread; the event is owned until drop.
unsafe impl Send for CudaEvent {}
// SAFETY: a shared reference only queries and waits, which CUDA allows from several threads at
// once.
unsafe impl Sync for CudaEvent {}

impl CudaEvent {
    /// Records an event into `stream`; a null pointer is the default stream.
    ///
    /// # Safety
    /// `stream` is null or a live `cudaStream_t` of the calling thread's current device. The stream
    /// may be destroyed once this call has returned.
    pub unsafe fn record(cudart: &Arc<Cudart>, stream: *mut c_void) -> Result<Self> {
        const CREATE: &str = "cudaEventCreateWithFlags";
        let mut event = ptr::null_mut();
        // SAFETY: the function writes one pointer.
        let code = unsafe { (cudart.functions.event_create_with_flags)(&mut event, EVENT_FLAGS) };
        cudart.check(CREATE, code)?;
        let event = NonNull::new(event).ok_or(CudaError::InvalidValue { call: CREATE })?;
        let event = Self { cudart: Arc::clone(cudart), event, origin: Origin::here() };
        // SAFETY: the event is live, and the stream is by the caller's promise.
        let code = unsafe { (cudart.functions.event_record)(event.event.as_ptr(), stream) };
        cudart.check("cudaEventRecord", code)?;
        Ok(event)
    }

    /// Makes everything enqueued in `stream` from now on wait for the event. The calling thread
    /// does not wait.
    ///
    /// # Safety
    /// `stream` is null, the default stream of the calling thread's device, or a live
    /// `cudaStream_t`.
    pub unsafe fn precede(&self, stream: *mut c_void) -> Result<()> {
        // SAFETY: the event is live, and the stream is by the caller's promise.
        let code = unsafe { (self.cudart.functions.stream_wait_event)(stream, self.event.as_ptr(), 0) };
        Ok(self.cudart.check("cudaStreamWaitEvent", code)?)
    }

    /// Whether the stream has reached the event. Does not wait.
    ///
    /// # Errors
    /// Any error of work enqueued in the stream before the event.
    pub fn is_done(&self) -> Result<bool> {
        // SAFETY: the event is live.
        let code = unsafe { (self.cudart.functions.event_query)(self.event.as_ptr()) };
        if code == NOT_READY {
            self.cudart.forget_error();
            return Ok(false);
        }
        self.cudart.check("cudaEventQuery", code)?;
        Ok(true)
    }

    /// Waits until the stream has reached the event; the thread sleeps meanwhile.
    ///
    /// # Errors
    /// Any error of work enqueued in the stream before the event.
    pub fn wait(&self) -> Result<()> {
        // SAFETY: the event is live.
        let code = unsafe { (self.cudart.functions.event_synchronize)(self.event.as_ptr()) };
        Ok(self.cudart.check("cudaEventSynchronize", code)?)
    }
}

impl Fence for CudaEvent {
    fn is_done(&self) -> Result<bool> {
        Self::is_done(self)
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        // CUDA does not survive a fork, and the event is the parent's.
        if !self.origin.is_here() {
            return;
        }
        // SAFETY: the event is live and never used again. CUDA frees an event that is not done only
        // once it is.
        let code = unsafe { (self.cudart.functions.event_destroy)(self.event.as_ptr()) };
        // A failure is ignored: at the end of the process CUDA may have shut down before.
        let _ = self.cudart.check("cudaEventDestroy", code);
    }
}
