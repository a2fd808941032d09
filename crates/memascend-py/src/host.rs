use memascend_optim::kernels::{AdamwScalars, GradientStats, stats_bf16, stats_f32};
use memascend_optim::{Dtype, HostTensor};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// The element type named by torch: `bfloat16` or `float32`.
pub(crate) fn parse_dtype(name: &str) -> PyResult<Dtype> {
    match name {
        "bfloat16" => Ok(Dtype::Bf16),
        "float32" => Ok(Dtype::F32),
        other => Err(PyValueError::new_err(format!("unsupported dtype {other}: use bfloat16 or float32"))),
    }
}

/// `(lr, beta1, beta2, eps, weight_decay, step, grad_scale)` of one AdamW step.
pub(crate) type ScalarsTuple = (f64, f64, f64, f64, f64, u64, f32);

pub(crate) fn scalars(tuple: ScalarsTuple) -> AdamwScalars {
    let (lr, beta1, beta2, eps, weight_decay, step, grad_scale) = tuple;
    AdamwScalars::new(lr, beta1, beta2, eps, weight_decay, step, grad_scale)
}

/// # Safety
/// As [`std::slice::from_raw_parts`], but any address will do for an empty slice: torch gives 0.
pub(crate) unsafe fn bytes<'a>(address: usize, length: usize) -> &'a [u8] {
    if length == 0 {
        return &[];
    }
    // SAFETY: forwarded to the caller.
    unsafe { std::slice::from_raw_parts(address as *const u8, length) }
}

/// # Safety
/// As [`std::slice::from_raw_parts_mut`], but any address will do for an empty slice.
pub(crate) unsafe fn bytes_mut<'a>(address: usize, length: usize) -> &'a mut [u8] {
    if length == 0 {
        return &mut [];
    }
    // SAFETY: forwarded to the caller.
    unsafe { std::slice::from_raw_parts_mut(address as *mut u8, length) }
}

/// One AdamW step on a contiguous tensor in host memory, in place. Addresses are `Tensor.data_ptr()` of
/// contiguous CPU tensors of `numel` elements: weight and gradient of `dtype`, moments fp32, low int16.
#[pyfunction]
#[pyo3(signature = (dtype, numel, weight, low, exp_avg, exp_avg_sq, gradient, scalars, threads))]
#[allow(clippy::too_many_arguments)]
pub(crate) fn adamw_host(
    py: Python<'_>,
    dtype: &str,
    numel: usize,
    weight: usize,
    low: usize,
    exp_avg: usize,
    exp_avg_sq: usize,
    gradient: usize,
    scalars: ScalarsTuple,
    threads: usize,
) -> PyResult<()> {
    let dtype = parse_dtype(dtype)?;
    let scalars = self::scalars(scalars);
    py.detach(|| {
        // SAFETY: the Python layer passes live, contiguous, distinct CPU tensors of these sizes and holds them
        // for the duration of the call.
        let tensor = unsafe {
            HostTensor {
                dtype,
                weight: bytes_mut(weight, numel * dtype.bytes()),
                low: bytes_mut(low, numel * dtype.low_bytes()),
                exp_avg: bytes_mut(exp_avg, numel * memascend_optim::MOMENT_BYTES),
                exp_avg_sq: bytes_mut(exp_avg_sq, numel * memascend_optim::MOMENT_BYTES),
                gradient: bytes(gradient, numel * dtype.bytes()),
            }
        };
        memascend_optim::adamw_host(tensor, &scalars, threads);
    });
    Ok(())
}

/// `(sum of squares, any non-finite)` of a contiguous gradient in host memory, in the fixed order that
/// captures use too.
#[pyfunction]
pub(crate) fn gradient_stats(
    py: Python<'_>,
    dtype: &str,
    numel: usize,
    gradient: usize,
) -> PyResult<(f64, bool)> {
    let dtype = parse_dtype(dtype)?;
    Ok(py.detach(|| {
        let mut stats = GradientStats::default();
        if numel > 0 {
            // SAFETY: the Python layer passes a live, contiguous CPU tensor of `numel` elements of `dtype`.
            unsafe {
                match dtype {
                    Dtype::Bf16 => {
                        stats_bf16(std::slice::from_raw_parts(gradient as *const u16, numel), &mut stats)
                    }
                    Dtype::F32 => {
                        stats_f32(std::slice::from_raw_parts(gradient as *const f32, numel), &mut stats)
                    }
                }
            }
        }
        (stats.sum_squares, stats.non_finite)
    }))
}

/// Has malloc give large freed blocks back to the system, in the whole process. Called before a model is built,
/// whose passing weights would leave holes in the heap.
#[pyfunction]
pub(crate) fn return_large_blocks_to_system() {
    memascend_mem::return_large_blocks_to_system();
}
