//! The link to one CUDA device: its streams, and the threads that wait for them.
//!
//! Streams, events and copies are made here and not by PyTorch, which computes on its current stream, whose
//! handle is passed in. So a small set of functions of libcudart carries all the ordering, and
//! `crates/memascend-mem/tests/fake_cudart.c` can stand in for it: its streams run as late as CUDA would
//! allow, in seeded orders, and vector clocks report accesses that nothing orders. `tests/rehearsal/` puts
//! the same runtime under PyTorch.

use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender, unbounded};
use memascend_mem::{Cudart, Lease, LockExt, Origin};

use super::capture::Coming;
use super::copies::{Copies, Counters, DeviceCounters, DeviceEvent, HostCopy};
use super::{AppliedGradient, Applying, Capture, DeviceFuture, Restore, applying, capture, restore};
use crate::{ArrivingUpdate, DeviceGradient, ExecError, GradientId, Gradients, Result, Staging, Stash};

/// One CUDA device: a stream for weights to the device, one for activations back to it, and one for
/// everything that leaves it. Threads wait for staging buffers and the SSD, in the order of the
/// calls; the caller never does.
///
/// Device addresses are numbers: the code that passes one vouches for the memory until the event,
/// capture, stash or restore that the call returns is done.
pub struct DeviceLink {
    index: i32,
    open: Mutex<Option<Open>>,
    counters: Arc<Counters>,
    origin: Origin,
}

struct Open {
    copies: Arc<Copies>,
    captures: Worker<Coming>,
    stashes: Worker<Job>,
}

/// A thread that does jobs in their order.
struct Worker<J> {
    jobs: Sender<J>,
    thread: JoinHandle<()>,
}

type Job = Box<dyn FnOnce() + Send>;

impl<J: Send + 'static> Worker<J> {
    /// Starts a thread that runs `run`, which returns when no more jobs can come.
    fn start(name: &str, run: impl FnOnce(Receiver<J>) + Send + 'static) -> Result<Self> {
        let (jobs, accepted) = unbounded::<J>();
        let thread = std::thread::Builder::new().name(name.into()).spawn(move || run(accepted));
        Ok(Self { jobs, thread: thread.map_err(ExecError::no_thread)? })
    }

    /// Sends the thread a job. If the thread has failed, the job is dropped, which ends its future
    /// with an error.
    fn send(&self, job: J) {
        let _ = self.jobs.send(job);
    }

    /// Waits until all jobs are done.
    fn end(self) {
        drop(self.jobs);
        let _ = self.thread.join();
    }
}

impl DeviceLink {
    /// Opens device number `index` of those that the process may see.
    ///
    /// # Errors
    /// [`ExecError::Device`] if there is no device of that number, or no device memory for a
    /// context.
    pub fn open(cudart: Arc<Cudart>, index: i32) -> Result<Self> {
        let counters = Arc::default();
        let copies = Arc::new(Copies::open(cudart, index, Arc::clone(&counters))?);
        let captured = Arc::clone(&copies);
        let open = Open {
            copies,
            captures: Worker::start("memascend-gradients", move |coming| capture::run(&captured, &coming))?,
            stashes: Worker::start("memascend-stashes", |jobs| jobs.into_iter().for_each(|job: Job| job()))?,
        };
        Ok(Self { index, open: Mutex::new(Some(open)), counters, origin: Origin::here() })
    }

    /// Number of the device.
    pub fn index(&self) -> i32 {
        self.index
    }

    /// (free, total) bytes of the device.
    pub fn memory(&self) -> Result<(usize, usize)> {
        self.copies()?.on_device(|cudart| cudart.device_memory())
    }

    /// Copies and waits so far.
    pub fn counters(&self) -> DeviceCounters {
        self.counters.snapshot()
    }

    /// Records an event behind the work enqueued in `stream` so far.
    ///
    /// # Safety
    /// `stream` is 0, the device's default stream, or the handle of a live `cudaStream_t` of the
    /// device.
    pub unsafe fn record(&self, stream: usize) -> Result<DeviceEvent> {
        // SAFETY: the caller's promise.
        unsafe { self.copies()?.record(stream) }
    }

    /// Makes later work in `stream` wait for `event`.
    ///
    /// # Safety
    /// As [`DeviceLink::record`].
    pub unsafe fn wait(&self, stream: usize, event: &DeviceEvent) -> Result<()> {
        // SAFETY: the caller's promise.
        self.copies()?.on_device(|_| unsafe { event.event.precede(stream as *mut _) })
    }

    /// Copies `bytes` bytes of `lease` from `offset` to device address `target`, after the events.
    /// Returns the event that marks the end of the copy; the lease returns to its pool only after
    /// that event.
    ///
    /// # Safety
    /// `target` is the address of `bytes` bytes of device memory, which are used only before
    /// `after` and after the returned event. The range of the lease is not written until then.
    pub unsafe fn upload(
        &self,
        lease: &Arc<Lease>,
        offset: usize,
        bytes: usize,
        target: usize,
        after: &[DeviceEvent],
    ) -> Result<DeviceEvent> {
        let copies = self.copies()?;
        let event = copies.on_device(|_| {
            after.iter().try_for_each(|event| copies.upload.wait(&event.event))?;
            // SAFETY: the caller's promise.
            unsafe { copies.copy_to_device(&copies.upload, lease, offset, bytes, target) }
        })?;
        Ok(copies.event(event))
    }

