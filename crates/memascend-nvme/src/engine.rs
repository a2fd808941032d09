//! Engines, which move bytes between leases and a volume, and the schedule that all engines share.

pub(crate) mod counters;
pub(crate) mod files;
pub(crate) mod registered;
pub(crate) mod ring;
pub(crate) mod schedule;
pub(crate) mod sim;
pub(crate) mod threads;
pub(crate) mod workload;

use std::fmt;
use std::sync::Arc;

use memascend_mem::{LeaseSlice, Pool};

use crate::engine::sim::{Faults, SimDisk, SimEngine};
use crate::{CountersSnapshot, IoError, NoteKeeper, Recorder, Result, RingEngine, ThreadsEngine, VolumeFile};

/// Which way bytes move.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Operation {
    /// From the volume into the buffer.
    Read,
    /// From the buffer to the volume.
    Write,
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Read => "read",
            Self::Write => "write",
        })
    }
}

/// Called when a request has ended, on an engine thread. The callback must be short and must never
/// wait for I/O. It may submit requests.
pub type OnComplete = Box<dyn FnOnce(Completion) + Send>;

/// Calls the callback. A panic in the callback does not end the thread, which must complete other
/// requests.
pub(crate) fn run_callback(on_complete: OnComplete, completion: Completion) {
    // The panic hook has reported the panic; the callback borrowed nothing from the engine.
    let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| on_complete(completion)));
}

/// One transfer. The request owns its buffer until it completes.
///
/// Between submission and completion the buffer of a read must not be accessed, and the buffer of a
/// write must not be modified.
pub struct Request {
    /// Read or write.
    pub operation: Operation,
    /// Byte offset in the volume's data, a multiple of its alignment.
    pub offset: u64,
    /// The buffer; its length, a multiple of the alignment and not zero, is the length of the
    /// transfer.
    pub buffer: LeaseSlice,
    /// Called exactly once.
    pub on_complete: OnComplete,
}

/// How a request ended, with its buffer.
pub struct Completion {
    /// The buffer given with the request.
    pub buffer: LeaseSlice,
    /// All bytes were transferred, or why not.
    pub result: Result<()>,
}

/// Moves bytes between leases and one volume.
pub trait Engine: Send + Sync {
    /// `ring`, `threads`, `sim` or `null`.
    fn name(&self) -> &'static str;

    /// Queues a request. Requests complete in any order; a caller that needs an order waits for
    /// completions.
    fn submit(&self, request: Request);

    /// Waits until the writes that have completed are on the medium.
    fn flush(&self) -> Result<()>;

    /// Counters so far.
    fn counters(&self) -> CountersSnapshot;

    /// Recorder of requests and flushes, where they take real time.
    fn recorder(&self) -> Option<&Recorder> {
        None
    }

    /// Optional features of the system that are in use, and those requested that were refused, with
    /// the reason.
    fn features(&self) -> Vec<String> {
        Vec::new()
    }

    /// Registers an arena whose buffers will be transferred often. The engine keeps the arena
    /// alive, but no memory that the arena gives back. Waits for the engine's thread, so a completion must not call this.
    fn register(&self, _pool: &Pool) {}

    /// Whether bytes reach the volume's own file, which must then have room for them.
    fn needs_room(&self) -> bool {
        true
    }

    /// Capacity in bytes of a simulated medium, if it is limited.
    fn room_bytes(&self) -> Option<u64> {
        None
    }

    /// Whether the engine moves bytes, so that a read returns the written ones.
    fn moves_bytes(&self) -> bool {
        true
    }

    /// Where notes are kept instead of the volume: a simulated medium has its own place for them.
    fn notes(&self) -> Option<Arc<dyn NoteKeeper>> {
        None
    }
}

/// Which engine to open.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum EngineChoice {
    /// io_uring where the system allows it, else threads.
    #[default]
    Auto,
    /// io_uring or an error.
    Ring,
    /// pread and pwrite on a few threads.
    Threads,
    /// Nothing is moved, for replaying schedules: see [`testing`](crate::testing).
    Null,
    /// A disk in memory with faults: see [`testing`](crate::testing).
    Sim(Faults),
}

/// How to open an engine.
#[derive(Debug, Clone, Copy)]
pub struct EngineOptions {
    /// The engine.
    pub choice: EngineChoice,
    /// The most transfers in flight at once.
    pub depth: usize,
    /// Poll the device for completions instead of taking interrupts. Slightly faster on NVMe drives
    /// with poll queues, at the cost of a busy thread. Only for `ring`.
    pub io_poll: bool,
    /// Have a kernel thread poll for submissions: submitting needs no system call, at the cost of
    /// that thread. Only for `ring`.
    pub sq_poll: bool,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self { choice: EngineChoice::Auto, depth: 128, io_poll: false, sq_poll: false }
    }
}

/// An engine, and why it is not the preferred one.
pub struct OpenedEngine {
    /// The engine.
    pub engine: Arc<dyn Engine>,
    /// Notice for the user.
    pub notice: Option<String>,
}

/// Opens an engine for a volume.
pub fn open_engine(file: &Arc<VolumeFile>, options: EngineOptions) -> Result<OpenedEngine> {
    let mut notice = None;
    let threads = || ThreadsEngine::new(file, ThreadsEngine::DEFAULT_THREADS).map(Arc::new);
    let engine: Arc<dyn Engine> = match options.choice {
        EngineChoice::Threads => threads()?,
        EngineChoice::Null => Arc::new(ThreadsEngine::null(file)?),
        EngineChoice::Sim(faults) => Arc::new(SimEngine::running(file, SimDisk::new(faults))),
        EngineChoice::Ring => Arc::new(RingEngine::new(file, options)?),
        EngineChoice::Auto => match RingEngine::new(file, options) {
            Ok(engine) => Arc::new(engine),
            Err(error @ IoError::RingUnavailable { .. }) => {
                notice =
                    Some(format!("{error}; using {} I/O threads instead", ThreadsEngine::DEFAULT_THREADS));
                threads()?
            }
            Err(error) => return Err(error),
        },
    };
    Ok(OpenedEngine { engine, notice })
}
