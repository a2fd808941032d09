use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender, TryRecvError, unbounded};
use io_uring::{IoUring, opcode, squeue, types};
use memascend_mem::Origin;

use crate::engine::run_callback;
use crate::threads::resumable;
use crate::{Completion, Counters, CountersSnapshot, Engine, IoError, Operation, Request, Result};

/// Submission queue entries: transfers in flight at once.
const DEPTH: u32 = 64;
/// Largest single transfer. Larger requests are split so that small ones are not stuck behind them.
const PART_BYTES: usize = 1 << 20;
/// How often a part is retried when the kernel says try again.
const RETRIES: u32 = 1000;
/// `user_data` of the wake-up read.
const WAKE: u64 = u64::MAX;

/// io_uring: one ring owned by one thread, which keeps the queue full across requests.
pub struct RingEngine {
    queue: Option<Sender<Request>>,
    wake: Arc<Wake>,
    thread: Option<JoinHandle<()>>,
    counters: Arc<Counters>,
    origin: Origin,
}

/// Wakes the ring's thread when it sleeps in the kernel.
struct Wake {
    event: OwnedFd,
    sleeping: AtomicBool,
}

impl Wake {
    fn notify(&self) {
        // SeqCst pairs with the ring thread's store-then-check: either it sees the new request or we see it sleeping.
        if self.sleeping.swap(false, Ordering::SeqCst) {
            self.ring();
        }
    }

    fn ring(&self) {
        let one = 1_u64;
        // SAFETY: eight bytes are read from a live u64.
        unsafe { libc::write(self.event.as_raw_fd(), (&raw const one).cast(), 8) };
    }
}

impl RingEngine {
    /// Sets up the ring and starts its thread.
    ///
    /// # Errors
    /// [`IoError::RingUnavailable`] where the system refuses io_uring (an old kernel, the sysctl
    /// `kernel.io_uring_disabled`, Docker's seccomp profile).
    pub fn new() -> Result<Self> {
        let unavailable = |source| IoError::RingUnavailable { source };
        let modern =
            IoUring::builder().setup_single_issuer().setup_coop_taskrun().setup_r_disabled().build(DEPTH);
        // Kernels before 6.0 know neither single issuer nor cooperative task work.
        let ring =
            modern.or_else(|_| IoUring::builder().setup_r_disabled().build(DEPTH)).map_err(unavailable)?;
        // SAFETY: eventfd takes no pointers.
        let event = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) };
        if event < 0 {
            return Err(unavailable(io::Error::last_os_error()));
        }
        // SAFETY: the descriptor was just made and nobody else owns it.
        let event = unsafe { OwnedFd::from_raw_fd(event) };
        let wake = Arc::new(Wake { event, sleeping: AtomicBool::new(false) });
        let counters = Arc::new(Counters::default());
        let (queue, requests) = unbounded();
        let driver = Driver {
            requests,
            wake: Arc::clone(&wake),
            counters: Arc::clone(&counters),
            open: true,
            jobs: Slab::default(),
            parts: Slab::default(),
            waiting: VecDeque::new(),
            wake_word: Box::default(),
            wake_armed: false,
        };
        let thread = std::thread::Builder::new()
            .name("memascend-ring".into())
            .spawn(move || {
                // A single-issuer ring belongs to the thread that enables it.
                ring.submitter().register_enable_rings().expect("a disabled ring can be enabled once");
                driver.run(ring);
            })
            .map_err(unavailable)?;
        Ok(Self { queue: Some(queue), wake, thread: Some(thread), counters, origin: Origin::here() })
    }
}

impl Engine for RingEngine {
    fn name(&self) -> &'static str {
        "ring"
    }

    fn submit(&self, request: Request) {
        let queue = self.queue.as_ref().expect("the queue lives until drop");
        match queue.send(request) {
            Ok(()) => self.wake.notify(),
            Err(refused) => {
                let Request { buffer, on_complete, .. } = refused.0;
                on_complete(Completion { buffer, result: Err(IoError::Closed) });
            }
        }
    }

    fn counters(&self) -> CountersSnapshot {
        self.counters.snapshot()
    }
}

