//! Errors of CUDA: of loading its runtime library, and of its calls.

use crate::Size;

/// Why CUDA cannot be used, or which of its calls failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// There is no CUDA runtime library that the dynamic loader can load.
    #[error(
        "no CUDA runtime library was found ({tried}); install PyTorch with CUDA or the CUDA toolkit, set \
         MEMASCEND_CUDART to the path of libcudart.so, or use device=\"cpu\" and allocator=\"locked\""
    )]
    LibraryNotFound {
        /// Every library tried, with the loader's reason.
        tried: String,
    },
    /// The library is not a CUDA runtime, or not one of a supported version.
    #[error(
        "{library} has no function {symbol}: it is not the CUDA runtime 12 or 13; set MEMASCEND_CUDART to the \
         path of one, or use device=\"cpu\" and allocator=\"locked\""
    )]
    MissingFunction {
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
    UnsupportedVersion {
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
    NoDevice {
        /// Path of the library.
        library: String,
    },
    /// The driver is absent or too old for the CUDA runtime.
    #[error(
        "the CUDA driver does not fit the CUDA runtime {runtime} ({library}): {driver}; update the driver, install \
         a CUDA runtime that fits it, or use device=\"cpu\" and allocator=\"locked\""
    )]
    Driver {
        /// Path of the library.
        library: String,
        /// Version of the runtime.
        runtime: String,
        /// The newest CUDA version that the driver supports, or why that is unknown.
        driver: String,
    },
    /// CUDA cannot page-lock that much memory.
    #[error(
        "{call} of {}: the system does not have that much memory to lock into RAM; lower host_memory, or use \
         allocator=\"locked\" or allocator=\"pageable\"",
        Size::from(*bytes)
    )]
    OutOfMemory {
        /// The CUDA function.
        call: &'static str,
        /// Bytes asked for.
        bytes: usize,
    },
    /// The memory is already registered with CUDA.
    #[error(
        "cudaHostRegister of {bytes} bytes: the memory is registered already, by another library or by one that \
         unmapped it without unregistering; use allocator=\"cuda\""
    )]
    AlreadyRegistered {
        /// Bytes of the range.
        bytes: usize,
    },
    /// The system does not support the call.
    #[error(
        "{call} of {bytes} bytes is not supported on this system; use allocator=\"{}\"",
        alternative(call)
    )]
    NotSupported {
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
    InvalidValue {
        /// The CUDA function.
        call: &'static str,
    },
    /// The device failed after a copy was enqueued, so that the end of the copy cannot be observed.
    #[error("the CUDA device failed while it copied to or from the buffer, which is lost: end this process")]
    CopyLost,
    /// No thread could be started for a device that is not the calling thread's.
    #[error(
        "no thread can be started to use CUDA device {device}: {source}; raise the limit on threads (`ulimit -u`), or \
         make it the current device (torch.cuda.set_device({device}))"
    )]
    NoThread {
        /// Number of the device.
        device: i32,
        /// The system's error.
        source: std::io::Error,
    },
    /// Any other error of CUDA.
    #[error("{call} failed with {name} ({code}): {message}")]
    Call {
        /// The CUDA function.
        call: &'static str,
        /// The `cudaError_t`.
        code: i32,
        /// Its name.
        name: String,
        /// CUDA's description of the error.
        message: String,
    },
}

fn alternative(call: &str) -> &'static str {
    if call == "cudaHostRegister" { "cuda" } else { "locked" }
}
