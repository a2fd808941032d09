//! What Python passes of a fetch: the tensors of a unit, and the updates on the way.

use memascend_exec::{Address, GradientSource, Segment, UnitTensor, UpdatePlane, UpdateTensor};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::handles::TensorId;
use crate::host::{Plane, Rule, StepScalars, parse_dtype};

#[derive(FromPyObject)]
pub(crate) struct SegmentArgument<'py> {
    start: usize,
    numel: usize,
    rule: Bound<'py, Rule>,
    scalars: Bound<'py, StepScalars>,
    fresh: Vec<bool>,
    /// `(weight, gradient)` addresses for a tensor in host memory.
    host: Option<(usize, usize)>,
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
    pub gradient: Option<usize>,
    segments: Vec<SegmentArgument<'py>>,
}

impl UpdateArgument<'_> {
    /// What the executor takes, but for the gradient.
    pub(crate) fn tensor(self) -> PyResult<UpdateTensor> {
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
        let numel = self.numel;
        let segments = self.segments.into_iter().map(|segment| {
            let rule = segment.rule.get().0;
            for plane in rule.planes() {
                if !planes.iter().any(|kept| kept.plane == plane) {
                    let what = plane.name;
                    return Err(PyValueError::new_err(format!(
                        "an update of {what}, for which there is no room"
                    )));
                }
                if plane.has_records() && (segment.start, segment.numel) != (0, numel) {
                    return Err(PyValueError::new_err("8-bit states of a part of a tensor"));
                }
            }
            if segment.fresh.len() != rule.planes().len() {
                return Err(PyValueError::new_err("not a word on each plane on whether it is fresh"));
            }
            if rule.weight.bytes() != dtype.bytes() {
                return Err(PyValueError::new_err(format!("a rule of another dtype than {}", self.dtype)));
            }
            Ok(Segment {
                start: segment.start,
                numel: segment.numel,
                rule,
                scalars: segment.scalars.get().0,
                fresh: segment.fresh,
                host: segment.host.map(|(weight, gradient)| (address(weight), address(gradient))),
            })
        });
        Ok(UpdateTensor {
            dtype,
            numel,
            weight_offset: self.weight_offset,
            segments: segments.collect::<PyResult<_>>()?,
            planes,
            gradient: GradientSource::addresses(),
        })
    }
}

/// Where the tensors of a unit lie in it, from `(tensor, offset, bytes)` of each.
pub(crate) fn unit_tensors(tensors: &[(Bound<'_, TensorId>, usize, usize)]) -> Vec<UnitTensor> {
    let tensor = |(tensor, offset, bytes): &(Bound<'_, TensorId>, usize, usize)| UnitTensor {
        tensor: tensor.get().0,
        offset: *offset,
        bytes: *bytes,
    };
    tensors.iter().map(tensor).collect()
}
