//! How bytes move between leases and SSDs.
//!
//! A [`Volume`] is a directory with a preallocated file or a raw block device; each has an [`Engine`] of its own. A
//! [`Request`] owns its buffer from submission to completion; the completion hands it back, also on error. Completions
//! carry results: short transfers are resumed, everything else is an [`IoError`].

mod block;
mod counters;
mod device;
mod device_error;
mod engine;
mod error;
mod format;
mod geometry;
mod lock;
mod notes;
mod ring;
mod schedule;
mod signatures;
mod sim;
mod superblock;
mod threads;
mod volume;
mod workload;

/// What the fuzz targets reach that nobody else does.
#[cfg(fuzzing)]
#[doc(hidden)]
pub mod fuzzing;

pub use counters::{Counters, CountersSnapshot, DirectionSnapshot};
pub use device::{Device, device_id, find_device};
pub use device_error::{DeviceError, DeviceResult};
pub use engine::{
    Completion, Engine, EngineChoice, EngineOptions, OnComplete, OpenedEngine, Operation, Request,
    open_engine,
};
pub use error::{IoError, Result};
pub use format::{Content, Formatted, format_device};
pub use geometry::Geometry;
pub use notes::{FoundNote, NoteKeeper};
pub use ring::RingEngine;
pub use signatures::Signature;
pub use sim::{Faults, Injected, Power, SimDisk, SimEngine, SimNotePlace};
pub use superblock::DeviceId;
pub use threads::ThreadsEngine;
pub use volume::{Volume, VolumeFile};
pub use workload::{Measured, Workload};

/// What extents are multiples of, in bytes: the larger of the two logical block sizes in use (512 and 4096), so that
/// every drive's alignment is met and no drive has to read before it writes.
pub const BLOCK_BYTES: usize = 4096;
