//! Projections of gradients, and moments of them that the store keeps.

use std::sync::Arc;

use memascend_exec::GradientId;
use memascend_guarded::guarded;
use memascend_kernels::Projected;
use pyo3::prelude::*;

use super::cell::RuntimeCell;
use crate::apollo::{ChannelFactors, FactorOptions, ProjectedGradient, Projection, StackedMoments};
use crate::errors::{exec_error, executed};
use crate::handles::TensorId;

/// Projections of the gradients of a `Runtime`.
#[pyclass(frozen, module = "memascend._memascend")]
pub(crate) struct RuntimeProjections(pub(super) Arc<RuntimeCell>);

#[guarded]
#[pymethods]
impl RuntimeProjections {
    /// As `capture` of the whole gradient of a tensor that moves alone, whose projection is put aside
    /// in `projected`: a gradient of bfloat16, which chunks of any model hold, of two elements for each
    /// of `Projection.numbers`.
    #[allow(clippy::too_many_arguments)]
    fn capture_projected(
        &self,
        py: Python<'_>,
        gradient: usize,
        source: usize,
        accumulate: bool,
        projection: &Bound<'_, Projection>,
        projected: usize,
        threads: usize,
    ) -> PyResult<(f64, bool)> {
        let (inner, projection) = (self.0.inner()?, projection.get().0);
        let capture = || {
            let (gradients, id) = (&inner.gradients, GradientId(gradient));
            let mut projector = gradients.projector(id, projection, threads);
            let (source, numel) = (source as *const u8, projection.rows * projection.columns);
            // SAFETY: the Python layer passes a live, contiguous CPU tensor of the projection's shape and
            // holds it for the call.
            let stats = unsafe {
                gradients.capture_and_project(id, 0, source, numel, accumulate, Some(&mut projector))
            }?;
            let measured = projector.finish();
            let (address, count) = (measured.numbers().as_ptr().cast::<u8>(), 2 * measured.numbers().len());
            // SAFETY: the numbers are ours, and live until the end of the call.
            unsafe { gradients.capture(GradientId(projected), 0, address, count, false) }?;
            Ok(stats)
        };
        let stats = executed(py, capture)?;
        Ok((stats.sum_squares, stats.non_finite))
    }

    /// Returns the projection that `capture_projected` has put aside in `projected`, and forgets it.
    fn take_projected(
        &self,
        py: Python<'_>,
        projection: &Bound<'_, Projection>,
        projected: usize,
    ) -> PyResult<ProjectedGradient> {
        let (inner, projection, id) = (self.0.inner()?, projection.get().0, GradientId(projected));
        executed(py, || {
            let mut measured = Projected::room(projection, inner.gradients.scratch());
            let (mut rest, halves) = (measured.numbers_mut(), 2 * Projected::count(&projection));
            inner.gradients.visit(id, 0, halves, |piece| {
                let numbers = piece.as_chunks().0;
                let (target, after) = std::mem::take(&mut rest).split_at_mut(numbers.len());
                target
                    .iter_mut()
                    .zip(numbers)
                    .for_each(|(number, &bytes)| *number = f32::from_ne_bytes(bytes));
                rest = after;
            })?;
            inner.gradients.clear(id);
            Ok(ProjectedGradient(measured))
        })
    }

    /// Projects the gradient that begins at element `start` of a tensor's, as it is kept.
    fn project_gradient(
        &self,
        py: Python<'_>,
        gradient: usize,
        start: usize,
        projection: &Bound<'_, Projection>,
        threads: usize,
    ) -> PyResult<ProjectedGradient> {
        let (inner, projection) = (self.0.inner()?, projection.get().0);
        executed(py, || {
            let projector = inner.gradients.project(GradientId(gradient), start, projection, threads)?;
            Ok(ProjectedGradient(projector.finish()))
        })
    }

