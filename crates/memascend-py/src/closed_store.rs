//! Stores that are opened without a runtime.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use memascend_guarded::guarded;
use memascend_mem::{LeaseSlice, LockExt, PAGE_BYTES, PageableAllocator, Pool, SizeClass, round_up_to_page};
use memascend_nvme::{EngineOptions, IoError, Operation};
use memascend_store::{Store, StoreError, StoreOptions};
use pyo3::exceptions::{PyKeyError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::{memory_error, store_error, stored};
use crate::host;
use crate::panics::Intact;
use crate::volume::engine_options;

/// A store with a durable generation, opened without a runtime.
#[pyclass(frozen, module = "memascend._memascend")]
pub(crate) struct ClosedStore(Mutex<Option<Arc<Store>>>, Intact);

impl ClosedStore {
    fn store(&self) -> PyResult<Arc<Store>> {
        self.1.check()?;
        let store = self.0.locked();
        store.clone().ok_or_else(|| PyRuntimeError::new_err("the store was closed"))
    }
}

#[guarded]
#[pymethods]
impl ClosedStore {
    /// Opens the store that has at least one volume among `paths`.
    #[new]
    #[pyo3(signature = (paths, *, engine = "auto", direct = true))]
    fn new(py: Python<'_>, paths: Vec<PathBuf>, engine: &str, direct: bool) -> PyResult<Self> {
        let engine = engine_options(engine, EngineOptions::default().depth, false, false)?;
        let options = StoreOptions { engine, direct, ..StoreOptions::default() };
        let store = stored(py, || Store::open(&paths, &options))?;
        Ok(Self(Mutex::new(Some(Arc::new(store))), Intact::here()))
    }

    /// Whether any of `paths` holds a store with a durable generation.
    #[staticmethod]
    fn is_there(py: Python<'_>, paths: Vec<PathBuf>) -> PyResult<bool> {
        match py.detach(|| Store::open(&paths, &StoreOptions::default())) {
            Ok(store) => Ok(store.state().is_some()),
            Err(StoreError::Volume(IoError::NotKept { .. })) => Ok(false),
            Err(error) => Err(store_error(&error)),
        }
    }

    /// Number of the durable generation.
    #[getter]
    fn generation(&self) -> PyResult<u64> {
        Ok(self.store()?.generation())
    }

    /// The state that it was committed with.
    #[getter]
    fn state(&self) -> PyResult<Option<String>> {
        Ok(self.store()?.state())
    }

    /// Notices for the user, such as a damaged manifest.
    #[getter]
    fn notices(&self) -> PyResult<Vec<String>> {
        Ok(self.store()?.notices().to_vec())
    }

    /// Files with damaged manifests.
    #[getter]
    fn damaged_manifests(&self) -> PyResult<Vec<PathBuf>> {
        Ok(self.store()?.damaged_manifests().0.to_vec())
    }

    /// Whether the manifest before a damaged one was taken: the last commit is lost then.
    #[getter]
    fn is_older(&self) -> PyResult<bool> {
        Ok(self.store()?.damaged_manifests().1)
    }

    /// Writes the manifests anew, in the place of damaged ones.
    fn mend_manifests(&self, py: Python<'_>) -> PyResult<()> {
        let store = self.store()?;
        stored(py, || store.mend_manifests())
    }

    /// Names of the tensors and their lengths in bytes, in whole blocks.
    fn tensors(&self) -> PyResult<Vec<(String, u64)>> {
        Ok(self.store()?.tensors().into_iter().map(|(name, extent)| (name, extent.bytes)).collect())
    }

    /// Reads `bytes` bytes of a tensor, from `offset` on (whole pages), to address `target`.
    #[pyo3(signature = (name, target, bytes, offset = 0))]
    fn read(&self, py: Python<'_>, name: &str, target: usize, bytes: usize, offset: u64) -> PyResult<()> {
        let store = self.store()?;
        let id = store.find_tensor(name).ok_or_else(|| PyKeyError::new_err(name.to_owned()))?;
        let extent = store.current(id);
        let within = offset.checked_add(bytes as u64).is_some_and(|end| end <= extent.bytes);
        if !within || !offset.is_multiple_of(PAGE_BYTES as u64) {
            return Err(PyValueError::new_err(format!(
                "{name} has {} bytes, and is read by whole pages: not {bytes} bytes from {offset} on",
                extent.bytes
            )));
        }
        py.detach(|| {
            const CHUNK: usize = 8 << 20;
            // SAFETY: the Python layer passes a live, contiguous CPU tensor of `bytes` bytes.
            let target = unsafe { host::elements_mut(target, bytes) };
            let class = SizeClass::new("reading a kept store", CHUNK, 1);
            let pool = Pool::new(&PageableAllocator { huge_pages: true }, &[class])
                .map_err(|error| memory_error(&error))?;
            for (index, part) in target.chunks_mut(CHUNK).enumerate() {
                let lease = pool.try_lease(CHUNK).map_err(|error| memory_error(&error))?;
                let lease = Arc::new(lease.expect("the only buffer is free again"));
                let buffer = LeaseSlice::new(lease, 0, round_up_to_page(part.len()));
                store
                    .transfer_wait(Operation::Read, extent, offset + (index * CHUNK) as u64, buffer.clone())
                    .map_err(|error| store_error(&error))?;
                // SAFETY: the transfer has ended.
                part.copy_from_slice(&unsafe { buffer.as_slice() }[..part.len()]);
            }
            Ok(())
        })
    }

    /// Reads all generations, calling `progress(done, total)` in bytes. Returns the damage:
    /// `(tensor, offset, bytes, [(path, position)])` for bytes that differ from those written, or
    /// cannot be read.
    fn verify(&self, py: Python<'_>, progress: Py<PyAny>) -> PyResult<Vec<Damaged>> {
        let store = self.store()?;
        let mut raised = None;
        let verified = py.detach(|| {
            store.verify(&mut |done, total| {
                if raised.is_none() {
                    raised = Python::attach(|py| progress.call1(py, (done, total)).err());
                }
                raised.is_none()
            })
        });
        if let Some(raised) = raised {
            return Err(raised);
        }
        let damage =
            |damage: memascend_store::Damage| (damage.tensor, damage.offset, damage.bytes, damage.places);
        Ok(verified.map_err(|error| store_error(&error))?.into_iter().map(damage).collect())
    }

    /// A report: generation, tensors, and how full the volumes are.
    fn report<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let store = self.store()?;
        let report = PyDict::new(py);
        report.set_item("generation", store.generation())?;
        report.set_item("written", store.committed_at())?;
        let tensors = store.durable_tensors().into_iter().map(|tensor| {
            let described = PyDict::new(py);
            described.set_item("name", tensor.name)?;
            described.set_item("bytes", tensor.bytes)?;
            described.set_item("extents", tensor.extents)?;
            described.set_item("extent_bytes", tensor.extent_bytes)?;
            Ok(described)
        });
        report.set_item("tensors", tensors.collect::<PyResult<Vec<_>>>()?)?;
        let volumes =
            store.volumes().into_iter().zip(store.life_bytes_written()).map(|(volume, life_bytes)| {
                let described = PyDict::new(py);
                described.set_item("path", volume.path.as_os_str())?;
                described.set_item("share", volume.share)?;
                described.set_item("reserved_bytes", volume.reserved_bytes)?;
                described.set_item("free_bytes", volume.free_bytes)?;
                described.set_item("capacity_bytes", volume.capacity_bytes)?;
                described.set_item("life_bytes_written", life_bytes)?;
                Ok(described)
            });
        report.set_item("volumes", volumes.collect::<PyResult<Vec<_>>>()?)?;
        Ok(report)
    }

    /// `(tag, generation, bytes, state)` of every snapshot, the oldest first.
    fn snapshots(&self) -> PyResult<Vec<(String, u64, u64, String)>> {
        let snapshots = self.store()?.snapshots().into_iter();
        Ok(snapshots
            .map(|snapshot| (snapshot.tag, snapshot.generation, snapshot.bytes, snapshot.state))
            .collect())
    }

    /// Makes a snapshot the newest generation.
    fn restore_snapshot(&self, py: Python<'_>, tag: &str) -> PyResult<()> {
        let store = self.store()?;
        stored(py, || store.restore_snapshot(tag))
    }

    /// Deletes a snapshot.
    fn delete_snapshot(&self, py: Python<'_>, tag: &str) -> PyResult<()> {
        let store = self.store()?;
        stored(py, || store.delete_snapshot(tag))
    }

    /// Closes the files, which stay. Closing twice is fine.
    fn close(&self, py: Python<'_>) {
        let store = self.0.locked().take();
        py.detach(|| drop(store));
    }
}

/// Damaged bytes: tensor, offset and length, and where they lie: paths and positions.
type Damaged = (String, u64, u64, Vec<(PathBuf, u64)>);
