//! Gradients: their memory, and their capture, whole or in ranges.

use std::sync::{Arc, Mutex, Weak};

use memascend_exec::{DeviceGradient, ExecError, GradientDtypes, GradientId};
use memascend_guarded::guarded;
use memascend_mem::{Lease, LeaseSlice, LockExt, round_up_to_page};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

use super::cell::RuntimeCell;
use super::inner::RuntimeInner;
use crate::device::{Capture, CudaEvent};
use crate::errors::{exec_error, executed, memory_error};
use crate::host::{elements_mut, parse_dtype};

/// The dtypes of a gradient that is made in one, and kept in the other if there is one.
fn parse_dtypes(made: &str, kept: Option<&str>) -> PyResult<GradientDtypes> {
    let kept = kept.unwrap_or(made);
    GradientDtypes::of(parse_dtype(made)?, parse_dtype(kept)?)
        .ok_or_else(|| PyValueError::new_err(format!("a gradient in {made} is not kept in {kept}")))
}

/// The beginning of `lease`: `bytes` bytes, rounded up to whole pages.
fn whole_pages(lease: Lease, bytes: usize) -> LeaseSlice {
    LeaseSlice::new(Arc::new(lease), 0, round_up_to_page(bytes))
}

/// The gradients of a `Runtime`.
#[pyclass(frozen, module = "memascend._memascend")]
pub(crate) struct RuntimeGradients(pub(super) Arc<RuntimeCell>);

#[guarded]
#[pymethods]
impl RuntimeGradients {
    /// Allocates the gradient of a tensor of `unit` that moves alone: made in `dtype`, and kept in
    /// `kept` if that is not the same; returns its number.
    #[pyo3(signature = (unit, name, dtype, numel, kept = None))]
    fn create_gradient(
        &self,
        py: Python<'_>,
        unit: usize,
        name: &str,
        dtype: &str,
        numel: usize,
        kept: Option<&str>,
    ) -> PyResult<usize> {
        let dtypes = parse_dtypes(dtype, kept)?;
        let (inner, unit) = (self.0.inner()?, self.0.unit(unit));
        py.detach(|| inner.gradients.create(name, dtypes, numel, unit))
            .map(|id| id.0)
            .map_err(|error| exec_error(&error))
    }

    /// Reserves host memory for the gradients of small tensors packed together, as
    /// `create_gradient`; returns their number.
    #[pyo3(signature = (dtype, numel, kept = None))]
    fn create_packed_gradient(&self, dtype: &str, numel: usize, kept: Option<&str>) -> PyResult<usize> {
        let (inner, dtypes) = (self.0.inner()?, parse_dtypes(dtype, kept)?);
        let bytes = numel * dtypes.kept_bytes();
        let lease = inner.packs.try_lease(bytes).map_err(|error| memory_error(&error))?;
        let lease = lease.ok_or_else(|| {
            PyRuntimeError::new_err(
                "no buffer is free for the gradients of a pack: the plan holds one buffer for each pack",
            )
        })?;
        Ok(inner.gradients.create_packed(dtypes, numel, whole_pages(lease, bytes)).0)
    }

    /// As `create_packed_gradient`, where the plan holds no buffer for it: in memory `outside` of the
    /// arena, or in a staging buffer, which then has no other use. `None` if none of those is spare.
    fn create_later_gradient(
        &self,
        py: Python<'_>,
        dtype: &str,
        numel: usize,
        kept: &str,
        outside: bool,
    ) -> PyResult<Option<usize>> {
        let dtypes = parse_dtypes(dtype, Some(kept))?;
        let inner = self.0.inner()?;
        if !outside {
            let created = py.detach(|| inner.gradients.create_packed_in_staging(dtypes, numel));
            return created.map(|id| id.map(|id| id.0)).map_err(|error| exec_error(&error));
        }
        let bytes = numel * dtypes.kept_bytes();
        let lease = py.detach(|| inner.outside.lease(bytes)).map_err(|error| memory_error(&error))?;
        Ok(Some(inner.gradients.create_packed(dtypes, numel, whole_pages(lease, bytes)).0))
    }

    /// Captures `numel` gradient elements at address `source`; returns `(sum of squares, any
    /// non-finite)`.
    fn capture(
        &self,
        py: Python<'_>,
        gradient: usize,
        start: usize,
        source: usize,
        numel: usize,
        accumulate: bool,
    ) -> PyResult<(f64, bool)> {
        let inner = self.0.inner()?;
        // SAFETY: the Python layer passes a live, contiguous CPU tensor of `numel` elements and
        // holds it for the call.
        let capture = || unsafe {
            inner.gradients.capture(GradientId(gradient), start, source as *const u8, numel, accumulate)
        };
        let stats = executed(py, capture)?;
        Ok((stats.sum_squares, stats.non_finite))
    }

