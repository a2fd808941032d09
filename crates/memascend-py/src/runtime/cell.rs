//! The inner runtime until it is closed, shared by `Runtime` and the objects that each do a part of its work.

use std::sync::{Arc, Mutex};

use memascend_exec::InFlightCounter;
use memascend_mem::{LockExt, Origin};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use super::inner::RuntimeInner;
use crate::errors::forked_error;
use crate::panics::Intact;

/// State that a `Runtime` and its parts share.
pub(crate) struct RuntimeCell {
    inner: Mutex<Option<Arc<RuntimeInner>>>,
    /// For each unit, its operations in flight.
    units: Mutex<Vec<Arc<InFlightCounter>>>,
    /// The process that opened it.
    origin: Origin,
    intact: Intact,
}

impl RuntimeCell {
    pub(super) fn new(inner: RuntimeInner) -> Self {
        Self {
            inner: Mutex::new(Some(Arc::new(inner))),
            units: Mutex::default(),
            origin: Origin::here(),
            intact: Intact::here(),
        }
    }

    /// The inner runtime.
    ///
    /// # Errors
    /// If it was closed, this process was forked from the one that opened it, or something has panicked since.
    pub(crate) fn inner(&self) -> PyResult<Arc<RuntimeInner>> {
        self.intact.check()?;
        self.inner_to_close()
    }

    /// The inner runtime, also after a panic: a model that is closed then asks for its durable generation.
    pub(super) fn inner_to_close(&self) -> PyResult<Arc<RuntimeInner>> {
        if self.is_forked() {
            return Err(forked_error());
        }
        let inner = self.inner.locked();
        inner.clone().ok_or_else(|| PyRuntimeError::new_err("the offloaded model was closed"))
    }

    /// Takes the inner runtime out, to close it; None if it was taken before.
    pub(super) fn take(&self) -> Option<Arc<RuntimeInner>> {
        self.inner.locked().take()
    }

    pub(super) fn is_closed(&self) -> bool {
        self.inner.locked().is_none()
    }

    /// Whether this process was forked from the one that opened it.
    pub(super) fn is_forked(&self) -> bool {
        !self.origin.is_here()
    }

    pub(super) fn intact(&self) -> Intact {
        self.intact
    }

    /// A number for a new unit.
    pub(super) fn add_unit(&self) -> usize {
        let mut units = self.units.locked();
        units.push(Arc::default());
        units.len() - 1
    }

    /// The counter of a unit's operations in flight.
    pub(super) fn unit(&self, unit: usize) -> Arc<InFlightCounter> {
        Arc::clone(&self.units.locked()[unit])
    }

    /// The counters of all units.
    pub(super) fn units(&self) -> Vec<Arc<InFlightCounter>> {
        self.units.locked().clone()
    }
}
