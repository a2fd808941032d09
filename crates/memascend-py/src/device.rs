//! The CUDA device: its link, events, captures, and bytes put aside.

use std::ptr::NonNull;
use std::sync::Arc;

use memascend_exec::{DeviceEvent, HostCopy};
use memascend_guarded::guarded;
use memascend_mem::Cudart;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::{device_error, exec_error, executed};
use crate::host;
use crate::lease::LeaseBuffer;

/// How many CUDA devices this process may see.
#[guarded]
#[pyfunction]
pub(crate) fn cuda_device_count(py: Python<'_>) -> PyResult<i32> {
    py.detach(|| Cudart::find()?.device_count()).map_err(|error| device_error(&error))
}

/// A point in a stream of a CUDA device.
#[pyclass(frozen, module = "memascend._memascend")]
pub(crate) struct CudaEvent(pub(crate) DeviceEvent);

#[guarded]
#[pymethods]
impl CudaEvent {
    /// Whether everything enqueued in the stream before is done.
    fn is_done(&self) -> PyResult<bool> {
        self.0.is_done().map_err(|error| exec_error(&error))
    }

    /// Waits until it is done.
    fn wait(&self, py: Python<'_>) -> PyResult<()> {
        executed(py, || self.0.wait())
    }
}

/// One CUDA device and the copies to and from it. Streams are torch's `Stream.cuda_stream`.
#[pyclass(frozen, module = "memascend._memascend")]
pub(crate) struct DeviceLink(pub(crate) Arc<memascend_exec::DeviceLink>);

#[guarded]
#[pymethods]
impl DeviceLink {
    /// Number of the device among those that this process may see.
    #[getter]
    fn index(&self) -> i32 {
        self.0.index()
    }

    /// `(free, total)` bytes of the device.
    fn memory(&self) -> PyResult<(usize, usize)> {
        self.0.memory().map_err(|error| exec_error(&error))
    }

    /// Records an event that is done when everything enqueued in `stream` so far is.
    fn record(&self, stream: usize) -> PyResult<CudaEvent> {
        // SAFETY: the Python layer passes the handle of a live stream of the device.
        unsafe { self.0.record(stream) }.map(CudaEvent).map_err(|error| exec_error(&error))
    }

    /// Makes later work in `stream` wait for `event`.
    fn wait(&self, stream: usize, event: &Bound<'_, CudaEvent>) -> PyResult<()> {
        // SAFETY: as above.
        unsafe { self.0.wait(stream, &event.get().0) }.map_err(|error| exec_error(&error))
    }

    /// Copies `bytes` bytes of `lease` from `offset` to address `target` of the device, after the
    /// events `after`. Returns the event that is done when they are there; the lease returns to its
    /// pool only then.
    fn upload(
        &self,
        py: Python<'_>,
        lease: &Bound<'_, LeaseBuffer>,
        offset: usize,
        bytes: usize,
        target: usize,
        after: Vec<Bound<'_, CudaEvent>>,
    ) -> PyResult<CudaEvent> {
        let lease = &lease.get().lease;
        let after: Vec<_> = after.iter().map(|event| event.get().0.clone()).collect();
        // SAFETY: the Python layer passes the address of as many bytes of device memory, and does
        // not use this buffer for anything else before the event.
        let upload = || unsafe { self.0.upload(lease, offset, bytes, target, &after) };
        py.detach(upload).map(CudaEvent).map_err(|error| exec_error(&error))
    }

    /// Copies bytes of the device to host memory, after `after`: of each of `parts`, `(source, bytes,
    /// target)`, so many bytes from address `source` of the device to address `target`. Returns the
    /// event that is done when all are there.
    fn download(
        &self,
        py: Python<'_>,
        parts: Vec<(usize, usize, usize)>,
        after: &Bound<'_, CudaEvent>,
    ) -> PyResult<CudaEvent> {
        let after = &after.get().0;
        let part = |(source, bytes, target)| {
            let target = NonNull::new(std::ptr::with_exposed_provenance_mut(target));
            let target =
                target.ok_or_else(|| PyValueError::new_err("a copy from the device has no target"))?;
            Ok(HostCopy { source, bytes, target })
        };
        let parts: Vec<_> = parts.into_iter().map(part).collect::<PyResult<_>>()?;
        // SAFETY: the Python layer passes live, contiguous tensors on the device and in host memory,
        // holds both until the event, and does not access the host's before.
        let download = || unsafe { self.0.download(&parts, after) };
        py.detach(download).map(CudaEvent).map_err(|error| exec_error(&error))
    }

