//! One CUDA device: copies to and from it, each in a stream of its own, and what comes of them. Nobody who puts a copy
//! there waits for it; what has to wait for staging buffers or the SSD does so on threads of this module's.

mod capture;
mod copies;
mod link;
mod outcome;
mod restore;

pub use capture::Capture;
pub use copies::{DeviceCounters, DeviceEvent};
pub use link::DeviceLink;
pub use restore::Restore;

pub(crate) use capture::Source;
pub(crate) use copies::Copies;
pub(crate) use outcome::{Outcome, Promise};
