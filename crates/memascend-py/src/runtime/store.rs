//! The run's store: tensors and their values, the durable generation and snapshots.

use std::sync::Arc;

use memascend_exec::InFlightCounter;
use memascend_guarded::guarded;
use pyo3::prelude::*;

use super::blocks;
use super::cell::RuntimeCell;
use crate::errors::{executed, store_error, stored};
use crate::handles::{Commit, TensorId, Ticket};
use crate::host::{self, Plane};

/// The store of a `Runtime`.
#[pyclass(frozen, module = "memascend._memascend")]
pub(crate) struct RuntimeStore(pub(super) Arc<RuntimeCell>);

#[guarded]
#[pymethods]
impl RuntimeStore {
    /// Creates a tensor of `bytes` bytes in the store.
    fn create_tensor(&self, py: Python<'_>, name: &str, bytes: u64) -> PyResult<TensorId> {
        let inner = self.0.inner()?;
        let created = py.detach(|| inner.store.create_tensor(name, bytes));
        created.map(TensorId).map_err(|error| store_error(&error))
    }

    /// The tensor named `name`, or None.
    fn find_tensor(&self, name: &str) -> PyResult<Option<TensorId>> {
        Ok(self.0.inner()?.store.find_tensor(name).map(TensorId))
    }

    /// The names of all tensors.
    fn tensor_names(&self) -> PyResult<Vec<String>> {
        Ok(self.0.inner()?.store.tensors().into_iter().map(|(name, _)| name).collect())
    }

    /// Length of a tensor in bytes, in whole blocks.
    fn tensor_bytes(&self, tensor: &Bound<'_, TensorId>) -> PyResult<u64> {
        Ok(self.0.inner()?.store.current(tensor.get().0).bytes)
    }

    /// Removes a tensor without operations in flight. Its extents are freed once no generation
    /// holds them.
    fn remove_tensor(&self, tensor: &Bound<'_, TensorId>) -> PyResult<()> {
        self.0.inner()?.store.remove_tensor(tensor.get().0);
        Ok(())
    }

    /// Allocates the extent of a tensor's next value, so that no step runs out of space.
    fn make_spare(&self, py: Python<'_>, tensor: &Bound<'_, TensorId>) -> PyResult<()> {
        let (inner, id) = (self.0.inner()?, tensor.get().0);
        stored(py, || inner.store.make_spare(id))
    }

    /// Bytes that `make_spare` would allocate.
    fn spare_bytes(&self, tensor: &Bound<'_, TensorId>) -> PyResult<u64> {
        Ok(self.0.inner()?.store.spare_bytes(tensor.get().0))
    }

    /// Raises StoreError if `bytes` more bytes do not fit on the volumes.
    fn check_room(&self, bytes: u64) -> PyResult<()> {
        self.0.inner()?.store.check_room(bytes).map_err(|error| store_error(&error))
    }

    /// Reads the first `bytes` bytes of a tensor to address `target`.
    fn read(
        &self,
        py: Python<'_>,
        tensor: &Bound<'_, TensorId>,
        target: usize,
        bytes: usize,
    ) -> PyResult<()> {
        let (inner, tensor) = (self.0.inner()?, tensor.get().0);
        executed(py, || {
            let extent = inner.store.current(tensor);
            // SAFETY: the Python layer passes a live, contiguous CPU tensor of `bytes` bytes.
            let target = unsafe { host::elements_mut(target, bytes) };
            inner.staging.read(extent, target)
        })
    }

    /// Writes `bytes` bytes at address `source` as a tensor, the whole of it, and waits for the
    /// end.
    fn write(
        &self,
        py: Python<'_>,
        tensor: &Bound<'_, TensorId>,
        source: usize,
        bytes: usize,
    ) -> PyResult<()> {
        let (inner, tensor) = (self.0.inner()?, tensor.get().0);
        executed(py, || {
            let extent = inner.store.rewrite(tensor)?.target;
            let pending = Arc::new(InFlightCounter::default());
            // SAFETY: the Python layer passes a live, contiguous CPU tensor of `bytes` bytes.
            let source = unsafe { host::elements(source, bytes) };
            inner.staging.write(extent, source, &pending)?;
            pending.wait()
        })
    }

