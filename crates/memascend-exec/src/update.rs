//! The description of a job: the weights of a unit, and the updates of its tensors.

use std::sync::Arc;

use memascend_kernels::{ChannelFactors, Dtype, Plane, Rule, StepScalars};
use memascend_mem::Lease;
use memascend_store::TensorId;

use crate::{FilePart, GradientSource};

/// A raw address of host memory whose owner outlives the job it is given to.
#[derive(Debug, Clone, Copy)]
pub struct Address(pub *mut u8);

// SAFETY: an address is a number; the code that makes it vouches for the memory until the job has
// ended.
unsafe impl Send for Address {}
// SAFETY: as above.
unsafe impl Sync for Address {}

/// The weights of a unit: the tensors that make them up, and the lease that they are read into if
/// there is one.
pub struct UnitWeights {
    /// The tensors, in the order of their offsets in the lease.
    pub tensors: Vec<UnitTensor>,
    /// Frozen weights that are read from files outside the store.
    pub files: Arc<[FilePart]>,
    /// A buffer that holds them all. Without one only the tensors that are updated are read, each
    /// piece into the update slot, and `files` are not.
    pub lease: Option<Arc<Lease>>,
    /// Keep the weights in the lease until [`Store::release`](memascend_store::Store::release): the next
    /// job on the same lease finds them there, and reads nothing.
    pub resident: bool,
    /// Write updated weights that are resident, whatever the update says of resident data.
    pub write_through: bool,
}

/// The weights of one tensor of a unit.
#[derive(Debug, Clone, Copy)]
pub struct UnitTensor {
    /// The tensor in the store.
    pub tensor: TensorId,
    /// Where it begins in the unit, in bytes: a multiple of the page.
    pub offset: usize,
    /// Length in bytes, whole pages.
    pub bytes: usize,
}

/// Elements of a tensor that one optimizer step updates with the same hyper-parameters: one
/// parameter, or the part of one that a store has which is divided over ranks.
pub struct Segment {
    /// First element within the tensor.
    pub start: usize,
    /// Which element of the parameter that is, for random numbers; a multiple of
    /// [`GRADIENT_BLOCK`](memascend_kernels::GRADIENT_BLOCK).
    pub first_element: u64,
    /// Number of elements.
    pub numel: usize,
    /// The rule of the step, and the tensor's planes. With 8-bit states the segment
    /// is the whole tensor, but for padding behind it.
    pub rule: Rule,
    /// Hyper-parameters of this step.
    pub scalars: StepScalars,
    /// For each of the rule's planes, whether the parameter has no such state yet. A fresh state
    /// begins as zeros, whatever the plane holds.
    pub fresh: Vec<bool>,
    /// The segment's weights and gradients in host memory, for a tensor that is not part of a unit.
    pub host: Option<(Address, Address)>,
    /// The factors of a matrix's channels, for APOLLO: the segment is the whole matrix.
    pub factors: Option<Arc<ChannelFactors>>,
}

/// One array of states of a tensor, on the SSD.
pub struct UpdatePlane {
    /// Which state, and its number format.
    pub plane: Plane,
    /// The tensor in the store that holds it, of [`Plane::bytes`] of the elements.
    pub tensor: TensorId,
    /// Whether it was ever written. If not, it is zeros and is not read.
    pub written: bool,
}

/// The update of one tensor: its states, its gradient, and the step of each parameter.
pub struct UpdateTensor {
    /// Element type of the weight, and of the gradient as the kernels take it.
    pub dtype: Dtype,
    /// Elements, padding included.
    pub numel: usize,
    /// Where the weights begin in the unit, in bytes: the offset of one of its tensors. Ignored for
    /// tensors in host memory.
    pub weight_offset: usize,
    /// The states of all segments' rules; segments whose rules have a plane in common share it.
    pub planes: Vec<UpdatePlane>,
    /// How many elements, counted from the first, keep their states in memory, as far as there is
    /// room: see [`ResidentStates`](crate::ResidentStates).
    pub kept_elements: usize,
    /// Whether resident results are written as well. Otherwise the next commit writes them.
    pub write_through: bool,
    /// The gradient.
    pub gradient: GradientSource,
    /// The segments to update, in ascending order. Elements outside all segments stay as they are.
    pub segments: Vec<Segment>,
}
