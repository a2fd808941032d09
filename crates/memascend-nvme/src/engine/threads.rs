//! The engine over preadv2 and pwritev2 on a few threads, and the engine that moves nothing.

use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use memascend_mem::{LockExt, Origin, WaitExt};

use crate::engine::schedule::{Schedule, Transfer};
use crate::{
    Activity, Counters, CountersSnapshot, Engine, IoError, Operation, Recorder, Request, Result, VolumeFile,
};

/// preadv2 and pwritev2 on a few threads, for systems that refuse io_uring.
pub struct ThreadsEngine {
    threads: Threads,
    file: Arc<VolumeFile>,
}

/// Threads that carry out requests on any files.
pub(super) struct Threads {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    origin: Origin,
}

struct Shared {
    kind: &'static Kind,
    counters: Counters,
    state: Mutex<State>,
    work: Condvar,
}

struct State {
    schedule: Schedule,
    open: bool,
}

/// How the threads carry out a part, and whether the volume must have room for the bytes.
struct Kind {
    name: &'static str,
    needs_room: bool,
    carry_out: fn(&Transfer) -> io::Result<usize>,
}

static MOVING: Kind = Kind { name: "threads", needs_room: true, carry_out: move_bytes };
static NULL: Kind = Kind { name: "null", needs_room: false, carry_out: |transfer| Ok(transfer.bytes) };

impl ThreadsEngine {
    /// The default number of threads: enough to keep the queue of a SATA or NVMe drive from
    /// emptying.
    pub const DEFAULT_THREADS: usize = 8;

    /// Starts `threads` I/O threads (at least one).
    ///
    /// # Errors
    /// If the system starts no thread.
    pub fn new(file: &Arc<VolumeFile>, threads: usize) -> Result<Self> {
        Ok(Self { threads: Threads::new(threads)?, file: Arc::clone(file) })
    }

    /// An engine that completes every request at once, on a thread of its own, and moves nothing.
    /// It replays the schedule of a model that neither the volumes nor the host memory could hold.
    /// A read leaves the buffer as it was, so results computed from the buffer are meaningless.
    ///
    /// # Errors
    /// If the system starts no thread.
    pub fn null(file: &Arc<VolumeFile>) -> Result<Self> {
        Ok(Self { threads: Threads::of(&NULL, 1)?, file: Arc::clone(file) })
    }
}

impl Threads {
    pub(super) fn new(threads: usize) -> Result<Self> {
        Self::of(&MOVING, threads)
    }

    fn of(kind: &'static Kind, threads: usize) -> Result<Self> {
        let shared = Arc::new(Shared {
            kind,
            counters: Counters::default(),
            state: Mutex::new(State { schedule: Schedule::new(None), open: true }),
            work: Condvar::new(),
        });
        let mut started = Vec::new();
        for index in 0..threads.max(1) {
            let serving = Arc::clone(&shared);
            let thread = std::thread::Builder::new()
                .name(format!("memascend-io-{index}"))
                .spawn(move || serving.serve());
            match thread {
                Ok(thread) => started.push(thread),
                // One thread is enough to go on.
                Err(source) if started.is_empty() => return Err(IoError::NoThread { source }),
                Err(_) => break,
            }
        }
        Ok(Self { shared, threads: started, origin: Origin::here() })
    }

    pub(super) fn submit(&self, file: &Arc<VolumeFile>, request: Request) {
        let shared = &self.shared;
        let now = Instant::now();
        shared.counters.started(now);
        let large = request.buffer.bytes() > file.geometry().part_bytes;
        let refused = shared.lock().schedule.accept(file, request, now);
        match refused {
            Some(ended) => ended.tell(&shared.counters),
            None if large => shared.work.notify_all(),
            None => shared.work.notify_one(),
        }
    }

    pub(super) fn counters(&self) -> &Counters {
        &self.shared.counters
    }

    pub(super) fn features(&self) -> Vec<String> {
        vec![format!("{} threads", self.threads.len())]
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.locked()
    }

    fn serve(&self) {
        let mut state = self.lock();
        loop {
            let Some(part) = state.schedule.next() else {
                if !state.open && state.schedule.is_empty() {
                    self.work.notify_all();
                    return;
                }
                state = self.work.wait_locked(state);
                continue;
            };
            let transfer = state.schedule.transfer(part);
            drop(state);
            if transfer.retries > 0 {
                std::thread::sleep(Duration::from_micros(50) * transfer.retries.min(100));
            }
            let result = (self.kind.carry_out)(&transfer);
            let mut locked = self.lock();
            let ended = locked.schedule.complete(part, result);
            if let Some(ended) = ended {
                drop(locked);
                ended.tell(&self.counters);
                locked = self.lock();
            }
            state = locked;
        }
    }
}

fn move_bytes(transfer: &Transfer) -> io::Result<usize> {
    let file = &transfer.file;
    if transfer.operation == Operation::Write {
        file.check_writable()?;
    }
    let offset = i64::try_from(file.position(transfer.offset)).expect("offsets fit in i64");
    let vector = libc::iovec { iov_base: transfer.address.cast(), iov_len: transfer.bytes };
    // SAFETY: the range lies inside the request's buffer, which the request owns until the part is
    // complete.
    let moved = unsafe {
        match transfer.operation {
            Operation::Read => libc::preadv2(file.fd(), &raw const vector, 1, offset, 0),
            Operation::Write => libc::pwritev2(file.fd(), &raw const vector, 1, offset, 0),
        }
    };
    usize::try_from(moved).map_err(|_| io::Error::last_os_error())
}

impl Engine for ThreadsEngine {
    fn name(&self) -> &'static str {
        self.threads.shared.kind.name
    }

    fn submit(&self, request: Request) {
        self.threads.submit(&self.file, request);
    }

    fn flush(&self) -> Result<()> {
        if !self.needs_room() {
            return Ok(());
        }
        self.threads.counters().recorder.timed(Activity::Flush, || self.file.sync())
    }

    fn counters(&self) -> CountersSnapshot {
        self.threads.counters().snapshot()
    }

    fn recorder(&self) -> Option<&Recorder> {
        Some(&self.threads.counters().recorder)
    }

    fn features(&self) -> Vec<String> {
        self.threads.features()
    }

    fn needs_room(&self) -> bool {
        self.threads.shared.kind.needs_room
    }

    fn moves_bytes(&self) -> bool {
        self.threads.shared.kind.needs_room
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        // A forked child does not have the threads, so it cannot wake or join them.
        if !self.origin.is_here() {
            return;
        }
        self.shared.lock().open = false;
        self.shared.work.notify_all();
        for thread in self.threads.drain(..) {
            // The engine may be dropped by a completion running on one of its own threads.
            if thread.thread().id() != std::thread::current().id() {
                let _ = thread.join();
            }
        }
    }
}
