//! Arguments of a fetch: the tensors of a unit, and their updates.

use std::sync::Arc;

use memascend_exec::{Address, GradientId, GradientSource, Segment, UnitTensor, UpdatePlane, UpdateTensor};
use memascend_kernels::Algorithm;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use super::inner::RuntimeInner;
use crate::apollo::ChannelFactors;
use crate::handles::TensorId;
use crate::host::{Plane, Rule, StepScalars, parse_dtype};

#[derive(FromPyObject)]
pub(crate) struct SegmentArgument<'py> {
    start: usize,
    first_element: u64,
    numel: usize,
    rule: Bound<'py, Rule>,
    scalars: Bound<'py, StepScalars>,
    fresh: Vec<bool>,
    /// `(weight, gradient)` addresses for a tensor in host memory.
    host: Option<(usize, usize)>,
    /// Factors of a matrix's channels, for APOLLO.
    factors: Option<Bound<'py, ChannelFactors>>,
}

#[derive(FromPyObject)]
pub(crate) struct PlaneArgument<'py> {
    plane: Bound<'py, Plane>,
    id: Bound<'py, TensorId>,
    written: bool,
}

#[derive(FromPyObject)]
pub(crate) struct UpdateArgument<'py> {
    dtype: String,
    numel: usize,
    weight_offset: usize,
    planes: Vec<PlaneArgument<'py>>,
    kept_elements: usize,
    write_through: bool,
    gradient: Option<usize>,
    segments: Vec<SegmentArgument<'py>>,
}

impl UpdateArgument<'_> {
    /// The update as the executor takes it, whose gradient is yet to arrive, and with `factors` the factors
    /// of its channels too.
    pub(crate) fn arriving(self, factors: bool) -> PyResult<UpdateTensor> {
        self.tensor(factors)
    }

    /// The update as the executor takes it, its gradient still to be filled in; with `factors_follow` the
    /// factors of the channels, too.
    fn tensor(self, factors_follow: bool) -> PyResult<UpdateTensor> {
        let address = |value: usize| Address(value as *mut u8);
        let planes: Vec<UpdatePlane> = self
            .planes
            .into_iter()
            .map(|plane| UpdatePlane {
                plane: plane.plane.get().0,
                tensor: plane.id.get().0,
                written: plane.written,
            })
            .collect();
        let dtype = parse_dtype(&self.dtype)?;
        let alone = self.segments.len() == 1;
        let segments = self.segments.into_iter().map(|segment| {
            let rule = segment.rule.get().0;
            for plane in rule.planes() {
                if !planes.iter().any(|stored| stored.plane == plane) {
                    return Err(PyValueError::new_err(format!(
                        "the update of a parameter needs the state {:?}, which its tensor does not have in the store",
                        plane.name
                    )));
                }
                if plane.has_records() && !(alone && segment.start == 0) {
                    return Err(PyValueError::new_err("a parameter with 8-bit states has to be a tensor of its own, but this one is a part of a tensor"));
                }
            }
            if segment.fresh.len() != rule.planes().len() {
                return Err(PyValueError::new_err(format!(
                    "`fresh` has {} values, but the rule has {} planes: give one value for each plane",
                    segment.fresh.len(),
                    rule.planes().len()
                )));
            }
            if (segment.factors.is_some() || factors_follow) != (rule.algorithm == Algorithm::Apollo) {
                return Err(PyValueError::new_err(
                    "the rule \"apollo\", and no other, takes the factors of a matrix's channels",
                ));
            }
            if rule.weight.bytes() != dtype.bytes() {
                return Err(PyValueError::new_err(format!(
                    "the rule of a parameter is for weights of {} bytes, but its tensor is {}",
                    rule.weight.bytes(),
                    self.dtype
                )));
            }
            Ok(Segment {
                start: segment.start,
                first_element: segment.first_element,
                numel: segment.numel,
                rule,
                scalars: segment.scalars.get().0,
                fresh: segment.fresh,
                host: segment.host.map(|(weight, gradient)| (address(weight), address(gradient))),
                factors: segment.factors.map(|factors| Arc::clone(&factors.get().0)),
            })
        });
        Ok(UpdateTensor {
            dtype,
            numel: self.numel,
            weight_offset: self.weight_offset,
            segments: segments.collect::<PyResult<_>>()?,
            planes,
            kept_elements: self.kept_elements,
            write_through: self.write_through,
            gradient: GradientSource::addresses(),
        })
    }
}

/// The updates as the executor takes them, with their gradients.
pub(crate) fn update_tensors(
    inner: &RuntimeInner,
    updates: Vec<UpdateArgument<'_>>,
) -> PyResult<Vec<UpdateTensor>> {
    let gradients: Vec<_> = updates.iter().map(|update| update.gradient.map(GradientId)).collect();
    let mut updates = updates.into_iter().map(|update| update.tensor(false)).collect::<PyResult<Vec<_>>>()?;
    for (update, gradient) in updates.iter_mut().zip(gradients) {
        // Taken after all checks: a gradient that was taken cannot be put back.
        if let Some(id) = gradient {
            update.gradient = inner.gradients.take(id);
        }
    }
    Ok(updates)
}

/// Offsets of the tensors in their unit, from `(tensor, offset, bytes)` of each.
pub(crate) fn unit_tensors(tensors: &[(Bound<'_, TensorId>, usize, usize)]) -> Vec<UnitTensor> {
    let tensor = |(tensor, offset, bytes): &(Bound<'_, TensorId>, usize, usize)| UnitTensor {
        tensor: tensor.get().0,
        offset: *offset,
        bytes: *bytes,
    };
    tensors.iter().map(tensor).collect()
}
