//! The overflow check of tensors in host memory.

use memascend_guarded::guarded;
use memascend_kernels::{CheckedTensor, CheckedWork};
use pyo3::prelude::*;

use crate::host::parse_dtype;

/// `(any non-finite, sum of squares of each tensor, blocks read)` of dense tensors in host memory,
/// given as (dtype, numel, `Tensor.data_ptr()`). `unscale` multiplies them in place. Without `norm`
/// there are no sums.
#[guarded]
#[pyfunction]
pub(crate) fn check_overflow(
    py: Python<'_>,
    tensors: Vec<(String, usize, usize)>,
    norm: bool,
    unscale: Option<f32>,
    threads: usize,
) -> PyResult<(bool, Vec<f64>, usize)> {
    let tensors = tensors
        .into_iter()
        .map(|(dtype, numel, address)| {
            // SAFETY: the Python layer passes live, dense CPU tensors of these sizes and holds them
            // for the duration of the call. It refuses to unscale tensors that overlap.
            Ok(unsafe { CheckedTensor::new(parse_dtype(&dtype)?, numel, address as *mut u8) })
        })
        .collect::<PyResult<Vec<_>>>()?;
    let work = unscale.map_or(CheckedWork::Look, CheckedWork::Unscale);
    let mut sums = vec![0.0; if norm { tensors.len() } else { 0 }];
    let outcome = py.detach(|| memascend_kernels::check_overflow(&tensors, work, threads, &mut sums));
    Ok((outcome.non_finite, sums, outcome.blocks))
}