    /// Begins to capture the whole gradient of a tensor that moves alone, in ranges, with the
    /// result of one `capture`. Until the end the gradient is empty.
    fn begin_gradient(&self, py: Python<'_>, gradient: usize, accumulate: bool) -> PyResult<GradientRanges> {
        let inner = self.0.inner()?;
        py.detach(|| GradientRanges::begin(&inner, gradient, accumulate))
    }

    /// Captures `numel` gradient elements at address `source` of the device, after `ready`. They
    /// have to live until the capture has ended. `sums` is the address and the number of the sums
    /// of squares of the blocks of `GRADIENT_BLOCK` elements (float64); behind them lies a flag
    /// (int32) that is not 0 if an element is not finite. Only a gradient that is not added to
    /// another has `sums`. Without them the gradient is measured on the host.
    #[allow(clippy::too_many_arguments)]
    #[pyo3(signature = (gradient, start, source, numel, accumulate, ready, sums))]
    fn capture_from_device(
        &self,
        py: Python<'_>,
        gradient: usize,
        start: usize,
        source: usize,
        numel: usize,
        accumulate: bool,
        ready: &Bound<'_, CudaEvent>,
        sums: Option<(usize, usize)>,
    ) -> PyResult<Capture> {
        let (inner, id, ready) = (self.0.inner()?, GradientId(gradient), ready.get().0.clone());
        let source = DeviceGradient { start, address: source, numel, accumulate, sums, ready };
        let (link, gradients) = (inner.link()?, &inner.gradients);
        // SAFETY: the Python layer passes live, contiguous tensors on the device and holds them
        // until the capture has ended.
        py.detach(|| unsafe { link.capture(gradients, id, source) })
            .map(Capture)
            .map_err(|error| exec_error(&error))
    }

    /// Writes gradients that are kept in staging buffers to the SSD, but for `stay` chunks, and waits
    /// for the end.
    fn spill_gradients(&self, py: Python<'_>, stay: usize) -> PyResult<()> {
        let inner = self.0.inner()?;
        executed(py, || inner.gradients.spill(stay))
    }

    /// Forgets a gradient.
    fn clear_gradient(&self, py: Python<'_>, gradient: usize) -> PyResult<()> {
        let inner = self.0.inner()?;
        py.detach(|| inner.gradients.clear(GradientId(gradient)));
        Ok(())
    }

    /// Copies a gradient of `bytes` bytes, in the dtype it is kept in, to address `target`.
    fn read_gradient(&self, py: Python<'_>, gradient: usize, target: usize, bytes: usize) -> PyResult<()> {
        let inner = self.0.inner()?;
        // SAFETY: the Python layer passes a live, contiguous CPU tensor of `bytes` bytes.
        executed(py, || inner.gradients.read(GradientId(gradient), unsafe { elements_mut(target, bytes) }))
    }
}

/// A gradient on its way, range by range. It has its values when `end` has returned, and is empty
/// if that never happens.
#[pyclass(frozen, module = "memascend._memascend")]
pub(crate) struct GradientRanges {
    /// Not kept alive: a handle that an exception holds must not keep a closed store's files.
    inner: Weak<RuntimeInner>,
    ranges: Mutex<Option<memascend_exec::GradientRanges>>,
}

impl GradientRanges {
    fn begin(inner: &Arc<RuntimeInner>, gradient: usize, accumulate: bool) -> PyResult<Self> {
        let ranges = inner.gradients.begin_ranges(GradientId(gradient), accumulate);
        let ranges = Mutex::new(Some(ranges.map_err(|error| exec_error(&error))?));
        Ok(Self { inner: Arc::downgrade(inner), ranges })
    }

    fn with<T: Send>(
        &self,
        py: Python<'_>,
        run: impl FnOnce(&RuntimeInner, &mut Option<memascend_exec::GradientRanges>) -> memascend_exec::Result<T>
        + Send,
    ) -> PyResult<T> {
        executed(py, || {
            let inner = self.inner.upgrade().ok_or(ExecError::Closed)?;
            run(&inner, &mut self.ranges.locked())
        })
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
        self.with(py, |inner, ranges| {
            let ranges = ranges.as_mut().ok_or_else(ended)?;
            // SAFETY: the Python layer passes a live, contiguous CPU tensor of `numel` elements and
            // holds it for the call.
            unsafe { inner.gradients.add_range(ranges, address as *const u8, numel) }
        })
    }

    /// Ends the capture; returns `(sum of squares, any non-finite)`. ValueError if elements are
    /// missing.
    fn end(&self, py: Python<'_>) -> PyResult<(f64, bool)> {
        self.with(py, |inner, slot| {
            let ranges = slot.as_mut().ok_or_else(ended)?;
            let stats = inner.gradients.end_ranges(ranges)?;
            *slot = None;
            Ok((stats.sum_squares, stats.non_finite))
        })
    }
}
