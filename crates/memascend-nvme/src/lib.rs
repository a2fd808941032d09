//! How bytes move between leases and SSDs.
//!
//! A [`Volume`] is a directory with a preallocated file or a raw block device; each has an
//! [`Engine`] of its own. A [`Request`] owns its buffer from submission to completion; the
//! completion returns the buffer, also on error. Completions carry results: short transfers are
//! resumed, everything else is an [`IoError`].

mod block_device;
mod engine;
mod error;
pub mod memory;
mod recorder;
pub mod testing;
mod unforked;
mod volume;

/// Entry points for the fuzz targets.
#[cfg(fuzzing)]
#[doc(hidden)]
pub mod fuzzing;

pub use block_device::blank::{Example, UnknownData};
pub use block_device::content::{Content, Signature};
pub use block_device::device::{Device, device_uuid, find_device};
pub use block_device::error::{BlockDeviceError, BlockDeviceResult};
pub use block_device::format::{Formatted, format_device};
pub use block_device::notes::FoundNote;
pub use block_device::uuid::{parse_uuid, random_uuid};
pub use engine::counters::{Counters, CountersSnapshot, DirectionSnapshot};
pub use engine::files::{FileEngine, OnEnd};
pub use engine::ring::RingEngine;
pub use engine::threads::ThreadsEngine;
pub use engine::workload::{Measured, Workload};
pub use engine::{
    Completion, Engine, EngineChoice, EngineOptions, OnComplete, OpenedEngine, Operation, Request,
    open_engine,
};
pub use error::{IoError, Result};
pub use recorder::{Activity, Recorder, Recording, Span};
pub use uuid::Uuid;
pub use volume::file::VolumeFile;
pub use volume::geometry::Geometry;
pub use volume::notes::NoteKeeper;
pub use volume::{Volume, path_of};

/// Extents are multiples of this many bytes: the larger of the two logical block sizes in use (512
/// and 4096). So every drive's alignment is met, and no drive reads a block in order to write a
/// part of it.
pub const BLOCK_BYTES: usize = 4096;