    /// Reads `numel` elements of a plane to address `target`, as float32.
    fn read_plane(
        &self,
        py: Python<'_>,
        tensor: &Bound<'_, TensorId>,
        plane: &Bound<'_, Plane>,
        numel: usize,
        target: usize,
    ) -> PyResult<()> {
        let (inner, tensor, plane) = (self.0.inner()?, tensor.get().0, plane.get().0);
        executed(py, || {
            let extent = inner.store.current(tensor);
            // SAFETY: the Python layer passes a live, contiguous CPU tensor of `numel` float32
            // elements.
            let target = unsafe { host::elements_mut(target, numel) };
            inner.staging.read_plane(extent, plane, target)
        })
    }

    /// Writes `numel` float32 elements at address `source` as a plane, the whole of it, and waits
    /// for the end.
    fn write_plane(
        &self,
        py: Python<'_>,
        tensor: &Bound<'_, TensorId>,
        plane: &Bound<'_, Plane>,
        numel: usize,
        source: usize,
    ) -> PyResult<()> {
        let (inner, tensor, plane) = (self.0.inner()?, tensor.get().0, plane.get().0);
        executed(py, || {
            let extent = inner.store.rewrite(tensor)?.target;
            let pending = Arc::new(InFlightCounter::default());
            // SAFETY: the Python layer passes a live, contiguous CPU tensor of `numel` float32
            // elements.
            let source = unsafe { host::elements(source, numel) };
            inner.staging.write_plane(extent, plane, source, &pending)?;
            pending.wait()
        })
    }

    /// Reads rows of `row_bytes` bytes of a tensor to address `target`, one behind another. Their
    /// numbers are `count` int64 at address `rows`, ascending, each once. The tensor's writes have
    /// to have ended.
    ///
    /// With `compare` they are compared with the checksums of their writes: the first read of a row reads the MiB
    /// around it. Where they are spread over more than half of the tensor, all of it is read, and
    /// compared in any case.
    #[allow(clippy::too_many_arguments)]
    fn read_rows(
        &self,
        py: Python<'_>,
        tensor: &Bound<'_, TensorId>,
        row_bytes: usize,
        rows: usize,
        count: usize,
        target: usize,
        compare: bool,
    ) -> PyResult<()> {
        let (inner, tensor) = (self.0.inner()?, tensor.get().0);
        executed(py, || blocks::read_rows(&inner, tensor, row_bytes, (rows, count), target, compare))
    }

    /// Starts a commit of the current values of all tensors, with `state` (JSON): a thread waits
    /// for everything under way, flushes the drives and writes the manifest. `tickets` name
    /// fetches that may not have started yet. Nothing may be updated until the commit has ended.
    fn commit(&self, state: String, tickets: Vec<Bound<'_, Ticket>>) -> PyResult<Commit> {
        let (inner, units) = (self.0.inner()?, self.0.units());
        let tickets = tickets.iter().map(|ticket| Arc::clone(&ticket.get().0)).collect();
        Commit::begin(inner, units, tickets, state, self.0.intact())
    }

    /// Number of the durable generation; 0 when there is none.
    #[getter]
    fn generation(&self) -> PyResult<u64> {
        Ok(self.0.inner_to_close()?.store.generation())
    }

    /// The state that the durable generation was committed with, or None.
    #[getter]
    fn state(&self) -> PyResult<Option<String>> {
        Ok(self.0.inner()?.store.state())
    }

    /// Keeps the durable generation under a name.
    fn snapshot(&self, py: Python<'_>, tag: &str) -> PyResult<()> {
        let inner = self.0.inner()?;
        stored(py, || inner.store.snapshot(tag))
    }

    /// `(tag, generation, bytes)` of every snapshot, the oldest first.
    fn snapshots(&self) -> PyResult<Vec<(String, u64, u64)>> {
        let snapshots = self.0.inner_to_close()?.store.snapshots().into_iter();
        Ok(snapshots.map(|snapshot| (snapshot.tag, snapshot.generation, snapshot.bytes)).collect())
    }

    /// Deletes a snapshot.
    fn delete_snapshot(&self, py: Python<'_>, tag: &str) -> PyResult<()> {
        let inner = self.0.inner()?;
        stored(py, || inner.store.delete_snapshot(tag))
    }

    /// Makes the values of a snapshot the current ones; the durable generation stays until
    /// `confirm_snapshot`.
    fn load_snapshot(&self, py: Python<'_>, tag: &str) -> PyResult<()> {
        let inner = self.0.inner()?;
        stored(py, || inner.store.load_snapshot(tag))
    }

    /// Makes a loaded snapshot the newest generation.
    fn confirm_snapshot(&self, py: Python<'_>, tag: &str) -> PyResult<()> {
        let inner = self.0.inner()?;
        stored(py, || inner.store.confirm_snapshot(tag))
    }
}
