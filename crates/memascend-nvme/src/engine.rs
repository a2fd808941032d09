use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use memascend_mem::LeaseSlice;

use crate::{IoError, Result, RingEngine, ThreadsEngine, VolumeFile};

/// Which way bytes move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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
    /// Where.
    pub file: Arc<VolumeFile>,
    /// Byte offset, a multiple of [`BLOCK_BYTES`](crate::BLOCK_BYTES).
    pub offset: u64,
    /// The buffer; its length, a multiple of the block and not zero, is the length of the transfer.
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

/// Moves bytes between leases and volumes.
pub trait Engine: Send + Sync {
    /// `ring`, `threads`, `sim` or `null`.
    fn name(&self) -> &'static str;

    /// Queues a request. Requests may complete in any order; whoever needs an order waits for completions.
    fn submit(&self, request: Request);

    /// Counters so far.
    fn counters(&self) -> CountersSnapshot;

    /// Whether bytes reach the volumes, so that room on them has to be found.
    fn needs_room(&self) -> bool {
        true
    }
}

/// Counts of completed transfers, shared by an engine and its threads.
#[derive(Debug, Default)]
pub struct Counters {
    bytes_read: AtomicU64,
    bytes_written: AtomicU64,
    requests: AtomicU64,
}

impl Counters {
    /// Adds one completed transfer.
    pub fn add(&self, operation: Operation, bytes: usize) {
        let counter = match operation {
            Operation::Read => &self.bytes_read,
            Operation::Write => &self.bytes_written,
        };
        counter.fetch_add(bytes as u64, Ordering::Relaxed);
        self.requests.fetch_add(1, Ordering::Relaxed);
    }

    /// The values now.
    pub fn snapshot(&self) -> CountersSnapshot {
        CountersSnapshot {
            bytes_read: self.bytes_read.load(Ordering::Relaxed),
            bytes_written: self.bytes_written.load(Ordering::Relaxed),
            requests: self.requests.load(Ordering::Relaxed),
        }
    }
}

/// Values of [`Counters`] at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CountersSnapshot {
    /// Bytes read by completed requests.
    pub bytes_read: u64,
    /// Bytes written by completed requests.
    pub bytes_written: u64,
    /// Completed requests.
    pub requests: u64,
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
    /// Nothing is moved: for replaying schedules, never for training.
    Null,
}

/// Opens an engine; the second value says why io_uring was not used when it was wanted and refused.
pub fn open_engine(choice: EngineChoice) -> Result<(Arc<dyn Engine>, Option<String>)> {
    match choice {
        EngineChoice::Threads => Ok((Arc::new(ThreadsEngine::new(ThreadsEngine::DEFAULT_THREADS)), None)),
        EngineChoice::Null => Ok((Arc::new(ThreadsEngine::null()), None)),
        EngineChoice::Ring => Ok((Arc::new(RingEngine::new()?), None)),
        EngineChoice::Auto => match RingEngine::new() {
            Ok(engine) => Ok((Arc::new(engine), None)),
            Err(error @ IoError::RingUnavailable { .. }) => {
                let notice = format!("{error}; using {} I/O threads instead", ThreadsEngine::DEFAULT_THREADS);
                Ok((Arc::new(ThreadsEngine::new(ThreadsEngine::DEFAULT_THREADS)), Some(notice)))
            }
            Err(error) => Err(error),
        },
    }
}
