//! APOLLO: projected gradients and the factors of a matrix's channels.

use std::sync::Arc;

use memascend_exec::{GradientId, InFlightCounter, ProjectedNumbers, Staging};
use memascend_guarded::guarded;
use memascend_kernels::{
    ChannelSquares, Projected, Projector, Purpose, Scratch, channel_factors, factors_of, squares_of,
};
use memascend_store::{Extent, Rewrite, TensorId};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::handles;
use crate::host::{elements, elements_mut, parse_dtype};
use crate::runtime::RuntimeInner;

/// How the gradient of a matrix is projected.
#[pyclass(frozen, eq, module = "memascend._memascend")]
#[derive(Clone, Copy, PartialEq)]
pub(crate) struct Projection(pub memascend_kernels::Projection);

#[guarded]
#[pymethods]
impl Projection {
    #[new]
    fn new(rows: usize, columns: usize, rank: usize, seed: u64, redraw: u64) -> PyResult<Self> {
        if rows == 0 || columns == 0 || rank == 0 {
            return Err(PyValueError::new_err(
                "a matrix without elements, or a rank of 0, has no projection",
            ));
        }
        Ok(Self(memascend_kernels::Projection { rows, columns, rank, seed, redraw }))
    }

    /// Rows of the gradient.
    #[getter]
    fn rows(&self) -> usize {
        self.0.rows
    }

    /// Columns of the gradient.
    #[getter]
    fn columns(&self) -> usize {
        self.0.columns
    }

    /// How many numbers stand for each channel.
    #[getter]
    fn rank(&self) -> usize {
        self.0.rank
    }

    /// Every element of the random matrix is made from this and its index.
    #[getter]
    fn key(&self) -> u64 {
        self.0.key()
    }

    /// How many channels the gradient has.
    #[getter]
    fn channels(&self) -> usize {
        self.0.channels()
    }

    /// Bytes of host memory that a projection takes while a gradient passes by.
    #[getter]
    fn bytes(&self) -> usize {
        Projector::bytes(&self.0, &(0..self.0.elements()))
    }

    /// `bytes` of a rank that has elements `first .. end` of the gradient.
    fn share_bytes(&self, first: usize, end: usize) -> usize {
        Projector::bytes(&self.0, &(first..end))
    }

    /// Bytes that the rank with the element before `end` hands on to the one with element `end`.
    fn carried_bytes(&self, end: usize) -> usize {
        self.0.carried_bytes(end)
    }

    /// The factors of all channels and the norm of the step, from the squares that `Runtime.stored_squares` has written:
    /// (channels, 3) float64 at an address.
    fn factors(&self, options: &Bound<'_, FactorOptions>, squares: usize) -> (ChannelFactors, f64) {
        // SAFETY: the Python layer passes a live, contiguous CPU tensor of this size.
        let squares: &[f64] = unsafe { elements(squares, 3 * self.0.channels()) };
        let of_channel =
            |&[projected, step, gradient]: &[f64; 3]| ChannelSquares { projected, step, gradient };
        let squares: Vec<ChannelSquares> = squares.as_chunks().0.iter().map(of_channel).collect();
        let mut factors = vec![0.0; squares.len()];
        let norm = factors_of(&options.get().0, &squares, &mut factors);
        (ChannelFactors::of(&self.0, factors), norm)
    }

    /// How many float32 a projected gradient takes where it is put aside.
    #[getter]
    fn numbers(&self) -> usize {
        Projected::count(&self.0)
    }

    /// Projects a contiguous gradient of `dtype` in host memory.
    fn of(
        &self,
        py: Python<'_>,
        dtype: &str,
        gradient: usize,
        threads: usize,
    ) -> PyResult<ProjectedGradient> {
        let dtype = parse_dtype(dtype)?;
        Ok(py.detach(|| {
            let mut projector = Projector::new(self.0, dtype, threads, &Arc::default());
            // SAFETY: the Python layer passes a live, contiguous CPU tensor of the projection's shape
            // and of `dtype`, and holds it for the call.
            projector.add(unsafe { elements(gradient, self.0.rows * self.0.columns * dtype.bytes()) });
            ProjectedGradient(projector.finish())
        }))
    }
}

