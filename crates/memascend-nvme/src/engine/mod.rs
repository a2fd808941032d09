//! Engines: what moves bytes between leases and a volume, and the one order of transfers that all of them follow.

pub(crate) mod counters;
pub(crate) mod ring;
pub(crate) mod schedule;
pub(crate) mod sim;
pub(crate) mod threads;
pub(crate) mod workload;

use std::fmt;
use std::sync::Arc;

use memascend_mem::{LeaseSlice, Pool};

use crate::engine::sim::{Faults, SimDisk, SimEngine};
use crate::{CountersSnapshot, IoError, NoteKeeper, Result, RingEngine, ThreadsEngine, VolumeFile};

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

/// What an engine calls when a request has ended. It runs on an engine thread: it must be short and must
/// never wait for I/O (submitting more is fine).
pub type OnComplete = Box<dyn FnOnce(Completion) + Send>;

/// Calls back. A panic ends with the callback: the thread still owes the other requests their ends.
pub(crate) fn run_callback(on_complete: OnComplete, completion: Completion) {
    // The panic hook has reported it; nothing of the engine's was borrowed.
    let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| on_complete(completion)));
}

/// One transfer. It owns its buffer until it completes.
///
/// Between submission and completion of a read nobody may touch the buffer; of a write nobody may modify it.
pub struct Request {
    /// Read or write.
    pub operation: Operation,
    /// Byte offset in the volume's data, a multiple of its alignment.
    pub offset: u64,
    /// The buffer; its length, a multiple of the alignment and not zero, is the length of the transfer.
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

    /// Queues a request. Requests may complete in any order; whoever needs an order waits for completions.
    fn submit(&self, request: Request);

    /// Waits until the writes that have completed are on the medium.
    fn flush(&self) -> Result<()>;

    /// Counters so far.
    fn counters(&self) -> CountersSnapshot;

    /// Which optional features of the system are in use, and of those asked for, which were refused and why.
    fn features(&self) -> Vec<String> {
        Vec::new()
    }

    /// Makes an arena known whose buffers will be transferred often; it lives until the engine is gone. Waits for the
    /// engine's thread: not to be called by a completion.
    fn register(&self, _pool: &Pool) {}

    /// Whether bytes reach the volume's own file, so that room in it has to be found.
    fn needs_room(&self) -> bool {
        true
    }

    /// How many bytes there is room for on a medium of the engine's own, where that is limited.
    fn room_bytes(&self) -> Option<u64> {
        None
    }

    /// Whether bytes are moved at all, so that what was written is what is read.
    fn moves_bytes(&self) -> bool {
        true
    }

    /// Where notes go that do not go to the volume: a simulated medium has its own place for them.
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
    /// Which.
    pub choice: EngineChoice,
    /// The most transfers in flight at once.
    pub depth: usize,
    /// Poll the device for completions instead of taking interrupts: a little faster on NVMe drives with poll queues,
    /// at the price of a busy thread. Only `ring`.
    pub io_poll: bool,
    /// Have a kernel thread look for submissions: no system call to submit, at the price of that thread. Only `ring`.
    pub sq_poll: bool,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self { choice: EngineChoice::Auto, depth: 128, io_poll: false, sq_poll: false }
    }
}

/// An engine, and why it is not the one that was wanted most.
pub struct OpenedEngine {
    /// The engine.
    pub engine: Arc<dyn Engine>,
    /// What the user should know.
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
