//! Errors of the executor.

use std::sync::Arc;

use memascend_mem::MemError;
use memascend_store::StoreError;

/// Errors of the step executor. Cheap to clone: one failed transfer may fail several waiters.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum ExecError {
    /// A transfer failed.
    #[error("{0}")]
    Store(Arc<StoreError>),
    /// A buffer could not be allocated.
    #[error("{0}")]
    Memory(Arc<MemError>),
    /// The CUDA device, or a copy to or from it, failed.
    #[error("{0}")]
    Device(Arc<MemError>),
    /// No staging buffer came free in time: the drive or the device hangs.
    #[error(
        "no staging buffer came free within {seconds} seconds: the store's drive, or the CUDA device, does not answer"
    )]
    Stalled {
        /// How long the thread waited.
        seconds: u64,
    },
    /// The system starts no thread.
    #[error("cannot start a thread: {0} (raise `ulimit -u` or the pids limit of the container)")]
    NoThread(Arc<std::io::Error>),
    /// An operation was dropped without a result.
    #[error("an operation ended without a result: a thread of the executor or of the I/O engine failed")]
    Abandoned,
    /// A call that the gradient or the tensor does not allow.
    #[error("{0}")]
    Misused(String),
    /// The executor was closed while the job waited.
    #[error("the store was closed")]
    Closed,
}

impl From<StoreError> for ExecError {
    fn from(error: StoreError) -> Self {
        Self::Store(Arc::new(error))
    }
}

impl ExecError {
    /// The error of a thread that the system does not start.
    pub(crate) fn no_thread(error: std::io::Error) -> Self {
        Self::NoThread(Arc::new(error))
    }
}

impl From<MemError> for ExecError {
    fn from(error: MemError) -> Self {
        Self::Memory(Arc::new(error))
    }
}

/// Result of an executor operation.
pub type Result<T> = std::result::Result<T, ExecError>;
