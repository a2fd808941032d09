use std::ffi::c_int;
use std::sync::Arc;

use memascend_mem::Lease;
use pyo3::ffi;
use pyo3::prelude::*;

/// A pool buffer that exports the buffer protocol (writable bytes, page aligned). The buffer returns to the
/// pool when the last object that refers to it dies: `torch.frombuffer` keeps it alive in its storage.
#[pyclass(frozen, module = "memascend._memascend")]
pub(crate) struct LeaseBuffer {
    pub(crate) lease: Arc<Lease>,
}

#[pymethods]
impl LeaseBuffer {
    /// Bytes of the buffer: its size class.
    #[getter]
    fn capacity(&self) -> usize {
        self.lease.capacity()
    }

    /// Address of the first byte.
    #[getter]
    fn address(&self) -> usize {
        self.lease.address().as_ptr() as usize
    }

    fn __len__(&self) -> usize {
        self.lease.capacity()
    }

    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let lease = &slf.get().lease;
        let bytes = isize::try_from(lease.capacity()).expect("a buffer is smaller than isize::MAX");
        // SAFETY: `view` comes from the interpreter; the memory lives as long as the lease, which lives as long
        // as the exporting object, to which FillInfo takes a reference.
        let rc = unsafe {
            ffi::PyBuffer_FillInfo(view, slf.as_ptr(), lease.address().as_ptr().cast(), bytes, 0, flags)
        };
        if rc == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}
