//! The step executor, which pipelines read → kernel → write without Python; captured gradients and
//! activations put aside; copies to and from a CUDA device.

mod device;
mod error;
mod executor;
mod files;
mod gradients;
mod in_flight;
mod packing;
mod rows;
mod staging;
mod stash;
mod update;

pub use device::{
    AppliedGradient, Applying, Capture, DeviceCounters, DeviceEvent, DeviceGradient, DeviceLink, FindFactors,
    HostCopy, ProjectedNumbers, Restore,
};
pub use error::{ExecError, Result};
pub use executor::{ArrivingUpdate, Executor, ResidentStates, Ticket, write_part};
pub use files::{FILE_WINDOW_BYTES, FILE_WINDOWS, FilePart};
pub use gradients::{GradientDtypes, GradientId, GradientRanges, GradientSource, Gradients};
pub use in_flight::{InFlight, InFlightCounter, InFlightRead};
pub use packing::{
    First, Groups, Mxfp4, Nested, Numbers, Packing, ScaleFormat, Scales, Shared, Stored, WordOrder, Words,
    Zeros,
};
pub use staging::{STAGING_RESERVE, Staging};
pub use stash::Stash;
pub use update::{Address, Segment, UnitTensor, UnitWeights, UpdatePlane, UpdateTensor};
