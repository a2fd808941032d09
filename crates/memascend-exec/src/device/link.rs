use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;

use crossbeam_channel::{Sender, unbounded};
use memascend_mem::{CudaEvent, Cudart, Lease, LockExt, Origin};

use super::copies::{Copies, Counters, DeviceCounters, DeviceEvent};
use super::{Capture, Outcome, Restore, capture, restore};
use crate::{GradientId, Gradients, OptimError, Result, Staging, Stash};

/// One CUDA device: a stream each for weights to it, for activations back to it and for all that leaves it, and the
/// threads that wait, in the order of the calls, for staging buffers and the SSD on behalf of the caller, who never does.
///
/// Addresses of the device's are numbers; whoever passes one vouches for the memory until the event, the capture, the
/// stash or the restore is done that the call gives.
pub struct DeviceLink {
    index: i32,
    open: Mutex<Option<Open>>,
    counters: Arc<Counters>,
    origin: Origin,
}

struct Open {
    copies: Arc<Copies>,
    captures: Worker,
    stashes: Worker,
}

/// A thread that does jobs one after another.
struct Worker {
    jobs: Sender<Job>,
    thread: JoinHandle<()>,
}

type Job = Box<dyn FnOnce() + Send>;

impl Worker {
    fn start(name: &str) -> Self {
        let (jobs, accepted) = unbounded::<Job>();
        let thread = std::thread::Builder::new().name(name.into()).spawn(move || {
            for job in accepted {
                job();
            }
        });
        Self { jobs, thread: thread.expect("the system can start a thread") }
    }

    /// Has the thread do a job. Where it cannot, because it has failed, the job is dropped, and whoever waits for what
    /// comes of it is told.
    fn send(&self, job: impl FnOnce() + Send + 'static) {
        let _ = self.jobs.send(Box::new(job));
    }

    /// Waits until everything sent is done.
    fn end(self) {
        drop(self.jobs);
        let _ = self.thread.join();
    }
}

