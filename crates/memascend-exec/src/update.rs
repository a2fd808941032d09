//! What a job of the executor is told: the weights of a unit, and the updates of its tensors.

use std::sync::Arc;

use memascend_kernels::{Dtype, Plane, Rule, StepScalars};
use memascend_mem::Lease;
use memascend_store::TensorId;

use crate::{FilePart, GradientSource};

/// A raw address of host memory whose owner outlives the job it is given to.
#[derive(Debug, Clone, Copy)]
pub struct Address(pub *mut u8);

// SAFETY: an address is a number; whoever makes it vouches for the memory until the job has ended.
unsafe impl Send for Address {}
// SAFETY: as above.
unsafe impl Sync for Address {}

/// The weights of a unit: the tensors that make them up and the lease they are read into.
pub struct UnitWeights {
    /// The tensors, in the order of their places in the lease.
    pub tensors: Vec<UnitTensor>,
    /// What lies outside of the store and is only read.
    pub files: Arc<[FilePart]>,
    /// A buffer that holds them all.
    pub lease: Arc<Lease>,
}

/// The weights of one tensor of a unit.
#[derive(Debug, Clone, Copy)]
pub struct UnitTensor {
    /// Which it is in the store.
    pub tensor: TensorId,
    /// Where it begins in the unit, in bytes: a multiple of the page.
    pub offset: usize,
    /// Length in bytes, whole pages.
    pub bytes: usize,
}

/// Elements of a tensor that one optimizer step updates with the same hyper-parameters: one parameter.
pub struct Segment {
    /// First element within the tensor.
    pub start: usize,
    /// Number of elements.
    pub numel: usize,
    /// What the step computes, on which of the tensor's planes. States of 8 bits take a tensor of one segment.
    pub rule: Rule,
    /// Hyper-parameters of this step.
    pub scalars: StepScalars,
    /// For each of the rule's planes, whether the parameter has no such state yet: it begins as zeros, whatever the plane
    /// holds.
    pub fresh: Vec<bool>,
    /// The segment's weights and gradients in host memory, for a tensor that is not part of a unit.
    pub host: Option<(Address, Address)>,
}

/// One array of states of a tensor, on the SSD.
pub struct UpdatePlane {
    /// What is kept, and how.
    pub plane: Plane,
    /// Where: [`Plane::bytes`] of the tensor's elements.
    pub tensor: TensorId,
    /// Whether it has been written; before, it is zeros and is not read.
    pub written: bool,
}

/// One tensor of the store to be updated: its states and what to do.
pub struct UpdateTensor {
    /// Element type of weight and gradient.
    pub dtype: Dtype,
    /// Elements, padding included.
    pub numel: usize,
    /// Where the weights begin in the unit, in bytes: that of one of its tensors; ignored for tensors in host memory.
    pub weight_offset: usize,
    /// The states of every segment's rule; segments whose rules agree on a plane share it.
    pub planes: Vec<UpdatePlane>,
    /// The gradient.
    pub gradient: GradientSource,
    /// What to update, in ascending order; elements in no segment stay as they are.
    pub segments: Vec<Segment>,
}
