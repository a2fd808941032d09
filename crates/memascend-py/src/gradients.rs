//! A gradient that is captured in ranges.

use std::sync::{Arc, Mutex, Weak};

use memascend_exec::{ExecError, GradientDtypes, GradientId, Pending};
use memascend_guarded::guarded;
use memascend_mem::{LeaseSlice, LockExt, round_up_to_page};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

use crate::errors::{exec_error, memory_error};
use crate::host::{elements_mut, parse_dtype};
use crate::parts::Parts;

/// The dtypes of a gradient that is made in one, and kept in the other if there is one.
pub(crate) fn parse_dtypes(made: &str, kept: Option<&str>) -> PyResult<GradientDtypes> {
    let kept = kept.unwrap_or(made);
    GradientDtypes::of(parse_dtype(made)?, parse_dtype(kept)?)
        .ok_or_else(|| PyValueError::new_err(format!("a gradient in {made} is not kept in {kept}")))
}

/// Allocates the gradient of a tensor that moves alone, whose spills `pending` counts; returns its
/// number.
pub(crate) fn create(
    py: Python<'_>,
    parts: &Parts,
    pending: Arc<Pending>,
    name: &str,
    dtypes: GradientDtypes,
    numel: usize,
) -> PyResult<usize> {
    py.detach(|| parts.gradients.create(name, dtypes, numel, pending))
        .map(|id| id.0)
        .map_err(|error| exec_error(&error))
}

/// Reserves host memory for the gradients of a pack; returns their number.
pub(crate) fn create_packed(parts: &Parts, dtypes: GradientDtypes, numel: usize) -> PyResult<usize> {
    let bytes = numel * dtypes.kept_bytes();
    let lease = parts.packs.try_lease(bytes).map_err(|error| memory_error(&error))?;
    let lease = lease.ok_or_else(|| {
        PyRuntimeError::new_err(
            "no buffer is free for the gradients of a pack: the plan holds one buffer for each pack",
        )
    })?;
    let buffer = LeaseSlice::new(Arc::new(lease), 0, round_up_to_page(bytes));
    Ok(parts.gradients.create_packed(dtypes, numel, buffer).0)
}

/// As `create_packed`, in memory that the plan did not hold for it: `outside` of the arena, or in a staging
/// buffer. `None` if none of those is spare.
pub(crate) fn create_packed_later(
    py: Python<'_>,
    parts: &Parts,
    dtypes: GradientDtypes,
    numel: usize,
    outside: bool,
) -> PyResult<Option<usize>> {
    if !outside {
        let created = py.detach(|| parts.gradients.create_packed_in_staging(dtypes, numel));
        return created.map(|id| id.map(|id| id.0)).map_err(|error| exec_error(&error));
    }
    let bytes = numel * dtypes.kept_bytes();
    let lease = py.detach(|| parts.outside.lease(bytes)).map_err(|error| memory_error(&error))?;
    let buffer = LeaseSlice::new(Arc::new(lease), 0, round_up_to_page(bytes));
    Ok(Some(parts.gradients.create_packed(dtypes, numel, buffer).0))
}

/// Copies a gradient of `bytes` bytes, in the dtype it is kept in, to address `target`.
pub(crate) fn read(
    py: Python<'_>,
    parts: &Parts,
    id: GradientId,
    target: usize,
    bytes: usize,
) -> PyResult<()> {
    // SAFETY: the Python layer passes a live, contiguous CPU tensor of `bytes` bytes.
    py.detach(|| parts.gradients.read(id, unsafe { elements_mut(target, bytes) }))
        .map_err(|error| exec_error(&error))
}

/// A gradient on its way, range by range. It has its values when `end` has returned, and is empty
/// if that never happens.
#[pyclass(frozen, module = "memascend._memascend")]
pub(crate) struct GradientRanges {
    /// Not kept alive: a handle that an exception holds must not keep a closed store's files.
    parts: Weak<Parts>,
    ranges: Mutex<Option<memascend_exec::GradientRanges>>,
}

impl GradientRanges {
    pub(crate) fn begin(parts: &Arc<Parts>, gradient: usize, accumulate: bool) -> PyResult<Self> {
        let ranges = parts.gradients.begin_ranges(GradientId(gradient), accumulate);
        let ranges = Mutex::new(Some(ranges.map_err(|error| exec_error(&error))?));
        Ok(Self { parts: Arc::downgrade(parts), ranges })
    }

    fn with<T: Send>(
        &self,
        py: Python<'_>,
        run: impl FnOnce(&Parts, &mut Option<memascend_exec::GradientRanges>) -> memascend_exec::Result<T> + Send,
    ) -> PyResult<T> {
        py.detach(|| {
            let parts = self.parts.upgrade().ok_or(ExecError::Closed)?;
            run(&parts, &mut self.ranges.locked())
        })
        .map_err(|error| exec_error(&error))
    }
}

fn ended() -> ExecError {
    ExecError::Misused("the capture of the gradient has ended".into())
}

#[guarded]
#[pymethods]
impl GradientRanges {
    /// Captures the next `numel` elements, at `address`. ValueError if the gradient has fewer left.
    fn add(&self, py: Python<'_>, address: usize, numel: usize) -> PyResult<()> {
        self.with(py, |parts, ranges| {
            let ranges = ranges.as_mut().ok_or_else(ended)?;
            // SAFETY: the Python layer passes a live, contiguous CPU tensor of `numel` elements and
            // holds it for the call.
            unsafe { parts.gradients.add_range(ranges, address as *const u8, numel) }
        })
    }

    /// Ends the capture; returns `(sum of squares, any non-finite)`. ValueError if elements are
    /// missing.
    fn end(&self, py: Python<'_>) -> PyResult<(f64, bool)> {
        self.with(py, |parts, slot| {
            let ranges = slot.as_mut().ok_or_else(ended)?;
            let stats = parts.gradients.end_ranges(ranges)?;
            *slot = None;
            Ok((stats.sum_squares, stats.non_finite))
        })
    }
}
