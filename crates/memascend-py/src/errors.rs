//! Errors of the crates as Python exceptions.

use std::path::Path;

use memascend_exec::ExecError;
use memascend_mem::{CudaError, MemError};
use memascend_nvme::IoError;
use memascend_store::StoreError;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::panics;

/// Raises `memascend.errors.StoreError` with errno, path and transfer, as far as the error has
/// them.
pub(crate) fn store_error(error: &StoreError) -> PyErr {
    raise_store(error.errno(), error.to_string(), error.path(), error.io())
}

/// As [`store_error`], for a volume without a store.
pub(crate) fn io_error(error: &IoError) -> PyErr {
    raise_store(error.errno(), error.to_string(), error.path(), Some(error))
}

fn raise_store(errno: Option<i32>, message: String, path: Option<&Path>, error: Option<&IoError>) -> PyErr {
    let path = path.map(Path::to_path_buf);
    let (operation, offset, bytes) = match error {
        Some(IoError::Transfer { operation, offset, bytes, .. }) => {
            (Some(operation.to_string()), Some(*offset), Some(*bytes))
        }
        _ => (None, None, None),
    };
    let hint = error.map(IoError::hint).unwrap_or_default();
    raise("StoreError", (errno, message, path, operation, offset, bytes, hint))
}

/// Raises `memascend.errors.HostMemoryError(message)`, its subclass PinnedMemoryError if the memory
/// may not be locked, or ValueError for an unknown allocator and for buffers that were not reserved.
pub(crate) fn memory_error(error: &MemError) -> PyErr {
    match error {
        MemError::UnknownAllocator { .. } | MemError::NotReserved { .. } => {
            PyValueError::new_err(error.to_string())
        }
        // From a fence: the device that copies from a buffer, or to it, has failed.
        MemError::Cuda(
            CudaError::CopyLost
            | CudaError::Call { call: "cudaEventQuery" | "cudaEventSynchronize" | "cudaEventRecord", .. },
        ) => device_error(error),
        _ if error.is_pinning_refused() => raise("PinnedMemoryError", (error.to_string(),)),
        _ => raise("HostMemoryError", (error.to_string(),)),
    }
}

/// Raises `memascend.errors.DeviceError(message)`.
pub(crate) fn device_error(error: &MemError) -> PyErr {
    raise("DeviceError", (error.to_string(),))
}

/// Runs `work` without the GIL, and raises the Python exception of its error.
pub(crate) fn executed<T: Send>(
    py: Python<'_>,
    work: impl FnOnce() -> memascend_exec::Result<T> + Send,
) -> PyResult<T> {
    py.detach(work).map_err(|error| exec_error(&error))
}

/// As [`executed`], for work on the store.
pub(crate) fn stored<T: Send>(
    py: Python<'_>,
    work: impl FnOnce() -> memascend_store::Result<T> + Send,
) -> PyResult<T> {
    py.detach(work).map_err(|error| store_error(&error))
}

/// Raises `memascend.errors.MemascendError` for a handle that a forked child has of its parent's.
pub(crate) fn forked_error() -> PyErr {
    let forked = Python::attach(|py| py.import("memascend.errors")?.getattr("FORKED")?.extract::<String>());
    match forked {
        Ok(message) => raise("MemascendError", (message,)),
        Err(error) => error,
    }
}

/// Raises `memascend.errors.DefectError` for a panic with the message `what`.
pub(crate) fn defect_error(what: &str) -> PyErr {
    raise("DefectError", (what,))
}

/// Raises the Python exception of an executor error.
pub(crate) fn exec_error(error: &ExecError) -> PyErr {
    match error {
        // A thread that panicked has dropped its task.
        ExecError::Abandoned | ExecError::Closed => match panics::last() {
            Some(panic) => defect_error(&panic),
            None => raise("MemascendError", (error.to_string(),)),
        },
        ExecError::Store(source) => store_error(source),
        ExecError::Memory(source) => memory_error(source),
        ExecError::Device(source) => device_error(source),
        ExecError::Misused(message) => PyValueError::new_err(message.clone()),
        other => raise("MemascendError", (other.to_string(),)),
    }
}

fn raise<A>(class: &str, arguments: A) -> PyErr
where
    A: for<'py> pyo3::call::PyCallArgs<'py>,
{
    Python::attach(|py| {
        let built = py
            .import("memascend.errors")
            .and_then(|module| module.getattr(class))
            .and_then(|class| class.call1(arguments));
        match built {
            Ok(value) => PyErr::from_value(value),
            Err(error) => error,
        }
    })
}