    /// Projects elements `first .. first + count` of a gradient, which begin at element `start` of this rank's share of
    /// a tensor's. At address `carried_in` are `Projection.carried_bytes(first)` bytes of the rank before, and
    /// the bytes for the next one go to `carried_out`. Returns the measures of the complete channels.
    #[allow(clippy::too_many_arguments)]
    fn project_share(
        &self,
        py: Python<'_>,
        gradient: usize,
        start: usize,
        projection: &Bound<'_, Projection>,
        share: (usize, usize),
        carried: (usize, usize),
        threads: usize,
    ) -> PyResult<ProjectedGradient> {
        let (inner, projection) = (self.0.inner()?, projection.get().0);
        let gradient = GradientId(gradient);
        executed(py, || {
            ProjectedGradient::of_share(&inner, gradient, start, projection, share, carried, threads)
        })
    }

    /// Returns the measured channels of a gradient, whose numbers `ProjectedGradient.write` has put at an
    /// address.
    fn received_channels(
        &self,
        projection: &Bound<'_, Projection>,
        channels: usize,
        address: usize,
    ) -> PyResult<ProjectedGradient> {
        Ok(ProjectedGradient::received(&*self.0.inner()?, projection.get().0, channels, address))
    }

    /// Updates the moments of measured channels, (2, channels, rank) float32 in a tensor of the store, and writes the
    /// channels' squares to address `target`: (channels, 3) float64. `written` says whether it holds any yet.
    #[allow(clippy::too_many_arguments)]
    fn stored_squares(
        &self,
        py: Python<'_>,
        measured: &Bound<'_, ProjectedGradient>,
        moments: &Bound<'_, TensorId>,
        written: bool,
        threads: usize,
        options: &Bound<'_, FactorOptions>,
        target: usize,
    ) -> PyResult<()> {
        let (inner, moments) = (self.0.inner()?, moments.get().0);
        let (measured, options) = (measured.get(), options.get());
        executed(py, || {
            measured.stored_squares(inner.projecting(), moments, written, threads, options, target)
        })
    }

    /// `ProjectedGradient.factors` with both moments in a tensor of the store, (2, channels, rank) float32;
    /// `written` says whether it holds any yet.
    fn stored_factors(
        &self,
        py: Python<'_>,
        measured: &Bound<'_, ProjectedGradient>,
        moments: &Bound<'_, TensorId>,
        written: bool,
        threads: usize,
        options: &Bound<'_, FactorOptions>,
    ) -> PyResult<(ChannelFactors, f64)> {
        let (inner, moments) = (self.0.inner()?, moments.get().0);
        let (measured, options) = (measured.get(), options.get());
        executed(py, || measured.stored_factors(inner.projecting(), moments, written, threads, options))
    }

    /// Begins the next value of the moments of several matrices alike, which lie `bytes` apart. `written` says whether
    /// the tensor holds any yet.
    fn begin_stack(
        &self,
        moments: &Bound<'_, TensorId>,
        written: bool,
        bytes: usize,
    ) -> PyResult<StackedMoments> {
        let inner = self.0.inner()?;
        StackedMoments::begin(inner.projecting().0, moments.get().0, written, bytes)
            .map_err(|error| exec_error(&error))
    }

    /// `ProjectedGradient.factors` with both moments of matrix number `matrix` of a stack.
    fn stacked_factors(
        &self,
        py: Python<'_>,
        measured: &Bound<'_, ProjectedGradient>,
        stack: &Bound<'_, StackedMoments>,
        matrix: usize,
        threads: usize,
        options: &Bound<'_, FactorOptions>,
    ) -> PyResult<(ChannelFactors, f64)> {
        let inner = self.0.inner()?;
        let (measured, stack, options) = (measured.get(), stack.get(), options.get());
        executed(py, || measured.stacked_factors(inner.projecting(), stack, matrix, threads, options))
    }

    /// Leaves the moments of matrix number `matrix` of a stack as they are.
    fn keep_stacked(&self, py: Python<'_>, stack: &Bound<'_, StackedMoments>, matrix: usize) -> PyResult<()> {
        let (inner, stack) = (self.0.inner()?, stack.get());
        executed(py, || stack.keep(inner.projecting(), matrix))
    }
}
