//! Handles of tensors, and of fetches and commits under way.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use memascend_exec::{ExecError, InFlightCounter};
use memascend_guarded::guarded;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::errors::executed;
use crate::panics::Intact;
use crate::runtime::RuntimeInner;

/// A tensor of the store.
#[pyclass(frozen, eq, hash, module = "memascend._memascend")]
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct TensorId(pub memascend_store::TensorId);

/// A commit under way.
#[pyclass(frozen, module = "memascend._memascend")]
pub(crate) struct Commit {
    pub ready: Arc<InFlightCounter>,
    pub generation: Arc<AtomicU64>,
}

impl Commit {
    /// Starts a thread that waits for `tickets`, then for everything under way in `units`, and
    /// commits.
    pub(crate) fn begin(
        inner: Arc<RuntimeInner>,
        units: Vec<Arc<InFlightCounter>>,
        tickets: Vec<Arc<memascend_exec::Ticket>>,
        state: String,
        intact: Intact,
    ) -> PyResult<Self> {
        let commit = Self { ready: Arc::default(), generation: Arc::default() };
        let (under_way, generation) = (commit.ready.begin(), Arc::clone(&commit.generation));
        let run = move || {
            let begun = tickets.iter().try_for_each(|ticket| ticket.wait());
            let written = begun.and_then(|()| units.iter().try_for_each(|unit| unit.wait()));
            // After a panic nothing says that the values belong to one step.
            let whole =
                written.and_then(|()| if intact.still() { Ok(()) } else { Err(ExecError::Abandoned) });
            let committed = whole.and_then(|()| {
                let number = inner.store.commit(&state).map_err(ExecError::from)?;
                generation.store(number, Ordering::Release);
                Ok(())
            });
            // Drop the runtime before signalling, so that a caller that closes the store then is the
            // last to hold it.
            drop(inner);
            under_way.end(committed);
        };
        std::thread::Builder::new()
            .name("memascend-commit".into())
            .spawn(run)
            .map_err(|error| PyRuntimeError::new_err(format!("cannot start a thread: {error}")))?;
        Ok(commit)
    }
}

#[guarded]
#[pymethods]
impl Commit {
    /// Waits until the generation is durable; returns its number.
    fn wait(&self, py: Python<'_>) -> PyResult<u64> {
        executed(py, || self.ready.wait())?;
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

#[guarded]
#[pymethods]
impl Ticket {
    /// Waits until the unit's weights are in their buffer.
    fn wait(&self, py: Python<'_>) -> PyResult<()> {
        executed(py, || self.0.wait())
    }

    /// Whether `wait` would return at once.
    fn is_ready(&self) -> bool {
        self.0.is_ready()
    }

    /// Number of the groups of elements that are counted by themselves.
    #[getter]
    fn groups(&self) -> usize {
        self.0.groups().len()
    }

    /// Waits until the updated weights of a group are written.
    fn wait_group(&self, py: Python<'_>, group: usize) -> PyResult<()> {
        executed(py, || self.0.groups()[group].wait())
    }

    /// Whether `wait_group` would return at once.
    fn is_group_ready(&self, group: usize) -> bool {
        self.0.groups()[group].is_idle()
    }
}