    /// Counters: bytes and number of copies to the device (`h2d`) and from it (`d2h`), and how
    /// often a thread waited for the device (`host_synchronisations`): the caller's thread, for the
    /// device or for a thread that copies (`waits_python`), or a thread that copies
    /// (`waits_worker`).
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let counters = self.0.counters();
        let stats = PyDict::new(py);
        stats.set_item("h2d_bytes", counters.h2d_bytes)?;
        stats.set_item("d2h_bytes", counters.d2h_bytes)?;
        stats.set_item("h2d_copies", counters.h2d_copies)?;
        stats.set_item("d2h_copies", counters.d2h_copies)?;
        stats.set_item("host_synchronisations", counters.waits_caller + counters.waits_worker)?;
        stats.set_item("waits_python", counters.waits_caller)?;
        stats.set_item("waits_worker", counters.waits_worker)?;
        Ok(stats)
    }
}

/// A gradient on its way from the device.
#[pyclass(frozen, module = "memascend._memascend")]
pub(crate) struct Capture(pub(crate) memascend_exec::Capture);

#[guarded]
#[pymethods]
impl Capture {
    /// Waits until the gradient is captured; returns `(sum of squares, any non-finite)`. If the
    /// capture failed, raises its error; the gradient is lost then.
    fn wait(&self, py: Python<'_>) -> PyResult<(f64, bool)> {
        let stats = executed(py, || self.0.wait())?;
        Ok((stats.sum_squares, stats.non_finite))
    }

    /// Whether `wait` would return, or raise, at once.
    fn is_done(&self) -> bool {
        self.0.is_done()
    }

    /// Whether the device memory is no longer read: gradient and sums were copied, or the copy
    /// failed.
    fn copied(&self) -> bool {
        self.0.is_done()
    }

    /// Waits until the device memory is no longer read.
    fn wait_copied(&self, py: Python<'_>) {
        // `wait` raises the error.
        let _ = py.detach(|| self.0.wait());
    }
}

/// A gradient on its way from the device to its update.
#[pyclass(frozen, module = "memascend._memascend")]
pub(crate) struct Applying(pub(crate) memascend_exec::Applying);

#[guarded]
#[pymethods]
impl Applying {
    /// Waits until the update has all of the gradient; returns the norm of the step for a rule that takes
    /// factors, else None. If a copy or a part of the update failed, raises its error.
    fn wait(&self, py: Python<'_>) -> PyResult<Option<f64>> {
        executed(py, || self.0.wait())
    }

    /// Whether the device memory is no longer read: everything was copied, or something failed.
    fn copied(&self) -> bool {
        self.0.is_done()
    }

    /// Waits until the device memory is no longer read.
    fn wait_copied(&self, py: Python<'_>) {
        // `wait` raises the error.
        let _ = py.detach(|| self.0.wait());
    }
}

/// Bytes put aside for a while. Their space is freed when the handle dies and no copy of them is
/// under way.
#[pyclass(frozen, module = "memascend._memascend")]
pub(crate) struct Stash {
    pub(crate) stash: memascend_exec::Stash,
    pub(crate) link: Option<Arc<memascend_exec::DeviceLink>>,
}

#[guarded]
#[pymethods]
impl Stash {
    /// Length in bytes.
    #[getter]
    fn bytes(&self) -> usize {
        self.stash.bytes()
    }

    /// Whether their source is no longer read: it was copied, or the copy failed.
    fn copied(&self) -> bool {
        self.stash.is_copied()
    }

    /// Waits until their source is no longer read.
    fn wait_copied(&self, py: Python<'_>) {
        // `restore` raises the error.
        let _ = py.detach(|| self.stash.wait_copied());
    }

    /// Copies the bytes to address `target`.
    fn restore(&self, py: Python<'_>, target: usize) -> PyResult<()> {
        // SAFETY: the Python layer passes a live, contiguous CPU tensor of as many bytes.
        executed(py, || self.stash.restore(unsafe { host::elements_mut(target, self.stash.bytes()) }))
    }

    /// Copies the bytes to address `target` of the device, after `after`.
    fn restore_to_device(
        &self,
        py: Python<'_>,
        target: usize,
        after: &Bound<'_, CudaEvent>,
    ) -> PyResult<Restore> {
        let link = self.link.as_ref();
        let link = link.ok_or_else(|| PyRuntimeError::new_err("the runtime was made without a device"))?;
        let after = &after.get().0;
        // SAFETY: the Python layer passes a live, contiguous tensor of as many bytes on the device,
        // and holds it until the restore's event.
        let restore = py.detach(|| unsafe { link.restore(&self.stash, target, after) });
        restore.map(Restore).map_err(|error| exec_error(&error))
    }
}

/// Bytes of a stash on their way back to the device.
#[pyclass(frozen, module = "memascend._memascend")]
pub(crate) struct Restore(memascend_exec::Restore);

#[guarded]
#[pymethods]
impl Restore {
    /// Waits until every copy is enqueued; returns the event that is done when all bytes are there.
    /// If that failed, raises the error, and nothing is copied any more.
    fn enqueued(&self, py: Python<'_>) -> PyResult<CudaEvent> {
        py.detach(|| self.0.enqueued()).map(CudaEvent).map_err(|error| exec_error(&error))
    }
}
