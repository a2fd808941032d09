//! The step executor, which pipelines read → kernel → write without Python; captured gradients and activations put aside;
//! copies to and from a CUDA device.

mod device;
mod error;
mod executor;
mod files;
mod gradients;
mod pending;
mod staging;
mod stash;

pub use device::{Capture, DeviceCounters, DeviceEvent, DeviceLink, Restore};
pub use error::{OptimError, Result};
pub use executor::{Address, Executor, Segment, Ticket, UnitTensor, UnitWeights, UpdatePlane, UpdateTensor};
pub use files::FilePart;
pub use gradients::{GradientId, GradientSource, Gradients};
pub use pending::{Pending, Underway};
pub use staging::Staging;
pub use stash::Stash;