/// The inputs of the factors of one step, beside the gradient.
#[pyclass(frozen, module = "memascend._memascend")]
#[derive(Clone, Copy)]
pub(crate) struct FactorOptions(memascend_kernels::FactorOptions);

#[guarded]
#[pymethods]
impl FactorOptions {
    #[new]
    #[pyo3(signature = (*, lr, betas, eps, scale, whole, scale_front, step, grad_scale, norm_before))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        lr: f64,
        betas: (f64, f64),
        eps: f64,
        scale: f64,
        whole: bool,
        scale_front: bool,
        step: u64,
        grad_scale: f32,
        norm_before: Option<f64>,
    ) -> Self {
        Self(memascend_kernels::FactorOptions {
            lr,
            betas,
            eps,
            scale,
            whole,
            scale_front,
            step,
            grad_scale,
            norm_before,
        })
    }
}

/// The measures of a gradient's projection.
#[pyclass(frozen, module = "memascend._memascend")]
pub(crate) struct ProjectedGradient(pub Projected);

#[guarded]
#[pymethods]
impl ProjectedGradient {
    /// Updates the moments, (channels, rank) float32 at two addresses, and returns the channels'
    /// factors and the norm of the step.
    fn factors(
        &self,
        py: Python<'_>,
        moments: (usize, usize),
        threads: usize,
        options: &Bound<'_, FactorOptions>,
    ) -> (ChannelFactors, f64) {
        let (options, elements) = (options.get(), self.0.values().len());
        py.detach(|| {
            // SAFETY: the Python layer passes live, contiguous, distinct CPU tensors of this size and
            // holds them for the call.
            let (first, second) =
                unsafe { (elements_mut(moments.0, elements), elements_mut(moments.1, elements)) };
            self.find(options, first, second, threads)
        })
    }

    /// How many channels were measured.
    #[getter]
    fn channels(&self) -> usize {
        self.0.channels()
    }

    /// Whether every element of these channels is zero.
    #[getter]
    fn is_zero(&self) -> bool {
        self.0.sums().iter().all(|&sum| sum == 0.0)
    }

    /// Writes the measures of some channels to an address: `Projection.rank` and 2 more float32 for each.
    fn write(&self, first: usize, channels: usize, address: usize) {
        // SAFETY: the Python layer passes a live CPU tensor of so many numbers.
        let target = unsafe { elements_mut(address, channels * (self.0.projection().rank + 2)) };
        self.0.copy_part(first..first + channels, target);
    }
}

impl ProjectedGradient {
    fn find(
        &self,
        options: &FactorOptions,
        first_moment: &mut [f32],
        second_moment: &mut [f32],
        threads: usize,
    ) -> (ChannelFactors, f64) {
        let mut factors = vec![0.0; self.0.channels()];
        let norm = channel_factors(&options.0, &self.0, first_moment, second_moment, &mut factors, threads);
        (ChannelFactors::of(self.0.projection(), factors), norm)
    }

    /// Projects a share of a gradient: see `RuntimeProjections.project_share`.
    pub(crate) fn of_share(
        inner: &RuntimeInner,
        gradient: GradientId,
        start: usize,
        projection: memascend_kernels::Projection,
        (first, count): (usize, usize),
        carried: (usize, usize),
        threads: usize,
    ) -> memascend_exec::Result<Self> {
        let (gradients, end) = (&inner.gradients, first + count);
        // SAFETY: the Python layer passes live, distinct CPU tensors of these sizes, and holds them for the call.
        let (carried_in, carried_out) = unsafe {
            let bytes = |end| projection.carried_bytes(end);
            (elements(carried.0, bytes(first)), elements_mut(carried.1, bytes(end)))
        };
        let mut projector = gradients.share_projector(gradient, projection, first..end, threads);
        projector.go_on(carried_in);
        gradients.project_share(gradient, start, &mut projector)?;
        Ok(Self(projector.hand_on(carried_out, gradients.scratch())))
    }

    /// The measures of some channels by another process: see `RuntimeProjections.received_channels`.
    pub(crate) fn received(
        inner: &RuntimeInner,
        projection: memascend_kernels::Projection,
        channels: usize,
        address: usize,
    ) -> Self {
        let mut measured = Projected::room_of(projection, channels, inner.gradients.scratch());
        let numbers = measured.numbers_mut();
        // SAFETY: the Python layer passes a live CPU tensor of so many numbers.
        numbers.copy_from_slice(unsafe { elements(address, numbers.len()) });
        Self(measured)
    }