impl Drop for RingEngine {
    fn drop(&mut self) {
        // The threads did not come along into a forked child: there is nobody to wake or to join.
        if !self.origin.is_here() {
            return;
        }
        self.queue = None;
        self.wake.ring();
        if let Some(thread) = self.thread.take() {
            // The engine may be dropped by a completion running on its own thread.
            if thread.thread().id() != std::thread::current().id() {
                let _ = thread.join();
            }
        }
    }
}

/// A request being transferred.
struct Job {
    request: Request,
    parts_left: usize,
    error: Option<io::Error>,
}

/// One submission: a piece of a job.
struct Part {
    job: usize,
    start: usize,
    bytes: usize,
    retries: u32,
}

struct Driver {
    requests: Receiver<Request>,
    wake: Arc<Wake>,
    counters: Arc<Counters>,
    open: bool,
    jobs: Slab<Job>,
    parts: Slab<Part>,
    /// Parts not yet submitted, oldest first.
    waiting: VecDeque<usize>,
    wake_word: Box<u64>,
    wake_armed: bool,
}

impl Driver {
    fn run(mut self, mut ring: IoUring) {
        let mut in_flight = 0_usize;
        loop {
            self.accept();
            if !self.wake_armed && self.open {
                let read = opcode::Read::new(
                    types::Fd(self.wake.event.as_raw_fd()),
                    (&raw mut *self.wake_word).cast(),
                    8,
                )
                .build()
                .user_data(WAKE);
                // SAFETY: the word is boxed and lives until the ring is dropped at the end of `run`.
                if unsafe { ring.submission().push(&read) }.is_ok() {
                    self.wake_armed = true;
                }
            }
            while let Some(&index) = self.waiting.front() {
                if in_flight >= DEPTH as usize - 1 {
                    break;
                }
                let entry = self.entry(index);
                // SAFETY: the part's job owns its buffer until the part's completion is taken below.
                if unsafe { ring.submission().push(&entry) }.is_err() {
                    break;
                }
                self.waiting.pop_front();
                in_flight += 1;
            }
            // The wake-up read too must have ended, or the kernel could still write to its word: dropping the engine
            // always rings.
            if !self.open && in_flight == 0 && self.waiting.is_empty() && !self.wake_armed {
                return;
            }
            if self.open {
                self.wake.sleeping.store(true, Ordering::SeqCst);
                // A request sent before the store above was seen would find nobody sleeping: look once more.
                if self.has_room() && !self.requests.is_empty() {
                    self.wake.sleeping.store(false, Ordering::SeqCst);
                    let _ = ring.submit();
                    self.take_completions(&mut ring, &mut in_flight);
                    continue;
                }
            }
            match ring.submit_and_wait(1) {
                Ok(_) => {}
                Err(error)
                    if matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY)) => {}
                Err(error) => panic!("io_uring_enter failed: {error}"),
            }
            self.wake.sleeping.store(false, Ordering::SeqCst);
            self.take_completions(&mut ring, &mut in_flight);
        }
    }

    /// Moves new requests into the tables, bounded so that a flood cannot grow them without end.
    fn accept(&mut self) {
        while self.open && self.has_room() {
            match self.requests.try_recv() {
                Ok(request) => {
                    let bytes = request.buffer.bytes();
                    debug_assert!(bytes > 0, "a request moves something");
                    let parts_left = bytes.div_ceil(PART_BYTES);
                    let job = self.jobs.insert(Job { request, parts_left, error: None });
                    for start in (0..bytes).step_by(PART_BYTES) {
                        let part = Part { job, start, bytes: PART_BYTES.min(bytes - start), retries: 0 };
                        let index = self.parts.insert(part);
                        self.waiting.push_back(index);
                    }
                }
                Err(TryRecvError::Empty) => return,
                Err(TryRecvError::Disconnected) => self.open = false,
            }
        }
    }

    fn has_room(&self) -> bool {
        self.waiting.len() < 4 * DEPTH as usize
    }

    fn entry(&self, index: usize) -> squeue::Entry {
        let part = self.parts.get(index);
        let request = &self.jobs.get(part.job).request;
        let fd = types::Fd(request.file.fd());
        let offset = request.offset + part.start as u64;
        let length = u32::try_from(part.bytes).expect("a part is at most PART_BYTES");
        // SAFETY: `start + bytes` is within the request's buffer.
        let address = unsafe { request.buffer.address().as_ptr().add(part.start) };
        match request.operation {
            Operation::Read => opcode::Read::new(fd, address, length).offset(offset).build(),
            Operation::Write => opcode::Write::new(fd, address, length).offset(offset).build(),
        }
        .user_data(index as u64)
    }

    fn take_completions(&mut self, ring: &mut IoUring, in_flight: &mut usize) {
        loop {
            let Some(entry) = ring.completion().next() else { return };
            if entry.user_data() == WAKE {
                self.wake_armed = false;
                continue;
            }
            *in_flight -= 1;
            self.complete(entry.user_data() as usize, entry.result());
        }
    }

    /// Handles the result of a part: finished, to be resumed, to be retried, or failed.
    fn complete(&mut self, index: usize, result: i32) {
        let part = self.parts.get_mut(index);
        let outcome = match result {
            0 => Err(io::Error::from(io::ErrorKind::UnexpectedEof)),
            moved if moved > 0 => {
                let moved = resumable(moved as usize, part.bytes);
                part.start += moved;
                part.bytes -= moved;
                if moved == 0 {
                    part.retries += 1
                }
                Ok(())
            }
            refused if matches!(-refused, libc::EINTR | libc::EAGAIN) => {
                part.retries += 1;
                Ok(())
            }
            failed => Err(io::Error::from_raw_os_error(-failed)),
        };
        let outcome = match outcome {
            Ok(()) if part.retries > RETRIES => Err(io::Error::from_raw_os_error(libc::EAGAIN)),
            other => other,
        };
        if outcome.is_ok() && part.bytes > 0 {
            self.waiting.push_front(index);
            return;
        }
        let part = self.parts.remove(index);
        let job = self.jobs.get_mut(part.job);
        job.parts_left -= 1;
        if let Err(error) = outcome {
            job.error.get_or_insert(error);
        }
        if job.parts_left > 0 {
            return;
        }
        let Job { request: Request { operation, file, offset, buffer, on_complete }, error, .. } =
            self.jobs.remove(part.job);
        let bytes = buffer.bytes();
        let result = match error {
            None => {
                self.counters.add(operation, bytes);
                Ok(())
            }
            Some(source) => {
                Err(IoError::Transfer { operation, path: file.path().to_owned(), offset, bytes, source })
            }
        };
        run_callback(on_complete, Completion { buffer, result });
    }
}

