//! The run's host memory: buffers of the arena and outside of it, and bytes that are put aside.

use std::sync::Arc;

use memascend_guarded::guarded;
use pyo3::prelude::*;

use super::cell::RuntimeCell;
use crate::device::{CudaEvent, Stash};
use crate::errors::{exec_error, memory_error};
use crate::host;
use crate::lease::LeaseBuffer;

/// Host memory of a `Runtime`.
#[pyclass(frozen, module = "memascend._memascend")]
pub(crate) struct RuntimeMemory(pub(super) Arc<RuntimeCell>);

#[guarded]
#[pymethods]
impl RuntimeMemory {
    /// Changes the numbers of buffers: for each size of unit buffers that is named, `(bytes, count)`,
    /// and of staging chunks and buffers for states if given. Lines of `units` of the same size, in
    /// whole pages, have one number together.
    ///
    /// Shrinking goes first. Free buffers are given back to the system when this returns; those in
    /// use are when they are free, and `stats()["host_bytes_leaving"]` counts them until then. Raises
    /// HostMemoryError, or PinnedMemoryError, if the system refuses memory for one of the numbers:
    /// that one is as it was, and those before it are changed. ValueError if it was not reserved.
    #[pyo3(signature = (units = Vec::new(), chunk_count = None, states_count = None))]
    fn resize(
        &self,
        py: Python<'_>,
        units: Vec<(usize, usize)>,
        chunk_count: Option<usize>,
        states_count: Option<usize>,
    ) -> PyResult<()> {
        let inner = self.0.inner()?;
        py.detach(|| inner.resize(units, chunk_count, states_count)).map_err(|error| memory_error(&error))
    }

    /// A free unit buffer of at least `bytes` bytes, or None.
    fn lease_unit(&self, bytes: usize) -> PyResult<Option<LeaseBuffer>> {
        let lease = self.0.inner()?.units.try_lease(bytes).map_err(|error| memory_error(&error))?;
        Ok(lease.map(|lease| LeaseBuffer { lease: Arc::new(lease) }))
    }

    /// A buffer of its own, outside of the arena, which is freed when the last object that refers to
    /// it dies.
    fn lease_outside(&self, py: Python<'_>, bytes: usize) -> PyResult<LeaseBuffer> {
        let inner = self.0.inner()?;
        let lease = py.detach(|| inner.outside.lease(bytes)).map_err(|error| memory_error(&error))?;
        Ok(LeaseBuffer { lease: Arc::new(lease) })
    }

    /// Staging chunks in use.
    #[getter]
    fn chunks_in_use(&self) -> PyResult<usize> {
        let inner = self.0.inner()?;
        let chunks = &inner.pools[2];
        Ok(chunks.counters().leased_bytes / inner.chunk_bytes.next_multiple_of(memascend_mem::PAGE_BYTES))
    }

    /// Bytes of buffers that are given back to the system as soon as they are free.
    #[getter]
    fn leaving_bytes(&self) -> PyResult<usize> {
        Ok(self.0.inner()?.pools.iter().map(|pool| pool.counters().leaving_bytes).sum())
    }

    /// Puts `bytes` bytes at address `source` aside: in spare staging buffers, and on the SSD when
    /// no buffer is spare; with `spill` all of them on the SSD. Returns the handle that restores
    /// them.
    fn stash(&self, py: Python<'_>, source: usize, bytes: usize, spill: bool) -> PyResult<Stash> {
        let inner = self.0.inner()?;
        let stash = py.detach(|| {
            // SAFETY: the Python layer passes a live, contiguous CPU tensor of `bytes` bytes.
            memascend_exec::Stash::new(&inner.staging, unsafe { host::elements(source, bytes) }, spill)
        });
        let stash = stash.map_err(|error| exec_error(&error))?;
        Ok(Stash { stash, link: inner.link.clone() })
    }

    /// As `stash`, for `bytes` bytes at address `source` of the device, after `ready`. They have to
    /// live until the stash is `copied`.
    fn stash_from_device(
        &self,
        py: Python<'_>,
        source: usize,
        bytes: usize,
        ready: &Bound<'_, CudaEvent>,
        spill: bool,
    ) -> PyResult<Stash> {
        let (inner, ready) = (self.0.inner()?, &ready.get().0);
        let link = inner.link()?;
        // SAFETY: the Python layer passes a live, contiguous tensor on the device and holds it
        // until it is copied.
        let stash = py.detach(|| unsafe { link.stash(&inner.staging, source, bytes, ready, spill) });
        let stash = stash.map_err(|error| exec_error(&error))?;
        Ok(Stash { stash, link: Some(Arc::clone(link)) })
    }
}
