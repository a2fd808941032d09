//! Events: points in a stream that say when everything before them is done.

use std::collections::VecDeque;
use std::ffi::{c_uint, c_void};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use crate::cuda::library::NOT_READY;
use crate::{CudaError, Cudart, Fence, LockExt, Origin, Result};

/// `cudaEventBlockingSync | cudaEventDisableTiming`: a waiting thread sleeps, and an event without
/// times is cheapest.
const EVENT_FLAGS: c_uint = 1 | 2;
/// Dropped events that are kept to be recorded again. Those beyond are destroyed.
const KEPT_MOST: usize = 256;
/// Dropped events that are asked whether they are done, before another one is created.
const ASKED_MOST: usize = 4;

/// Records events of one device, and records those again that were dropped: creating and destroying an
/// event takes as long as copying tens of KiB. Dropping the value destroys them, once the last event
/// is dropped too.
#[derive(Debug)]
pub struct CudaEvents {
    cudart: Arc<Cudart>,
    dropped: Mutex<Dropped>,
    origin: Origin,
}

/// Events without users.
#[derive(Debug, Default)]
struct Dropped {
    /// Known to be done.
    done: Vec<Handle>,
    /// Recorded, and not known to be done: the oldest first.
    recorded: VecDeque<Handle>,
}

/// A live `cudaEvent_t`.
#[derive(Debug, Clone, Copy)]
struct Handle(NonNull<c_void>);

// SAFETY: CUDA's functions on events may be called from any thread.
unsafe impl Send for Handle {}
// SAFETY: as above; several threads may query an event and wait for it at once.
unsafe impl Sync for Handle {}

impl CudaEvents {
    /// Events of the device that is current in each thread that records one.
    pub fn new(cudart: &Arc<Cudart>) -> Arc<Self> {
        Arc::new(Self { cudart: Arc::clone(cudart), dropped: Mutex::default(), origin: Origin::here() })
    }

    pub(super) fn cudart(&self) -> &Arc<Cudart> {
        &self.cudart
    }

    /// Records an event into `stream`; a null pointer is the default stream.
    ///
    /// # Safety
    /// `stream` is null or a live `cudaStream_t` of the calling thread's current device, which is the
    /// same in all calls. The stream may be destroyed once this call has returned.
    pub unsafe fn record(self: &Arc<Self>, stream: *mut c_void) -> Result<CudaEvent> {
        let handle = match self.take_dropped() {
            Some(handle) => handle,
            None => self.create()?,
        };
        // SAFETY: the event is live, and the stream is by the caller's promise.
        let code = unsafe { (self.cudart.functions.event_record)(handle.0.as_ptr(), stream) };
        // A failed event says nothing about its work: it is not used again.
        self.cudart.check("cudaEventRecord", code).inspect_err(|_| self.destroy(handle))?;
        let (events, origin) = (Arc::clone(self), Origin::here());
        Ok(CudaEvent { events, handle, done: AtomicBool::new(false), origin })
    }

    fn create(&self) -> Result<Handle> {
        const CREATE: &str = "cudaEventCreateWithFlags";
        let mut event = ptr::null_mut();
        // SAFETY: the function writes one pointer.
        let code = unsafe { (self.cudart.functions.event_create_with_flags)(&mut event, EVENT_FLAGS) };
        self.cudart.check(CREATE, code)?;
        Ok(Handle(NonNull::new(event).ok_or(CudaError::InvalidValue { call: CREATE })?))
    }

    /// A dropped event that is done. One whose stream has not reached it, or has failed, is left alone.
    fn take_dropped(&self) -> Option<Handle> {
        let mut dropped = self.dropped.locked();
        if let Some(handle) = dropped.done.pop() {
            return Some(handle);
        }
        let asked = dropped.recorded.iter().take(ASKED_MOST);
        let found = asked.map(|handle| self.is_done(*handle)).position(|done| matches!(done, Ok(true)))?;
        dropped.recorded.remove(found)
    }

    fn put_back(&self, handle: Handle, done: bool) {
        let mut dropped = self.dropped.locked();
        if dropped.done.len() + dropped.recorded.len() >= KEPT_MOST {
            drop(dropped);
            self.destroy(handle);
        } else if done {
            dropped.done.push(handle);
        } else {
            dropped.recorded.push_back(handle);
        }
    }

    fn is_done(&self, handle: Handle) -> Result<bool> {
        // SAFETY: the event is live.
        let code = unsafe { (self.cudart.functions.event_query)(handle.0.as_ptr()) };
        if code == NOT_READY {
            self.cudart.forget_error();
            return Ok(false);
        }
        self.cudart.check("cudaEventQuery", code)?;
        Ok(true)
    }

    fn destroy(&self, handle: Handle) {
        // SAFETY: the event is live and never used again. CUDA frees an event that is not done only
        // once it is.
        let code = unsafe { (self.cudart.functions.event_destroy)(handle.0.as_ptr()) };
        // A failure is ignored: at the end of the process CUDA may have shut down before.
        let _ = self.cudart.check("cudaEventDestroy", code);
    }
}

impl Drop for CudaEvents {
    fn drop(&mut self) {
        // CUDA does not survive a fork, and the events are the parent's.
        if !self.origin.is_here() {
            return;
        }
        let Dropped { done, recorded } = std::mem::take(self.dropped.exclusive());
        done.into_iter().chain(recorded).for_each(|handle| self.destroy(handle));
    }
}

/// A point in a CUDA stream: done when everything enqueued before it is done.
#[derive(Debug)]
pub struct CudaEvent {
    events: Arc<CudaEvents>,
    handle: Handle,
    /// Whether it is known to be done: CUDA is not asked again.
    done: AtomicBool,
    origin: Origin,
}

impl CudaEvent {
    /// Makes everything enqueued in `stream` from now on wait for the event. The calling thread
    /// does not wait.
    ///
    /// # Safety
    /// `stream` is null, the default stream of the calling thread's device, or a live
    /// `cudaStream_t`.
    pub unsafe fn precede(&self, stream: *mut c_void) -> Result<()> {
        let cudart = &self.events.cudart;
        // SAFETY: the event is live, and the stream is by the caller's promise.
        let code = unsafe { (cudart.functions.stream_wait_event)(stream, self.handle.0.as_ptr(), 0) };
        Ok(cudart.check("cudaStreamWaitEvent", code)?)
    }

    /// Whether the stream has reached the event. Does not wait.
    ///
    /// # Errors
    /// Any error of work enqueued in the stream before the event.
    pub fn is_done(&self) -> Result<bool> {
        if self.done.load(Ordering::Acquire) {
            return Ok(true);
        }
        let done = self.events.is_done(self.handle)?;
        self.done.fetch_or(done, Ordering::Release);
        Ok(done)
    }

    /// Waits until the stream has reached the event; the thread sleeps meanwhile.
    ///
    /// # Errors
    /// Any error of work enqueued in the stream before the event.
    pub fn wait(&self) -> Result<()> {
        if self.done.load(Ordering::Acquire) {
            return Ok(());
        }
        let cudart = &self.events.cudart;
        // SAFETY: the event is live.
        let code = unsafe { (cudart.functions.event_synchronize)(self.handle.0.as_ptr()) };
        cudart.check("cudaEventSynchronize", code)?;
        self.done.store(true, Ordering::Release);
        Ok(())
    }
}

impl Fence for CudaEvent {
    fn is_done(&self) -> Result<bool> {
        Self::is_done(self)
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        // As of `CudaEvents`; and another thread of the parent may have held the lock at the fork.
        if self.origin.is_here() {
            self.events.put_back(self.handle, *self.done.get_mut());
        }
    }
}
