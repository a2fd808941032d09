//! Arithmetic on slices, and the step executor that pipelines read → kernel → write without Python.

pub mod kernels;

mod error;
mod executor;
mod gradients;
mod host;
mod overflow;
mod pending;
mod staging;
mod stash;

pub use error::{OptimError, Result};
pub use executor::{Address, Executor, Segment, Ticket, UnitWeights, UpdateTensor};
pub use gradients::{GradientId, GradientSource, Gradients};
pub use host::{HostTensor, adamw_host};
pub use overflow::{CheckedDtype, CheckedOutcome, CheckedTensor, CheckedWork, check_overflow};
pub use pending::{Pending, Underway};
pub use staging::Staging;
pub use stash::Stash;

/// Element type of a weight and of its gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dtype {
    /// bfloat16 weight, the high half of a split fp32 master.
    Bf16,
    /// fp32 weight, its own master.
    F32,
}

impl Dtype {
    /// Bytes of one weight or gradient element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::Bf16 => 2,
            Self::F32 => 4,
        }
    }

    /// Bytes of the low half of the master per element: none where the weight is its own master.
    pub const fn low_bytes(self) -> usize {
        match self {
            Self::Bf16 => 2,
            Self::F32 => 0,
        }
    }
}

/// Bytes of one element of an fp32 moment.
pub const MOMENT_BYTES: usize = 4;

/// Bytes of staging per element of an update: two moments, the low half, and the gradient.
pub const UPDATE_BYTES_PER_ELEMENT: usize = 12;