impl Drop for Driver {
    /// Nothing is left after an orderly end. After a panic the kernel may still be using what was submitted:
    /// that memory is given up rather than given back, while whoever waits learns of it as the callbacks die.
    fn drop(&mut self) {
        for job in self.jobs.slots.drain(..).flatten() {
            std::mem::forget(job.request.buffer);
        }
        if self.wake_armed {
            std::mem::forget(std::mem::take(&mut self.wake_word));
        }
    }
}

/// Slots with stable indices, reused.
struct Slab<T> {
    slots: Vec<Option<T>>,
    free: Vec<usize>,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Self { slots: Vec::new(), free: Vec::new() }
    }
}

impl<T> Slab<T> {
    fn insert(&mut self, value: T) -> usize {
        match self.free.pop() {
            Some(index) => {
                self.slots[index] = Some(value);
                index
            }
            None => {
                self.slots.push(Some(value));
                self.slots.len() - 1
            }
        }
    }

    fn get(&self, index: usize) -> &T {
        self.slots[index].as_ref().expect("the slot is taken")
    }

    fn get_mut(&mut self, index: usize) -> &mut T {
        self.slots[index].as_mut().expect("the slot is taken")
    }

    fn remove(&mut self, index: usize) -> T {
        let value = self.slots[index].take().expect("the slot is taken");
        self.free.push(index);
        value
    }
}