    /// `factors` with both moments in a tensor of the store of `staging`, (2, channels, rank) float32;
    /// `written` says whether it holds any yet.
    pub(crate) fn stored_factors(
        &self,
        (staging, scratch): (&Staging, &Arc<Scratch>),
        moments: TensorId,
        written: bool,
        threads: usize,
        options: &FactorOptions,
    ) -> memascend_exec::Result<(ChannelFactors, f64)> {
        let find = |first: &mut [f32], second: &mut [f32]| self.find(options, first, second, threads);
        self.with_stored((staging, scratch), moments, written, find)
    }

    /// Updates moments in a tensor of the store as `stored_factors` does, and writes the channels' squares to `target`.
    pub(crate) fn stored_squares(
        &self,
        (staging, scratch): (&Staging, &Arc<Scratch>),
        moments: TensorId,
        written: bool,
        threads: usize,
        options: &FactorOptions,
        target: usize,
    ) -> memascend_exec::Result<()> {
        let squares = self.with_stored((staging, scratch), moments, written, |first, second| {
            squares_of(&options.0, &self.0, first, second, threads)
        })?;
        // SAFETY: the Python layer passes a live CPU tensor of this size, and holds it for the call.
        let target: &mut [f64] = unsafe { elements_mut(target, 3 * squares.len()) };
        for (target, of) in target.as_chunks_mut().0.iter_mut().zip(squares) {
            *target = [of.projected, of.step, of.gradient];
        }
        Ok(())
    }

    /// `factors` with both moments of matrix number `matrix` of a stack.
    pub(crate) fn stacked_factors(
        &self,
        (staging, scratch): (&Staging, &Arc<Scratch>),
        stack: &StackedMoments,
        matrix: usize,
        threads: usize,
        options: &FactorOptions,
    ) -> memascend_exec::Result<(ChannelFactors, f64)> {
        let find = |first: &mut [f32], second: &mut [f32]| self.find(options, first, second, threads);
        let offset = matrix * stack.bytes;
        let source = stack.written.then_some((stack.rewrite.source, offset));
        self.with_moments((staging, scratch), source, || Ok((stack.rewrite.target, offset)), find)
    }

    /// Reads both moments of the measured channels, has `step` change them, and writes them.
    fn with_stored<T>(
        &self,
        (staging, scratch): (&Staging, &Arc<Scratch>),
        moments: TensorId,
        written: bool,
        step: impl FnOnce(&mut [f32], &mut [f32]) -> T,
    ) -> memascend_exec::Result<T> {
        let source = written.then(|| (staging.store().current(moments), 0));
        let target = || Ok((staging.store().rewrite(moments)?.target, 0));
        self.with_moments((staging, scratch), source, target, step)
    }

    /// Reads both moments of the measured channels from an extent and an offset there, zeros without one, has `step`
    /// change them, and writes them to another.
    fn with_moments<T>(
        &self,
        (staging, scratch): (&Staging, &Arc<Scratch>),
        source: Option<(Extent, usize)>,
        target: impl FnOnce() -> memascend_exec::Result<(Extent, usize)>,
        step: impl FnOnce(&mut [f32], &mut [f32]) -> T,
    ) -> memascend_exec::Result<T> {
        let count = self.0.values().len();
        let mut both = scratch.take(Purpose::Moments, 2 * count);
        read_moments(staging, source, &mut both)?;
        let (first, second) = both.split_at_mut(count);
        let found = step(first, second);
        write_moments(staging, target()?, &both)?;
        Ok(found)
    }
}

/// Fills `both` from an extent, from an offset on; with zeros without one.
fn read_moments(
    staging: &Staging,
    source: Option<(Extent, usize)>,
    both: &mut [f32],
) -> memascend_exec::Result<()> {
    let Some((extent, offset)) = source else {
        both.fill(0.0);
        return Ok(());
    };
    let (address, bytes) = (both.as_mut_ptr() as usize, size_of_val(both));
    // SAFETY: these are the bytes of `both`, which nothing else uses meanwhile.
    staging.read_at(extent, offset, unsafe { elements_mut(address, bytes) })
}

