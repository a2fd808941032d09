//! The engine over io_uring: one ring and one thread for a volume.
//!
//! A ring belongs to one volume: no engine waits for another, the volume's file and the arena are registered
//! with its ring, and counters are per volume. A kernel feature that is missing is left out and reported
//! (`stats()["volumes"]`). Polling (`io_poll`, `sq_poll`) occupies a processor, so it is used only where
//! `memascend bench` found that every drive of a store gains by it.
//!
//! A ring that the kernel takes nothing from any more ends all requests with an error, present and future.
//! The kernel may still have parts of them, so their buffers are never used again.

use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, TryRecvError, bounded, unbounded};
use io_uring::{CompletionQueue, IoUring, SubmissionQueue, Submitter, opcode, squeue, types};
use memascend_mem::{LockExt, Origin, Pool, Watcher};

use crate::engine::registered::Registered;
use crate::engine::schedule::{Ended, Schedule};
use crate::unforked::Unforked;
use crate::{
    Activity, Counters, CountersSnapshot, Engine, EngineOptions, IoError, Operation, Recorder, Request,
    Result, VolumeFile,
};

/// The most bytes in flight. More would not be faster, and small requests would wait longer in the
/// drive.
const BYTES_IN_FLIGHT: usize = 32 << 20;
/// Completions handled before more is submitted. Drives complete in bursts, and would idle while a
/// whole burst is handled.
const COMPLETIONS_AT_ONCE: usize = 2;
/// `user_data` of the wake-up read.
const WAKE: u64 = u64::MAX;
/// The hint of a ring that the kernel takes nothing from any more.
const REFUSED: &str =
    "io_uring failed: resume from the last durable step, with engine=\"threads\" if it fails again";
/// The hint of a ring that the kernel has asked to try again for [`REFUSED_AT_MOST`].
const BUSY: &str = "for 10 seconds io_uring has neither taken nor completed anything: resume from the last \
    durable step, with engine=\"threads\" if it happens again";
/// How long the kernel may ask to try again, while it takes and completes nothing, before the ring counts as
/// failed.
const REFUSED_AT_MOST: Duration =
    if cfg!(test) { Duration::from_millis(300) } else { Duration::from_secs(10) };
/// How long the thread sleeps before it tries again.
const REFUSED_POLL: Duration = Duration::from_millis(1);
/// How long the kernel's submission thread polls for submissions before it sleeps, in milliseconds.
const SQ_POLL_IDLE_MS: u32 = 2;

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

enum Message {
    Request(Arc<VolumeFile>, Request, Instant),
    /// Registers the arena of a pool, and tells whether its changes are to be told.
    Register(Pool, Sender<bool>),
    /// These parts of the registered arena are memory now, or cease to be.
    Memory {
        parts: Vec<Range<usize>>,
        there: bool,
        told: Sender<()>,
    },
    Close,
}

/// The way to the ring's thread.
struct Mailbox {
    queue: Sender<Message>,
    wake: Arc<Wake>,
}

impl Mailbox {
    /// Gives the message back if the thread has ended.
    fn send(&self, message: Message) -> std::result::Result<(), Message> {
        self.queue.send(message).map_err(|refused| refused.0)?;
        self.wake.notify();
        Ok(())
    }

    fn memory(&self, parts: &[Range<usize>], there: bool) {
        let (told, heard) = bounded(1);
        // A thread that has ended has nothing registered, and answers nothing.
        if self.send(Message::Memory { parts: parts.to_vec(), there, told }).is_ok() {
            let _ = heard.recv();
        }
    }
}

impl Watcher for Mailbox {
    fn committed(&self, parts: &[Range<usize>]) {
        self.memory(parts, true);
    }

    fn leaving(&self, parts: &[Range<usize>]) {
        self.memory(parts, false);
    }
}

/// Wakes the ring's thread when it sleeps in the kernel.
struct Wake {
    event: OwnedFd,
    sleeping: AtomicBool,
    /// The errno that a test has the kernel refuse to go on with.
    #[cfg(test)]
    refusal: std::sync::atomic::AtomicI32,
}