impl DeviceLink {
    /// Opens device number `index` of those that the process may see.
    ///
    /// # Errors
    /// [`OptimError::Device`] if there is none of that number, or it has no room for a context.
    pub fn open(cudart: Arc<Cudart>, index: i32) -> Result<Self> {
        let counters = Arc::default();
        let copies = Arc::new(Copies::open(cudart, index, Arc::clone(&counters))?);
        let open = Open {
            copies,
            captures: Worker::start("memascend-gradients"),
            stashes: Worker::start("memascend-stashes"),
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

    /// What was copied and waited for so far.
    pub fn counters(&self) -> DeviceCounters {
        self.counters.snapshot()
    }

    /// An event that is done when all that was put into `stream` so far is.
    ///
    /// # Safety
    /// `stream` is 0, the device's default stream, or the handle of a live `cudaStream_t` of the device.
    pub unsafe fn record(&self, stream: usize) -> Result<DeviceEvent> {
        let copies = self.copies()?;
        // SAFETY: the caller's promise.
        let event = copies.on_device(|cudart| unsafe { CudaEvent::record(cudart, stream as *mut _) })?;
        Ok(copies.event(event))
    }

    /// Has what is put into `stream` from now on come after `event`.
    ///
    /// # Safety
    /// As [`DeviceLink::record`].
    pub unsafe fn wait(&self, stream: usize, event: &DeviceEvent) -> Result<()> {
        // SAFETY: the caller's promise.
        self.copies()?.on_device(|_| unsafe { event.event.precede(stream as *mut _) })
    }

    /// Has `bytes` bytes of `lease` from `offset` copied to device address `target`, after the events. The lease returns
    /// to its pool only after the event that this gives, when it is done.
    ///
    /// # Safety
    /// `target` is the address of `bytes` bytes of the device's, which nobody uses but after the event, and before
    /// `after`. Nobody writes the range of the lease until then.
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

    /// Has a gradient taken over from device address `source`, as [`Gradients::capture`] does from host memory, after
    /// `ready`. `sums` is the address of the sums of squares of its blocks, fp64, with a flag (u32) behind them that says
    /// whether an element is not finite, and how many they are: the host then never reads the gradient. Whatever is done
    /// with the gradient afterwards comes after this.
    ///
    /// # Safety
    /// `source` and `sums` are addresses of memory of the device's, of `numel` elements of the gradient's dtype and of the
    /// sums, which live and are not written from `ready` until the capture has ended.
    ///
    /// # Panics
    /// As [`Gradients::capture`], and if there are `sums` of another number of blocks, or of what is to be added to
    /// something else.
    #[allow(clippy::too_many_arguments)]
    pub unsafe fn capture(
        &self,
        gradients: &Arc<Gradients>,
        id: GradientId,
        start: usize,
        source: usize,
        numel: usize,
        accumulate: bool,
        ready: &DeviceEvent,
        sums: Option<(usize, usize)>,
    ) -> Result<Capture> {
        let (outcome, promise) = Outcome::new(&self.counters);
        let open = self.lock();
        let Open { copies, captures, .. } = open.as_ref().ok_or(OptimError::Closed)?;
        let source =
            capture::Source { start, address: source, numel, accumulate, sums, ready: ready.clone() };
        captures.send(capture::job(Arc::clone(copies), Arc::clone(gradients), id, source, promise));
        Ok(Capture(outcome))
    }

    /// Has `bytes` bytes at device address `source` put aside, as [`Stash::new`] does from host memory, after `ready`.
    ///
    /// # Safety
    /// `source` is the address of memory of the device's that lives and is not written from `ready` until the stash has
    /// the bytes ([`Stash::is_copied`]).
    pub unsafe fn stash(
        &self,
        staging: &Arc<Staging>,
        source: usize,
        bytes: usize,
        ready: &DeviceEvent,
        spill: bool,
    ) -> Result<Stash> {
        let (copied, promise) = Outcome::new(&self.counters);
        let open = self.lock();
        let Open { copies, stashes, .. } = open.as_ref().ok_or(OptimError::Closed)?;
        let stash = Stash::arriving(staging, bytes, copied);
        let job = restore::stash_job(Arc::clone(copies), stash.kept(), source, ready.clone(), spill, promise);
        stashes.send(job);
        Ok(stash)
    }

    /// Has what was put aside copied to device address `target`, after `after`. May be asked for as often as wanted.
    ///
    /// # Safety
    /// `target` is the address of as many bytes of the device's, which nobody uses from `after` until the event of
    /// [`Restore::enqueued`].
    pub unsafe fn restore(&self, stash: &Stash, target: usize, after: &DeviceEvent) -> Result<Restore> {
        let (outcome, promise) = Outcome::new(&self.counters);
        let open = self.lock();
        let Open { copies, stashes, .. } = open.as_ref().ok_or(OptimError::Closed)?;
        stashes.send(restore::job(Arc::clone(copies), stash.kept(), target, after.clone(), promise));
        Ok(Restore(outcome))
    }

    /// Does what was asked for so far, waits until the device has done its part, and ends threads and streams. Further
    /// calls fail with [`OptimError::Closed`]; closing twice is fine.
    pub fn close(&self) {
        // Neither threads nor device came along into a forked child.
        if !self.origin.is_here() {
            return;
        }
        let Some(Open { copies, captures, stashes }) = self.lock().take() else { return };
        captures.end();
        stashes.end();
        let _ = copies.on_device(|_| {
            // A device that has failed copies no more.
            for stream in [&copies.upload, &copies.restore, &copies.download] {
                let _ = copies.drain(stream);
            }
            Ok(())
        });
    }

    fn copies(&self) -> Result<Arc<Copies>> {
        self.lock().as_ref().map(|open| Arc::clone(&open.copies)).ok_or(OptimError::Closed)
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
