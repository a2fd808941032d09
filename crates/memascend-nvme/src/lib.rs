//! How bytes move between leases and SSDs.
//!
//! A [`Request`] owns its buffer from submission to completion; the completion hands it back, also on
//! error. Completions carry results: short transfers are resumed, everything else is an [`IoError`].

mod engine;
mod error;
mod ring;
mod sim;
mod threads;
mod volume;

pub use engine::{
    Completion, Counters, CountersSnapshot, Engine, EngineChoice, OnComplete, Operation, Request, open_engine,
};
pub use error::{IoError, Result};
pub use ring::RingEngine;
pub use sim::{Faults, SimEngine};
pub use threads::ThreadsEngine;
pub use volume::{Volume, VolumeFile};

/// Offsets, lengths and addresses of every request are multiples of this many bytes: the larger of the
/// two logical block sizes in use (512 and 4096), so that every drive's alignment is met.
pub const BLOCK_BYTES: usize = 4096;