impl Wake {
    fn new() -> io::Result<Self> {
        // SAFETY: eventfd takes no pointers.
        let event = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) };
        if event < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was just made and has no other owner.
        let event = unsafe { OwnedFd::from_raw_fd(event) };
        let sleeping = AtomicBool::new(false);
        Ok(Self {
            event,
            sleeping,
            #[cfg(test)]
            refusal: std::sync::atomic::AtomicI32::new(0),
        })
    }

    /// Submits what is queued and waits for a completion, unless a test has the kernel refuse that.
    #[cfg(test)]
    fn entered(&self, submitter: &Submitter<'_>) -> io::Result<usize> {
        match self.refusal.load(Ordering::SeqCst) {
            0 => submitter.submit_and_wait(1),
            errno => Err(io::Error::from_raw_os_error(errno)),
        }
    }

    #[cfg(not(test))]
    #[allow(clippy::unused_self)]
    fn entered(&self, submitter: &Submitter<'_>) -> io::Result<usize> {
        submitter.submit_and_wait(1)
    }

    fn notify(&self) {
        // SeqCst pairs with the ring thread's store-then-check: either the ring thread sees the new
        // request, or this thread sees that the ring thread sleeps.
        if self.sleeping.swap(false, Ordering::SeqCst) {
            self.ring();
        }
    }

    fn ring(&self) {
        let one = 1_u64;
        // SAFETY: eight bytes are read from a live u64.
        unsafe { libc::write(self.event.as_raw_fd(), (&raw const one).cast(), 8) };
    }

    /// Sleeps until another thread calls [`Wake::ring`].
    fn wait(&self) {
        let mut word = 0_u64;
        // SAFETY: eight bytes are written to a live u64.
        unsafe { libc::read(self.event.as_raw_fd(), (&raw mut word).cast(), 8) };
    }
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
        let (told, heard) = bounded(1);
        // Sending or receiving fails if the thread has ended; then there is nothing to wait for.
        if self.mailbox.send(Message::Register(pool.clone(), told)).is_ok()
            && heard.recv().is_ok_and(|watches| watches)
        {
            pool.watch(Arc::downgrade(&self.mailbox) as Weak<dyn Watcher>);
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

/// A ring that is not enabled yet.
struct Built {
    ring: IoUring,
    features: Vec<String>,
    /// Whether completions are polled for. Then only direct transfers may be submitted.
    polls: bool,
}

/// The ring with as many features as the kernel has. Requested features that the kernel refuses are
/// listed with the reason.
fn build(main_file: Option<&Arc<VolumeFile>>, options: EngineOptions) -> io::Result<Built> {
    let mut refused = Vec::new();
    let mut wanted = options;
    if wanted.io_poll
        && let Err(error) =
            main_file.map_or(Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP)), |file| probe_io_poll(file))
    {
        wanted.io_poll = false;
        refused.push(format!("no io_poll: {error}"));
    }
    let set_up = |sq_poll: bool, single_issuer: bool, deferred: bool| {
        let mut builder = IoUring::builder();
        builder.dontfork().setup_r_disabled().setup_clamp();
        if wanted.io_poll {
            builder.setup_iopoll();
        }
        if sq_poll {
            builder.setup_sqpoll(SQ_POLL_IDLE_MS);
        } else if deferred {
            builder.setup_defer_taskrun();
        } else if single_issuer {
            builder.setup_coop_taskrun();
        }
        if single_issuer {
            builder.setup_single_issuer();
        }
        // Room for the wake-up read beside the transfers.
        builder.build(u32::try_from(options.depth.max(1) + 2).unwrap_or(u32::MAX))
    };
    let mut attempts = Vec::new();
    if wanted.sq_poll {
        attempts.extend([(true, true, false), (true, false, false)]);
    }
    // Deferred task work needs Linux 6.1, a single issuer 6.0.
    attempts.extend([(false, true, true), (false, true, false), (false, false, false)]);
    let mut last = None;
    for (sq_poll, single_issuer, deferred) in attempts {
        match set_up(sq_poll, single_issuer, deferred) {
            Ok(ring) => {
                if wanted.sq_poll && !sq_poll {
                    refused.push("no sq_poll: the kernel refuses it".to_owned());
                }
                let used = [
                    (wanted.io_poll, "io_poll"),
                    (sq_poll, "sq_poll"),
                    (single_issuer, "single_issuer"),
                    (deferred, "defer_taskrun"),
                ];
                let used = used.iter().filter(|(used, _)| *used).map(|(_, name)| (*name).to_owned());
                let features = used.chain(refused).collect();
                return Ok(Built { ring, features, polls: wanted.io_poll });
            }
            Err(error) => last = Some(error),
        }
    }
    Err(last.expect("something was tried"))
}