    /// Copies bytes of the device to host memory, after `after`. Returns the event that marks the end
    /// of all copies.
    ///
    /// # Errors
    /// [`ExecError::Device`] where a copy cannot be enqueued; then none is under way, unless the device
    /// has failed altogether.
    ///
    /// # Safety
    /// Each part's ranges are as many bytes of device memory and of host memory, which live until the
    /// returned event is done. The source is not written, and the target not accessed, from `after`
    /// until then.
    pub unsafe fn download(&self, parts: &[HostCopy], after: &DeviceEvent) -> Result<DeviceEvent> {
        let copies = self.copies()?;
        // SAFETY: the caller's promise.
        let event = copies.on_device(|_| unsafe { copies.copy_to_host(parts, &after.event) })?;
        Ok(copies.event(event))
    }

    /// Captures a gradient in device memory, as [`Gradients::capture`] does from host memory. Later
    /// uses of the gradient wait for the capture.
    ///
    /// # Safety
    /// The addresses in `source` are of device memory with `numel` elements of the gradient's dtype, and of
    /// the sums with their flag. Both live and are not written from `ready` until the capture has ended.
    ///
    /// # Panics
    /// As [`Gradients::capture`], and if there are `sums` of another number of blocks, or of a
    /// gradient that is added up.
    pub unsafe fn capture(
        &self,
        gradients: &Arc<Gradients>,
        id: GradientId,
        source: DeviceGradient,
    ) -> Result<Capture> {
        let (future, promise) = DeviceFuture::new(&self.counters);
        let open = self.lock();
        let Open { captures, .. } = open.as_ref().ok_or(ExecError::Closed)?;
        captures.send(Coming::Captured(gradients.begin_capture(id, source, promise)));
        Ok(Capture(future))
    }

    /// Hands a gradient in device memory to its update, chunk by chunk as it arrives in `staging`, in the
    /// order of the captures. `update` is of the executor that shares the chunks of `staging`.
    ///
    /// # Safety
    /// The addresses in `source` are of device memory of as many bytes: the gradient of `update` and the
    /// numbers. Both live and are not written from [`AppliedGradient::ready`] until [`Applying::is_done`].
    pub unsafe fn apply(
        &self,
        staging: &Arc<Staging>,
        source: AppliedGradient,
        update: ArrivingUpdate,
    ) -> Result<Applying> {
        let (future, promise) = DeviceFuture::new(&self.counters);
        let open = self.lock();
        let Open { copies, captures, .. } = open.as_ref().ok_or(ExecError::Closed)?;
        let job = applying::job(Arc::clone(copies), Arc::clone(staging), source, update, promise);
        captures.send(Coming::Applied(Box::new(job)));
        Ok(Applying(future))
    }

    /// Puts `bytes` bytes at device address `source` aside, after `ready`, as [`Stash::new`] does
    /// from host memory.
    ///
    /// # Safety
    /// `source` is the address of device memory that lives and is not written from `ready` until
    /// the stash has the bytes ([`Stash::is_copied`]).
    pub unsafe fn stash(
        &self,
        staging: &Arc<Staging>,
        source: usize,
        bytes: usize,
        ready: &DeviceEvent,
        spill: bool,
    ) -> Result<Stash> {
        let (copied, promise) = DeviceFuture::new(&self.counters);
        let open = self.lock();
        let Open { copies, stashes, .. } = open.as_ref().ok_or(ExecError::Closed)?;
        let stash = Stash::arriving(staging, bytes, copied);
        let job =
            restore::stash_job(Arc::clone(copies), stash.stashed(), source, ready.clone(), spill, promise);
        stashes.send(Box::new(job));
        Ok(stash)
    }

    /// Copies the bytes of a stash to device address `target`, after `after`. May be called any
    /// number of times.
    ///
    /// # Safety
    /// `target` is the address of as many bytes of device memory, which are not used from `after`
    /// until the event of [`Restore::enqueued`].
    pub unsafe fn restore(&self, stash: &Stash, target: usize, after: &DeviceEvent) -> Result<Restore> {
        let (future, promise) = DeviceFuture::new(&self.counters);
        let open = self.lock();
        let Open { copies, stashes, .. } = open.as_ref().ok_or(ExecError::Closed)?;
        let job = restore::job(Arc::clone(copies), stash.stashed(), target, after.clone(), promise);
        stashes.send(Box::new(job));
        Ok(Restore(future))
    }

    /// Finishes all jobs, waits for the device, and ends threads and streams. Later calls fail with
    /// [`ExecError::Closed`]; closing twice is fine.
    pub fn close(&self) {
        // A forked child has neither the threads nor the device.
        if !self.origin.is_here() {
            return;
        }
        let Some(Open { copies, captures, stashes }) = self.lock().take() else { return };
        captures.end();
        stashes.end();
        let _ = copies.on_device(|_| {
            // The streams of a failed device have stopped: errors are ignored.
            for stream in [&copies.upload, &copies.restore, &copies.download] {
                let _ = copies.drain(stream);
            }
            Ok(())
        });
    }

    fn copies(&self) -> Result<Arc<Copies>> {
        self.lock().as_ref().map(|open| Arc::clone(&open.copies)).ok_or(ExecError::Closed)
    }

    fn lock(&self) -> MutexGuard<'_, Option<Open>> {
        self.open.locked()
    }
}

impl Drop for DeviceLink {
    fn drop(&mut self) {
        self.close();
    }
}
