//! APOLLO: projected gradients and the factors of a matrix's channels.

use std::sync::Arc;

use memascend_kernels::{FactorOptions, Measured, Projector, channel_factors};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::host::{elements, elements_mut, parse_dtype};

/// How the gradient of a matrix is projected.
#[pyclass(frozen, eq, module = "memascend._memascend")]
#[derive(Clone, Copy, PartialEq)]
pub(crate) struct Projection(pub memascend_kernels::Projection);

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

    /// What every element of the random matrix is made from, with its index.
    #[getter]
    fn key(&self) -> u64 {
        self.0.key()
    }

    /// How many channels the gradient has.
    #[getter]
    fn channels(&self) -> usize {
        self.0.channels()
    }

    /// The random matrix as a list of float32, (elements of a channel, rank).
    fn matrix(&self) -> Vec<f32> {
        self.0.matrix()
    }

    /// Bytes of host memory that a projection takes while a gradient passes by.
    #[getter]
    fn bytes(&self) -> usize {
        Projector::bytes(&self.0)
    }

    /// How many float32 a projected gradient takes where it is put aside.
    #[getter]
    fn numbers(&self) -> usize {
        ProjectedGradient::numbers(&self.0)
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
            let mut projector = Projector::new(self.0, dtype, threads);
            // SAFETY: the Python layer passes a live, contiguous CPU tensor of the projection's shape
            // and of `dtype`, and holds it for the call.
            projector.add(unsafe { elements(gradient, self.0.rows * self.0.columns * dtype.bytes()) });
            ProjectedGradient::new(self.0, projector)
        }))
    }
}

/// What a gradient's projection has measured.
#[pyclass(frozen, module = "memascend._memascend")]
pub(crate) struct ProjectedGradient {
    projection: memascend_kernels::Projection,
    projected: Vec<f32>,
    sums: Vec<f64>,
}

impl ProjectedGradient {
    pub(crate) fn new(projection: memascend_kernels::Projection, projector: Projector) -> Self {
        let (projected, sums) = projector.finish();
        Self { projection, projected, sums }
    }

    /// How many numbers `into_numbers` returns.
    pub(crate) fn numbers(projection: &memascend_kernels::Projection) -> usize {
        projection.channels() * (projection.rank + 2)
    }

    /// All of it as float32: the bits of each channel's sum of squares are those of two numbers.
    pub(crate) fn into_numbers(self) -> Vec<f32> {
        let halves = |sum: &f64| {
            let bits = sum.to_bits();
            [f32::from_bits(bits as u32), f32::from_bits((bits >> 32) as u32)]
        };
        let mut numbers = self.projected;
        numbers.extend(self.sums.iter().flat_map(halves));
        numbers
    }

    /// What `into_numbers` was called on.
    pub(crate) fn from_numbers(projection: memascend_kernels::Projection, numbers: Vec<f32>) -> Self {
        let mut projected = numbers;
        let halves = projected.split_off(projection.channels() * projection.rank);
        let sum = |[low, high]: &[f32; 2]| {
            f64::from_bits(u64::from(low.to_bits()) | u64::from(high.to_bits()) << 32)
        };
        let sums = halves.as_chunks().0.iter().map(sum).collect();
        Self { projection, projected, sums }
    }
}

#[pymethods]
impl ProjectedGradient {
    /// Writes `Projection.numbers` float32 to an address: the projected gradient, (channels, rank), and
    /// behind it each channel's sum of squares, the bits of a float64 as two numbers.
    fn write(&self, address: usize) {
        let (projected, sums) = (self.projected.clone(), self.sums.clone());
        let numbers = Self { projection: self.projection, projected, sums }.into_numbers();
        // SAFETY: the Python layer passes a live, contiguous CPU tensor of this size.
        unsafe { elements_mut(address, numbers.len()) }.copy_from_slice(&numbers);
    }

    /// Updates the moments, (channels, rank) float32 at two addresses, and returns the channels'
    /// factors and the norm of the step.
    #[pyo3(signature = (moments, *, lr, betas, eps, scale, whole, scale_front, step, grad_scale, norm_before))]
    #[allow(clippy::too_many_arguments)]
    fn factors(
        &self,
        py: Python<'_>,
        moments: (usize, usize),
        lr: f64,
        betas: (f64, f64),
        eps: f64,
        scale: f64,
        whole: bool,
        scale_front: bool,
        step: u64,
        grad_scale: f32,
        norm_before: Option<f64>,
    ) -> (ChannelFactors, f64) {
        let options =
            FactorOptions { lr, betas, eps, scale, whole, scale_front, step, grad_scale, norm_before };
        py.detach(|| {
            let mut factors = vec![0.0; self.sums.len()];
            // SAFETY: the Python layer passes live, contiguous, distinct CPU tensors of this size and
            // holds them for the call.
            let (first, second) = unsafe {
                (elements_mut(moments.0, self.projected.len()), elements_mut(moments.1, self.projected.len()))
            };
            let measured = Measured { projected: &self.projected, sums: &self.sums };
            let norm = channel_factors(&options, measured, first, second, &mut factors);
            let by_column = self.projection.by_column();
            let factors = memascend_kernels::ChannelFactors::new(factors, self.projection.columns, by_column);
            (ChannelFactors(Arc::new(factors)), norm)
        })
    }
}

/// The factors of a matrix's channels in one step.
#[pyclass(frozen, module = "memascend._memascend")]
#[derive(Clone)]
pub(crate) struct ChannelFactors(pub Arc<memascend_kernels::ChannelFactors>);
