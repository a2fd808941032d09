//! The engine over io_uring: one ring and one thread for a volume.
//!
//! A ring belongs to one volume: no engine waits for another, the volume's file and the arena are registered
//! with its ring, and counters are per volume. A kernel feature that is missing is left out and reported
//! (`stats()["volumes"]`). Polling (`io_poll`, `sq_poll`) occupies a processor, so it is used only where
//! `memascend bench` found that every drive of a store gains by it.
//!
//! A ring that the kernel takes nothing from any more ends all requests with an error, present and future.
//! The kernel may still have parts of them, so their buffers are never used again.

mod completion;
mod driver;
mod mailbox;
mod memory;
mod refusal;
mod setup;
mod submission;
mod wake;

use std::io;
use std::sync::{Arc, Mutex, Weak};
use std::thread::JoinHandle;
use std::time::Instant;

use crossbeam_channel::{bounded, unbounded};
use memascend_mem::{LockExt, Origin, Pool, ResizeListener};

use self::driver::Driver;
use self::mailbox::{Mailbox, Message};
use self::setup::build;
use self::wake::Wake;
use crate::engine::schedule::Schedule;
use crate::{
    Activity, Counters, CountersSnapshot, Engine, EngineOptions, IoError, Recorder, Request, Result,
    VolumeFile,
};

/// io_uring: one ring for a volume, owned by one thread, which keeps the drive's queue full across
/// requests.
pub struct RingEngine {
    ring: Ring,
    file: Arc<VolumeFile>,
}

/// A ring and its thread, which carries out requests on any files.
pub(super) struct Ring {
    mailbox: Arc<Mailbox>,
    thread: Option<JoinHandle<()>>,
    counters: Arc<Counters>,
    features: Arc<Mutex<Vec<String>>>,
    origin: Origin,
}

impl RingEngine {
    /// Sets up the ring and starts its thread. Optional features that the kernel does not have are
    /// left out; [`Engine::features`] lists those in use.
    ///
    /// # Errors
    /// [`IoError::RingUnavailable`] where the system refuses io_uring (an old kernel, the sysctl
    /// `kernel.io_uring_disabled`, Docker's seccomp profile).
    pub fn new(file: &Arc<VolumeFile>, options: EngineOptions) -> Result<Self> {
        Ok(Self { ring: Ring::new(Some(file), options)?, file: Arc::clone(file) })
    }
}

impl Ring {
    /// `main_file` is registered with the ring; requests on other files are carried out too.
    pub(super) fn new(main_file: Option<&Arc<VolumeFile>>, options: EngineOptions) -> Result<Self> {
        let unavailable = |source| IoError::RingUnavailable { source };
        let built = build(main_file, options).map_err(unavailable)?;
        let wake = Arc::new(Wake::new().map_err(unavailable)?);
        let counters = Arc::new(Counters::default());
        let features = Arc::new(Mutex::new(Vec::new()));
        let (queue, messages) = unbounded();
        let (ready, started) = bounded(1);
        let driver = Driver {
            messages,
            wake: Arc::clone(&wake),
            counters: Arc::clone(&counters),
            schedule: Schedule::new(None),
            main_file: main_file.cloned(),
            features: Arc::clone(&features),
            depth: options.depth.max(1),
            polls: built.polls,
            open: true,
            in_flight: 0,
            bytes_in_flight: 0,
            wake_word: Box::default(),
            wake_armed: false,
            fixed_file: false,
            refused_since: None,
            arena: None,
        };
        let thread = std::thread::Builder::new()
            .name("memascend-ring".into())
            .spawn(move || driver.start(built, &ready))
            .map_err(unavailable)?;
        // The ring belongs to the thread that enables it, so only that thread knows whether
        // enabling worked.
        started.recv().unwrap_or_else(|_| Err(io::Error::other("its thread ended"))).map_err(unavailable)?;
        Ok(Self {
            mailbox: Arc::new(Mailbox { queue, wake }),
            thread: Some(thread),
            counters,
            features,
            origin: Origin::here(),
        })
    }

    pub(super) fn submit(&self, file: &Arc<VolumeFile>, request: Request) {
        let now = Instant::now();
        self.counters.started(now);
        let message = Message::Request(Arc::clone(file), request, now);
        if let Err(Message::Request(_, request, started)) = self.mailbox.send(message) {
            // The thread has ended, which only a defect can cause. The request still completes.
            let Request { operation, buffer, on_complete, .. } = request;
            self.counters.ended(operation, buffer.bytes(), started, false);
            on_complete(crate::Completion { buffer, result: Err(IoError::Closed) });
        }
    }

    pub(super) fn features(&self) -> Vec<String> {
        self.features.locked().clone()
    }

    fn register(&self, pool: &Pool) {
        let (reply, reply_rx) = bounded(1);
        // Sending or receiving fails if the thread has ended; then there is nothing to wait for.
        if self.mailbox.send(Message::Register(pool.clone(), reply)).is_ok()
            && reply_rx.recv().is_ok_and(|listens| listens)
        {
            pool.add_resize_listener(Arc::downgrade(&self.mailbox) as Weak<dyn ResizeListener>);
        }
    }
}

impl Engine for RingEngine {
    fn name(&self) -> &'static str {
        "ring"
    }

    fn submit(&self, request: Request) {
        self.ring.submit(&self.file, request);
    }

    fn flush(&self) -> Result<()> {
        self.ring.counters.recorder.timed(Activity::Flush, || self.file.sync())
    }

    fn counters(&self) -> CountersSnapshot {
        self.ring.counters.snapshot()
    }

    fn recorder(&self) -> Option<&Recorder> {
        Some(&self.ring.counters.recorder)
    }

    fn features(&self) -> Vec<String> {
        self.ring.features()
    }

    fn register(&self, pool: &Pool) {
        self.ring.register(pool);
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // A forked child does not have the thread, so it cannot wake or join the thread.
        if !self.origin.is_here() {
            return;
        }
        let _ = self.mailbox.send(Message::Close);
        self.mailbox.wake.ring();
        if let Some(thread) = self.thread.take() {
            // The engine may be dropped by a completion running on its own thread.
            if thread.thread().id() != std::thread::current().id() {
                let _ = thread.join();
            }
        }
    }
}
