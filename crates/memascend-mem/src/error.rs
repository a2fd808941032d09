//! Errors of host memory.

use std::io;

use crate::{CudaError, Size};

/// Errors of host memory.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MemError {
    /// The operating system refused the memory.
    #[error("cannot reserve {} of host memory: {source}", Size::from(*bytes))]
    Reserve {
        /// Bytes asked for.
        bytes: usize,
        /// The system's error.
        source: io::Error,
    },
    /// The memory could not be locked into RAM.
    #[error(
        "cannot lock {} of host memory (limit {}): {source}; \
         raise the limit with `ulimit -l unlimited` or a memlock line in /etc/security/limits.conf",
        Size::from(*bytes),
        Size(*limit_bytes)
    )]
    Lock {
        /// Bytes asked for.
        bytes: usize,
        /// The soft RLIMIT_MEMLOCK of this process.
        limit_bytes: u64,
        /// The system's error.
        source: io::Error,
    },
    /// No size class of the pool is large enough.
    #[error("no pool buffer holds {bytes} bytes: the largest size class has {largest_bytes} bytes")]
    TooLarge {
        /// Bytes asked for.
        bytes: usize,
        /// The largest class.
        largest_bytes: usize,
    },
    /// Memory of this kind cannot grow and shrink.
    #[error(
        "{allocator} memory cannot grow or shrink: choose allocator=\"registered\" or \"locked\", \
         or leave its size as it is"
    )]
    FixedMemory {
        /// Name of the allocator.
        allocator: &'static str,
    },
    /// A pool cannot have so many buffers of a size.
    #[error("no pool can have {count} buffers of {bytes} bytes: at most {count_max}, as was reserved")]
    NotReserved {
        /// Bytes of a buffer.
        bytes: usize,
        /// Buffers asked for.
        count: usize,
        /// The most there can be; as many as there are, if that is fixed.
        count_max: usize,
    },
    /// The operating system did not take memory back.
    #[error("cannot give {} of host memory back: {source}", Size::from(*bytes))]
    GiveBack {
        /// Bytes that were to go.
        bytes: usize,
        /// The system's error.
        source: io::Error,
    },
    /// A call of CUDA failed, or its runtime library cannot be used.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// There is no such allocator.
    #[error("unknown allocator {name:?}: auto, cuda, registered, locked or pageable")]
    UnknownAllocator {
        /// The name given.
        name: String,
    },
}

impl MemError {
    /// Whether the system refused to lock memory into RAM. A smaller or unlocked reservation may
    /// succeed.
    pub fn is_pinning_refused(&self) -> bool {
        matches!(
            self,
            Self::Lock { .. } | Self::Cuda(CudaError::OutOfMemory { .. } | CudaError::NotSupported { .. })
        )
    }
}

/// Result of a host memory operation.
pub type Result<T> = std::result::Result<T, MemError>;
