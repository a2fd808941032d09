//! Buffers that export the buffer protocol.

use std::ffi::c_int;
use std::ptr::NonNull;
use std::sync::Arc;

use memascend_guarded::guarded;
use memascend_mem::{HostBlock, Lease};
use pyo3::ffi;
use pyo3::prelude::*;

use crate::errors::memory_error;

/// A pool buffer that exports the buffer protocol (writable bytes, page aligned). The buffer
/// returns to the pool, or is freed if it is outside of one, when the last object that refers to it dies: `torch.frombuffer` keeps it
/// alive in its storage.
#[pyclass(frozen, module = "memascend._memascend")]
pub(crate) struct LeaseBuffer {
    pub(crate) lease: Arc<Lease>,
}

#[guarded]
#[pymethods]
impl LeaseBuffer {
    /// Address of the first byte.
    #[getter]
    fn address(&self) -> usize {
        self.lease.address().as_ptr() as usize
    }

    /// Bytes of the buffer: its size class.
    fn __len__(&self) -> usize {
        self.lease.capacity()
    }

    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let lease = &slf.get().lease;
        // SAFETY: the memory lives as long as the lease, which lives as long as the exporting
        // object.
        unsafe { export(slf.as_any(), lease.address(), lease.capacity(), view, flags) }
    }
}

/// Host memory outside the arena that exports the buffer protocol (writable bytes, page aligned).
/// It is freed when the last object that refers to it dies.
#[pyclass(frozen, weakref, module = "memascend._memascend")]
pub(crate) struct HostBuffer {
    block: HostBlock,
    bytes: usize,
}

#[guarded]
#[pymethods]
impl HostBuffer {
    /// `bytes` bytes of zeros from the allocator of that name.
    #[new]
    fn new(py: Python<'_>, bytes: usize, allocator: &str, huge_pages: bool) -> PyResult<Self> {
        let block = py.detach(|| memascend_mem::allocator(allocator, huge_pages)?.allocate(bytes));
        let block = block.map_err(|error| memory_error(&error))?;
        // The owner may be a data set that forked workers read.
        block.show_to_forks();
        Ok(Self { block, bytes })
    }

    fn __len__(&self) -> usize {
        self.bytes
    }

    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let buffer = slf.get();
        // SAFETY: the block lives as long as the exporting object and is at least `bytes` long.
        unsafe { export(slf.as_any(), buffer.block.address(), buffer.bytes, view, flags) }
    }
}

/// Fills in a writable view of `bytes` bytes at `address`.
///
/// # Safety
/// `view` comes from the interpreter; the memory lives as long as `owner`, to which the view holds
/// a reference.
unsafe fn export(
    owner: &Bound<'_, PyAny>,
    address: NonNull<u8>,
    bytes: usize,
    view: *mut ffi::Py_buffer,
    flags: c_int,
) -> PyResult<()> {
    let bytes = isize::try_from(bytes).expect("a buffer is smaller than isize::MAX");
    // SAFETY: forwarded to the caller.
    let rc =
        unsafe { ffi::PyBuffer_FillInfo(view, owner.as_ptr(), address.as_ptr().cast(), bytes, 0, flags) };
    if rc == 0 { Ok(()) } else { Err(PyErr::fetch(owner.py())) }
}
