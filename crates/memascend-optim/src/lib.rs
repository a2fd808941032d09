//! Arithmetic on slices, and the step executor that pipelines read → kernel → write without Python.

pub mod kernels;

mod device;
mod error;
mod executor;
mod files;
mod gradients;
mod host;
mod overflow;
mod pending;
mod staging;
mod stash;

pub use device::{Capture, DeviceCounters, DeviceEvent, DeviceLink, Restore};
pub use error::{OptimError, Result};
pub use executor::{Address, Executor, Segment, Ticket, UnitTensor, UnitWeights, UpdatePlane, UpdateTensor};
pub use files::FilePart;
pub use gradients::{GradientId, GradientSource, Gradients};
pub use host::{HostTensor, step_host};
pub use overflow::{CheckedOutcome, CheckedTensor, CheckedWork, check_overflow};
pub use pending::{Pending, Underway};
pub use staging::Staging;
pub use stash::Stash;

/// Element type of a weight and of its gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dtype {
    /// bfloat16.
    Bf16,
    /// float16.
    F16,
    /// float32.
    F32,
}

impl Dtype {
    /// Bytes of one weight or gradient element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::Bf16 | Self::F16 => 2,
            Self::F32 => 4,
        }
    }
}
