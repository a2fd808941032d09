use std::io;

/// Errors of host memory.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MemError {
    /// The operating system refused the memory.
    #[error("cannot reserve {bytes} bytes of host memory: {source}")]
    Reserve {
        /// Bytes asked for.
        bytes: usize,
        /// What the operating system said.
        source: io::Error,
    },
    /// The memory could not be locked into RAM.
    #[error(
        "cannot lock {bytes} bytes of host memory (limit {limit_bytes} bytes): {source}; \
         raise the limit with `ulimit -l unlimited` or a memlock line in /etc/security/limits.conf"
    )]
    Lock {
        /// Bytes asked for.
        bytes: usize,
        /// The soft RLIMIT_MEMLOCK of this process.
        limit_bytes: u64,
        /// What the operating system said.
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
    /// There is no CUDA runtime library that the dynamic loader can load.
    #[error(
        "no CUDA runtime library was found ({tried}); install PyTorch with CUDA or the CUDA toolkit, set \
         MEMASCEND_CUDART to the path of libcudart.so, or use device=\"cpu\" and allocator=\"locked\""
    )]
    CudartNotFound {
        /// Every library tried, with the loader's reason.
        tried: String,
    },
    /// The library is no CUDA runtime, or not one of a supported version.
    #[error(
        "{library} has no function {symbol}: it is not the CUDA runtime 12 or 13; set MEMASCEND_CUDART to the \
         path of one, or use device=\"cpu\" and allocator=\"locked\""
    )]
    CudartSymbol {
        /// Path of the library.
        library: String,
        /// The function that is missing.
        symbol: String,
    },
    /// The CUDA runtime's version is not supported.
    #[error(
        "{library} is the CUDA runtime {major}.{minor}, and memascend needs 12 or 13; set MEMASCEND_CUDART to the \
         path of one, or use device=\"cpu\" and allocator=\"locked\""
    )]
    CudartVersion {
        /// Path of the library.
        library: String,
        /// Major version.
        major: u32,
        /// Minor version.
        minor: u32,
    },
    /// The machine has no CUDA device, or this process may not see it.
    #[error(
        "no CUDA device is visible to {library}; check `nvidia-smi` and the variable CUDA_VISIBLE_DEVICES, or use \
         device=\"cpu\" and allocator=\"locked\""
    )]
    NoCudaDevice {
        /// Path of the library.
        library: String,
    },
    /// The driver is absent or too old for the CUDA runtime.
    #[error(
        "the CUDA driver does not fit the CUDA runtime {runtime} ({library}): {driver}; update the driver, install \
         a CUDA runtime that fits it, or use device=\"cpu\" and allocator=\"locked\""
    )]
    CudaDriver {
        /// Path of the library.
        library: String,
        /// Version of the runtime.
        runtime: String,
        /// What is known of the driver.
        driver: String,
    },
    /// CUDA has not the page-locked memory.
    #[error(
        "{call} of {bytes} bytes: the system has not that much memory to lock into RAM; lower host_memory, or use \
         allocator=\"locked\" or allocator=\"pageable\""
    )]
    CudaOutOfMemory {
        /// The CUDA function.
        call: &'static str,
        /// Bytes asked for.
        bytes: usize,
    },
    /// CUDA knows the memory already.
    #[error(
        "cudaHostRegister of {bytes} bytes: the memory is registered already, by another library or by one that \
         unmapped it without unregistering; use allocator=\"cuda\""
    )]
    CudaAlreadyRegistered {
        /// Bytes of the range.
        bytes: usize,
    },
    /// The system cannot do what was asked of CUDA.
    #[error(
        "{call} of {bytes} bytes is not supported on this system; use allocator=\"{}\"",
        alternative(call)
    )]
    CudaNotSupported {
        /// The CUDA function.
        call: &'static str,
        /// Bytes asked for.
        bytes: usize,
    },
    /// CUDA refused an argument.
    #[error(
        "{call} refused its arguments, which is a defect: please report it, and use device=\"cpu\" and \
         allocator=\"locked\""
    )]
    CudaInvalidValue {
        /// The CUDA function.
        call: &'static str,
    },
    /// CUDA gave memory that direct I/O cannot use.
    #[error(
        "cudaHostAlloc of {bytes} bytes gave an address that no page begins at ({address:#x}); use \
         allocator=\"registered\" or allocator=\"locked\""
    )]
    CudaUnaligned {
        /// Bytes asked for.
        bytes: usize,
        /// The address given.
        address: usize,
    },
    /// The device failed after it was told to copy, so that nobody knows when it has.
    #[error("the CUDA device failed while it copied to or from the buffer, which is lost: end this process")]
    CopyLost,
    /// Any other error of CUDA.
    #[error("{call} failed with {name} ({code}): {message}")]
    Cuda {
        /// The CUDA function.
        call: &'static str,
        /// The `cudaError_t`.
        code: i32,
        /// Its name.
        name: String,
        /// What CUDA says of it.
        message: String,
    },
    /// There is no such allocator.
    #[error("unknown allocator {name:?}: auto, cuda, registered, locked or pageable")]
    UnknownAllocator {
        /// The name given.
        name: String,
    },
}

impl MemError {
    /// Whether the system refused to lock memory into RAM, of which there may be enough: less of it, or unlocked memory,
    /// may be had.
    pub fn is_pinning_refused(&self) -> bool {
        matches!(self, Self::Lock { .. } | Self::CudaOutOfMemory { .. } | Self::CudaNotSupported { .. })
    }
}

fn alternative(call: &str) -> &'static str {
    if call == "cudaHostRegister" { "cuda" } else { "locked" }
}

/// Result of a host memory operation.
pub type Result<T> = std::result::Result<T, MemError>;
