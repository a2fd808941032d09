//! One training run, as Python holds it.

mod arguments;
mod blocks;
mod cell;
mod gradients;
mod inner;
mod memory;
mod plan;
mod projections;
mod statistics;
mod store;
mod units;

use std::path::PathBuf;
use std::sync::Arc;

use memascend_guarded::guarded;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use self::cell::RuntimeCell;
pub(crate) use self::gradients::{GradientRanges, RuntimeGradients};
pub(crate) use self::inner::RuntimeInner;
pub(crate) use self::memory::RuntimeMemory;
use self::plan::{AllocatorChoice, MemoryPlan, RuntimeOptions, StorePlan};
pub(crate) use self::projections::RuntimeProjections;
use self::statistics::statistics;
pub(crate) use self::store::RuntimeStore;
pub(crate) use self::units::RuntimeUnits;
use crate::device;
use crate::tuning::Tuning;

/// One training run's native side: its life, and the objects that do its work.
#[pyclass(frozen, module = "memascend._memascend")]
pub(crate) struct Runtime {
    cell: Arc<RuntimeCell>,
    notices: Vec<String>,
    /// Buffers of the arena and outside of it, and bytes that are put aside.
    #[pyo3(get)]
    memory: Py<RuntimeMemory>,
    /// Tensors and their values, the durable generation and snapshots.
    #[pyo3(get)]
    store: Py<RuntimeStore>,
    /// Transfers and updates of units.
    #[pyo3(get)]
    units: Py<RuntimeUnits>,
    /// Gradients: their memory, and their capture.
    #[pyo3(get)]
    gradients: Py<RuntimeGradients>,
    /// Projections of gradients, and moments of them that the store keeps.
    #[pyo3(get)]
    projections: Py<RuntimeProjections>,
}

impl Runtime {
    pub(crate) fn inner(&self) -> PyResult<Arc<RuntimeInner>> {
        self.cell.inner()
    }
}

#[guarded]
#[pymethods]
impl Runtime {
    /// Creates the store, or opens an existing one to `resume`, and reserves the arena. `in_place`
    /// keeps one copy of each tensor, without a second one for the next generation. `replace` deletes
    /// the store of an earlier run that is in the way of a new one.
    ///
    /// `arena` is a `memascend.memory_plan.arena.Arena`, and `tuning` has the names of
    /// `memascend.options.Tuning`. With `device`, the number of a CUDA device, the arena is memory
    /// that the device copies from and to directly, unless another `allocator` is named. If a
    /// number of the arena has a maximum, the allocator is not `cuda`.
    #[new]
    #[pyo3(signature = (store, arena, *, resume = false, in_place = false, replace = false, device = None, **tuning))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        store: Vec<PathBuf>,
        arena: MemoryPlan,
        resume: bool,
        in_place: bool,
        replace: bool,
        device: Option<i32>,
        tuning: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        let tuning = Tuning::of(tuning)?;
        let store = StorePlan { paths: store, options: tuning.store_options(in_place, replace)?, resume };
        let allocator = AllocatorChoice { name: tuning.allocator, huge_pages: tuning.huge_pages };
        let compute_threads = tuning.compute_threads;
        let options = RuntimeOptions { store, memory: arena, allocator, compute_threads, device };
        let (inner, notices) = py.detach(|| RuntimeInner::open(options))?;
        let cell = Arc::new(RuntimeCell::new(inner));
        Ok(Self {
            memory: Py::new(py, RuntimeMemory(Arc::clone(&cell)))?,
            store: Py::new(py, RuntimeStore(Arc::clone(&cell)))?,
            units: Py::new(py, RuntimeUnits::new(Arc::clone(&cell)))?,
            gradients: Py::new(py, RuntimeGradients(Arc::clone(&cell)))?,
            projections: Py::new(py, RuntimeProjections(Arc::clone(&cell)))?,
            notices,
            cell,
        })
    }

    /// The link to the device, or None.
    #[getter]
    fn device(&self) -> PyResult<Option<device::DeviceLink>> {
        Ok(self.cell.inner()?.link.clone().map(device::DeviceLink))
    }

    /// Counters: bytes moved, host bytes in use, reserved and at most, store bytes, engine.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        statistics(py, &*self.cell.inner()?)
    }

    /// Seconds for which kernels of updates have run, the mean of the threads that run them.
    #[getter]
    fn update_seconds(&self) -> PyResult<f64> {
        Ok(self.cell.inner()?.executor.busy().as_secs_f64())
    }

    /// Notices for the user.
    #[getter]
    fn notices(&self) -> Vec<String> {
        self.notices.clone()
    }

    /// Waits for everything under way and closes the files. With `keep` the committed generations
    /// stay, otherwise the files are removed. Closing twice is fine.
    fn close(&self, py: Python<'_>, keep: bool) -> PyResult<()> {
        if self.cell.is_forked() {
            return Ok(()); // Threads, buffers and files are the parent's.
        }
        let Some(inner) = self.cell.take() else { return Ok(()) };
        py.detach(|| {
            if let Some(link) = &inner.link {
                link.close();
            }
            if !keep {
                // On a failed drive the files may stay: there is nothing left to try.
                let _ = inner.store.forget();
            }
            drop(inner);
        });
        Ok(())
    }

    /// Whether it cannot be used any more: `close` was called, or this process is a forked child.
    #[getter]
    fn closed(&self) -> bool {
        self.cell.is_forked() || self.cell.is_closed()
    }

    /// Whether this process was forked from the one that opened it, which alone can use it.
    #[getter]
    fn forked(&self) -> bool {
        self.cell.is_forked()
    }
}
