//! Handles of tensors, and of fetches and commits under way.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use memascend_exec::Pending;
use pyo3::prelude::*;

use crate::errors::exec_error;

/// A tensor of the store.
#[pyclass(frozen, eq, hash, module = "memascend._memascend")]
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct TensorId(pub memascend_store::TensorId);

/// A commit under way.
#[pyclass(frozen, module = "memascend._memascend")]
pub(crate) struct Commit {
    pub ready: Arc<Pending>,
    pub generation: Arc<AtomicU64>,
}

#[pymethods]
impl Commit {
    /// Waits until the generation is durable; returns its number.
    fn wait(&self, py: Python<'_>) -> PyResult<u64> {
        py.detach(|| self.ready.wait()).map_err(|error| exec_error(&error))?;
        Ok(self.generation.load(Ordering::Acquire))
    }

    /// Whether `wait` would return at once.
    fn is_ready(&self) -> bool {
        self.ready.is_idle()
    }
}

/// A fetch under way.
#[pyclass(frozen, module = "memascend._memascend")]
pub(crate) struct Ticket(pub Arc<memascend_exec::Ticket>);

#[pymethods]
impl Ticket {
    /// Waits until the unit's weights are in their buffer.
    fn wait(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.0.wait()).map_err(|error| exec_error(&error))
    }

    /// Whether `wait` would return at once.
    fn is_ready(&self) -> bool {
        self.0.is_ready()
    }
}
