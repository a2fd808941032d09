//! The step executor, which pipelines read → kernel → write without Python; captured gradients and
//! activations put aside; copies to and from a CUDA device.

mod device;
mod error;
mod executor;
mod files;
mod gradients;
mod packing;
mod pending;
mod rows;
mod staging;
mod stash;
mod update;

pub use device::{
    AppliedGradient, Applying, Capture, DeviceCounters, DeviceEvent, DeviceGradient, DeviceLink, FindFactors,
    HostCopy, ProjectedNumbers, Restore,
};
pub use error::{ExecError, Result};
pub use executor::{ArrivingUpdate, Executor, KeptStates, Ticket, write_part};
pub use files::{FILE_WINDOW_BYTES, FILE_WINDOWS, FilePart};
pub use gradients::{GradientDtypes, GradientId, GradientRanges, GradientSource, Gradients};
pub use packing::{First, Mxfp4, Nested, Numbers, Packing, ScaleFormat, Scales, Stored, WordOrder, Words};
pub use pending::{Pending, Reading, Underway};
pub use staging::{STAGING_RESERVE, Staging};
pub use stash::Stash;
pub use update::{Address, Segment, UnitTensor, UnitWeights, UpdatePlane, UpdateTensor};