/// Writes `both` to an extent, from an offset on.
fn write_moments(
    staging: &Staging,
    (extent, offset): (Extent, usize),
    both: &[f32],
) -> memascend_exec::Result<()> {
    let pending = Arc::new(InFlightCounter::default());
    let (address, bytes) = (both.as_ptr() as usize, size_of_val(both));
    // SAFETY: these are the bytes of `both`, which nothing writes meanwhile; the write copies them.
    staging.write_at(extent, offset, unsafe { elements(address, bytes) }, &pending)?;
    pending.wait()
}

/// Both moments of several matrices alike in one tensor of the store, whose next value a step writes: (2, channels,
/// rank) float32 of each, from a page on.
#[pyclass(frozen, module = "memascend._memascend")]
pub(crate) struct StackedMoments {
    rewrite: Rewrite,
    /// Whether the tensor holds any yet.
    written: bool,
    /// The distance from one matrix's moments to the next one's.
    bytes: usize,
}

impl StackedMoments {
    /// Begins the next value of the tensor: `stacked_factors` or `keep` then writes each matrix.
    pub(crate) fn begin(
        staging: &Staging,
        moments: TensorId,
        written: bool,
        bytes: usize,
    ) -> memascend_exec::Result<Self> {
        Ok(Self { rewrite: staging.store().rewrite(moments)?, written, bytes })
    }

    /// Leaves the moments of a matrix as they are in the next value.
    pub(crate) fn keep(
        &self,
        (staging, scratch): (&Staging, &Arc<Scratch>),
        matrix: usize,
    ) -> memascend_exec::Result<()> {
        let Rewrite { source, target } = self.rewrite;
        if self.written && source == target {
            return Ok(());
        }
        let offset = matrix * self.bytes;
        let mut both = scratch.take(Purpose::Moments, self.bytes / size_of::<f32>());
        read_moments(staging, self.written.then_some((source, offset)), &mut both)?;
        write_moments(staging, (target, offset), &both)
    }
}

/// How the factors of a matrix's channels come of the numbers that a device has measured of its gradient.
#[derive(FromPyObject)]
pub(crate) struct MeasuredArgument<'py> {
    projection: Bound<'py, Projection>,
    /// Address of the numbers on the device, float32.
    address: usize,
    moments: Bound<'py, handles::TensorId>,
    written: bool,
    threads: usize,
    options: Bound<'py, FactorOptions>,
}

impl MeasuredArgument<'_> {
    /// The numbers as a job takes them that finds the factors, and the moments in the store of `inner`.
    pub(crate) fn numbers(&self, inner: &RuntimeInner) -> ProjectedNumbers {
        let (projection, moments, options) =
            (self.projection.get().0, self.moments.get().0, *self.options.get());
        let (written, threads) = (self.written, self.threads);
        let (staging, scratch) = (Arc::clone(&inner.staging), Arc::clone(inner.gradients.scratch()));
        let find = move |bytes: &[u8]| {
            let mut measured = Projected::room(projection, &scratch);
            let numbers = measured.numbers_mut().iter_mut();
            numbers.zip(bytes.as_chunks().0).for_each(|(number, bytes)| *number = f32::from_ne_bytes(*bytes));
            let measured = ProjectedGradient(measured);
            let (factors, norm) =
                measured.stored_factors((&staging, &scratch), moments, written, threads, &options)?;
            Ok((factors.0, norm))
        };
        let bytes = Projected::count(&projection) * size_of::<f32>();
        ProjectedNumbers { address: self.address, bytes, find: Box::new(find) }
    }
}

/// The factors of a matrix's channels in one step.
#[pyclass(frozen, module = "memascend._memascend")]
#[derive(Clone)]
pub(crate) struct ChannelFactors(pub Arc<memascend_kernels::ChannelFactors>);

impl ChannelFactors {
    fn of(projection: &memascend_kernels::Projection, factors: Vec<f32>) -> Self {
        let (columns, by_column) = (projection.columns, projection.by_column());
        Self(Arc::new(memascend_kernels::ChannelFactors::new(factors, columns, by_column)))
    }
}
