//! One CUDA device: copies to and from it in streams of their own, and the results of those copies.
//! A caller never waits for a copy: threads of this module wait for staging buffers and the SSD.

mod applying;
mod capture;
mod copies;
mod future;
mod link;
mod pieces;
mod restore;

pub use applying::{AppliedGradient, Applying, FindFactors, ProjectedNumbers};
pub use capture::{Capture, DeviceGradient};
pub use copies::{DeviceCounters, DeviceEvent, HostCopy};
pub use link::DeviceLink;
pub use restore::Restore;

pub(crate) use copies::{Copies, Download};
pub(crate) use future::{DeviceFuture, Promise};
pub(crate) use pieces::{ChunkPiece, Pieces};