/// Whether the device has queues to poll and answers polled reads. Reads a block of the volume
/// through a separate ring.
fn probe_io_poll(file: &VolumeFile) -> io::Result<()> {
    if !file.polls() {
        // An empty file cannot be probed by a read.
        return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
    }
    let block = memascend_mem::PAGE_BYTES;
    let pool = Pool::new(
        &memascend_mem::PageableAllocator::default(),
        &[memascend_mem::SizeClass::new("probe", block, 1)],
    )
    .map_err(io::Error::other)?;
    let lease = pool.try_lease(block).map_err(io::Error::other)?.expect("a fresh pool has a buffer");
    // Declared last, so that the ring is dropped before the buffer.
    let mut ring = IoUring::builder().dontfork().setup_iopoll().build(2)?;
    let read = opcode::Read::new(types::Fd(file.fd()), lease.address().as_ptr(), block as u32)
        .offset(file.position(0))
        .build();
    // SAFETY: the lease outlives the read, which is waited for below.
    unsafe { ring.submission().push(&read) }.map_err(|_| io::Error::other("the queue is full"))?;
    while let Err(error) = ring.submit_and_wait(1) {
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
    match ring.completion().next().map(|entry: io_uring::cqueue::Entry| entry.result()) {
        Some(result) if result < 0 => Err(io::Error::from_raw_os_error(-result)),
        _ => Ok(()),
    }
}

struct Driver {
    messages: Receiver<Message>,
    wake: Arc<Wake>,
    counters: Arc<Counters>,
    main_file: Option<Arc<VolumeFile>>,
    features: Arc<Mutex<Vec<String>>>,
    schedule: Schedule,
    depth: usize,
    polls: bool,
    open: bool,
    in_flight: usize,
    bytes_in_flight: usize,
    wake_word: Box<u64>,
    wake_armed: bool,
    fixed_file: bool,
    /// Since when the kernel has asked to try again, and has neither taken nor completed anything.
    refused_since: Option<Instant>,
    arena: Option<Registered>,
}

impl Driver {
    fn start(mut self, mut built: Built, ready: &Sender<io::Result<()>>) {
        let Built { ring, features, .. } = &mut built;
        // The ring holds the volume's file.
        let _unforked = Unforked::of(ring);
        // A single-issuer ring belongs to the thread that enables it.
        if let Err(error) = ring.submitter().register_enable_rings() {
            let _ = ready.send(Err(error));
            return;
        }
        let main_file = self.main_file.as_ref();
        self.fixed_file = main_file.is_some_and(|file| ring.submitter().register_files(&[file.fd()]).is_ok());
        if self.fixed_file {
            features.push("registered_file".into());
        }
        let (mut submitter, sq, cq) = ring.split();
        if submitter.register_ring_fd().is_ok() {
            features.push("registered_ring".into());
        }
        self.features.locked().append(features);
        let _ = ready.send(Ok(()));
        self.run(&mut Enabled { submitter, sq, cq });
    }

    fn run(&mut self, ring: &mut Enabled<'_>) {
        loop {
            self.accept(ring);
            self.arm_wake(ring);
            self.fill(ring);
            let idle = self.in_flight == 0;
            // The wake-up read must have ended too, or the kernel could still write to its word.
            // Dropping the engine always rings, so the read does end.
            if !self.open && idle && self.schedule.is_empty() && !self.wake_armed {
                // Unregister now rather than when the kernel frees the ring: another process may
                // open the device at once, and the next ring's buffers count against the same
                // limit.
                if self.fixed_file {
                    let _ = ring.submitter.unregister_files();
                }
                if self.arena.is_some() {
                    let _ = ring.submitter.unregister_buffers();
                }
                return;
            }
            if self.open {
                self.wake.sleeping.store(true, Ordering::SeqCst);
                // A sender that did not see the store above does not ring: check the queue once
                // more.
                if !self.messages.is_empty() {
                    self.wake.sleeping.store(false, Ordering::SeqCst);
                    let _ = ring.submitter.submit();
                    self.take_completions(ring);
                    continue;
                }
                if !self.polls && idle && !self.wake_armed {
                    // No read is armed that could wake the thread.
                    continue;
                }
                if self.polls && idle {
                    self.wake.wait();
                    self.wake.sleeping.store(false, Ordering::SeqCst);
                    continue;
                }
            }
            let refusal = match self.wake.entered(&ring.submitter) {
                Ok(_) => None,
                Err(error) => Some(error.raw_os_error().unwrap_or(libc::EIO)),
            };
            self.wake.sleeping.store(false, Ordering::SeqCst);
            let completed = self.take_completions(ring);
            match refusal {
                Some(errno @ (libc::EINTR | libc::EAGAIN | libc::EBUSY)) if !completed => {
                    if self.is_refused_for_long(ring, errno) {
                        return self.fail(errno, BUSY);
                    }
                }
                None | Some(libc::EINTR | libc::EAGAIN | libc::EBUSY) => self.refused_since = None,
                // The kernel takes no more from this ring, and never should refuse.
                Some(errno) => return self.fail(errno, REFUSED),
            }
        }
    }

    /// Whether the kernel has asked to try again for too long, while there is something to take or to complete.
    /// Sleeps for a moment where the kernel is busy.
    fn is_refused_for_long(&mut self, ring: &mut Enabled<'_>, errno: i32) -> bool {
        ring.sq.sync();
        let is_busy = errno != libc::EINTR;
        if is_busy {
            std::thread::sleep(REFUSED_POLL);
        }
        // A wait for a slow drive may be interrupted any number of times.
        let is_waited_for = if self.in_flight > 0 { is_busy } else { !self.open };
        if ring.sq.is_empty() && !is_waited_for {
            self.refused_since = None;
            return false;
        }
        self.refused_since.get_or_insert_with(Instant::now).elapsed() > REFUSED_AT_MOST
    }

    /// Ends all requests, and every one that comes, with an error.
    fn fail(&mut self, errno: i32, hint: &'static str) {
        let fail = |ended: Vec<Ended>, counters: &Counters| {
            for ended in ended {
                // The kernel may still have parts of it: its buffer is never used again.
                std::mem::forget(ended.buffer().clone());
                ended.tell(counters);
            }
        };
        fail(self.schedule.fail_all(errno, hint), &self.counters);
        // What closes the ring waits for the end of its thread.
        while self.open
            && let Ok(message) = self.messages.recv()
        {
            match message {
                Message::Request(file, request, started) => {
                    let at_once = self.schedule.accept(&file, request, started);
                    at_once.into_iter().for_each(|ended| ended.tell(&self.counters));
                    fail(self.schedule.fail_all(errno, hint), &self.counters);
                }
                Message::Register(_, told) => drop(told.send(false)),
                Message::Memory { told, .. } => drop(told.send(())),
                Message::Close => return,
            }
        }
    }

    /// Moves new requests into the schedule. Each holds memory, which bounds their number.
    fn accept(&mut self, ring: &Enabled<'_>) {
        while self.open {
            match self.messages.try_recv() {
                Ok(Message::Request(file, request, started)) => {
                    if let Some(ended) = self.schedule.accept(&file, request, started) {
                        ended.tell(&self.counters);
                    }
                }
                Ok(Message::Register(pool, told)) => {
                    let _ = told.send(self.register(ring, pool));
                }
                Ok(Message::Memory { parts, there, told }) => {
                    self.note_memory(ring, &parts, there);
                    let _ = told.send(());
                }
                Err(TryRecvError::Empty) => return,
                Ok(Message::Close) | Err(TryRecvError::Disconnected) => self.open = false,
            }
        }
    }

    /// Registers an arena; whether its changes are to be told.
    fn register(&mut self, ring: &Enabled<'_>, pool: Pool) -> bool {
        if self.arena.is_some() {
            return false;
        }
        let elastic = pool.is_elastic();
        let (registered, feature) = match Registered::new(&ring.submitter, pool) {
            Ok(registered) => (Some(registered), "registered_buffers".into()),
            Err(error) if elastic => (
                None,
                format!("no registered_buffers: memory that grows and shrinks needs a sparse table: {error}"),
            ),
            Err(error) => (None, format!("no registered_buffers: {error}")),
        };
        let watches = elastic && registered.is_some();
        self.arena = registered;
        let mut features = self.features.locked();
        features.push(feature);
        if watches {
            features.push("sparse_buffers".into());
        }
        watches
    }

    fn note_memory(&mut self, ring: &Enabled<'_>, parts: &[Range<usize>], there: bool) {
        let Some(arena) = &mut self.arena else { return };
        if there {
            if let Err(error) = arena.committed(&ring.submitter, parts) {
                let refused = format!("some buffers are not registered: {error}");
                let mut features = self.features.locked();
                if !features.contains(&refused) {
                    features.push(refused);
                }
            }
        } else if let Err(error) = arena.leaving(&ring.submitter, parts) {
            self.features.locked().push(format!("some memory stays pinned: {error}"));
        }
    }

    fn arm_wake(&mut self, ring: &mut Enabled<'_>) {
        if self.wake_armed || !self.open || self.polls {
            return;
        }
        let event = types::Fd(self.wake.event.as_raw_fd());
        let read = opcode::Read::new(event, (&raw mut *self.wake_word).cast(), 8).build().user_data(WAKE);
        // Submitting has made room in the queue.
        ring.sq.sync();
        // SAFETY: the word is boxed and lives until the ring is dropped at the end of `run`.
        if unsafe { ring.sq.push(&read) }.is_ok() {
            self.wake_armed = true;
        }
        ring.sq.sync();
    }

    fn fill(&mut self, ring: &mut Enabled<'_>) {
        ring.sq.sync();
        while self.in_flight < self.depth
            && (self.bytes_in_flight < BYTES_IN_FLIGHT || self.in_flight == 0)
            && !ring.sq.is_full()
        {
            let Some(part) = self.schedule.next() else { break };
            let transfer = self.schedule.transfer(part);
            if transfer.operation == Operation::Write
                && let Err(error) = transfer.file.check_length()
            {
                if let Some(ended) = self.schedule.complete(part, Err(error)) {
                    ended.tell(&self.counters);
                }
                continue;
            }
            if transfer.retries > 1 && self.in_flight == 0 {
                std::thread::sleep(Duration::from_micros(50) * transfer.retries.min(100));
            }
            let entry = self.entry(&transfer).user_data(part as u64);
            // SAFETY: the part's job owns its buffer until the part's completion is taken.
            unsafe { ring.sq.push(&entry) }.expect("there is room");
            self.in_flight += 1;
            self.bytes_in_flight += transfer.bytes;
        }
        ring.sq.sync();
    }

    fn entry(&self, transfer: &crate::engine::schedule::Transfer) -> squeue::Entry {
        let length = u32::try_from(transfer.bytes).expect("a part is small");
        let offset = transfer.file.position(transfer.offset);
        let buffer =
            self.arena.as_ref().and_then(|arena| arena.index_of(transfer.address as usize, transfer.bytes));
        let address = transfer.address;
        macro_rules! on {
            ($target:expr) => {
                match (transfer.operation, buffer) {
                    (Operation::Read, Some(index)) => {
                        opcode::ReadFixed::new($target, address, length, index).offset(offset).build()
                    }
                    (Operation::Write, Some(index)) => {
                        opcode::WriteFixed::new($target, address, length, index).offset(offset).build()
                    }
                    (Operation::Read, None) => {
                        opcode::Read::new($target, address, length).offset(offset).build()
                    }
                    (Operation::Write, None) => {
                        opcode::Write::new($target, address, length).offset(offset).build()
                    }
                }
            };
        }
        let is_main = self.main_file.as_ref().is_some_and(|main| Arc::ptr_eq(main, &transfer.file));
        if self.fixed_file && is_main { on!(types::Fixed(0)) } else { on!(types::Fd(transfer.file.fd())) }
    }

    /// Handles some completions; whether there were any.
    fn take_completions(&mut self, ring: &mut Enabled<'_>) -> bool {
        ring.cq.sync();
        let mut completed = false;
        for entry in ring.cq.by_ref().take(COMPLETIONS_AT_ONCE) {
            completed = true;
            if entry.user_data() == WAKE {
                self.wake_armed = false;
                continue;
            }
            let part = entry.user_data() as usize;
            self.in_flight -= 1;
            self.bytes_in_flight -= self.schedule.part_bytes(part);
            let moved = entry.result();
            let result = usize::try_from(moved).map_err(|_| io::Error::from_raw_os_error(-moved));
            if let Some(ended) = self.schedule.complete(part, result) {
                ended.tell(&self.counters);
            }
        }
        ring.cq.sync();
        completed
    }
}

/// The parts of an enabled ring.
struct Enabled<'a> {
    submitter: Submitter<'a>,
    sq: SubmissionQueue<'a>,
    cq: CompletionQueue<'a>,
}

impl Drop for Driver {
    /// After an orderly end nothing is in flight. After a panic the kernel may still use the
    /// submitted buffers: they are leaked. Waiting threads are notified when the callbacks are
    /// dropped.
    fn drop(&mut self) {
        for request in self.schedule.drain() {
            std::mem::forget(request.buffer);
        }
        if self.wake_armed {
            std::mem::forget(std::mem::take(&mut self.wake_word));
        }
    }
}

#[cfg(test)]
#[path = "ring_refused.rs"]
mod refused;
