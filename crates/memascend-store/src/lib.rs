//! The data on the SSD: the named tensors of one training run, spread over one or more volumes.
//!
//! The volumes form one address space, striped by the rate of each volume ([`Layout`]). A tensor
//! lies in one range of the address space, or in several if no single range is large enough
//! ([`ExtentAllocator`]).
//!
//! A tensor that belongs to generations ([`TensorId`]) is not overwritten: [`Store::rewrite`] gives
//! its next value another extent, and [`Store::commit`] makes the current values of all tensors the
//! durable generation. A commit flushes all volumes at once, then writes the manifest to all of them.
//! The manifest names the extents of each generation and their checksums. The newest whole
//! manifest counts, so a crash leaves the last generation or the new one, never a mixture. The
//! extents of the superseded generation hold the next one. A snapshot is a generation that stays.
//!
//! Parts of a tensor's value may be kept in host memory ([`Store::keep`]): they are read from there, and
//! written with the next commit, if they were not before.
//!
//! A checksum of each MiB is computed before the MiB is written, and compared when it is read:
//! [`StoreError::Damaged`] names the bytes that differ. A store that was never committed leaves
//! nothing behind.

mod allocation;
mod base64;
mod blocks;
mod checksums;
mod commit;
mod error;
mod extents;
mod external;
mod id;
mod kept;
mod layout;
mod manifest;
mod map;
mod member;
mod open;
mod store;
mod table;
mod transfer;
mod verify;

/// Entry points of the fuzz targets.
#[cfg(fuzzing)]
#[doc(hidden)]
pub mod fuzzing;

pub use blocks::BlockCheck;
pub use commit::{Snapshot, TensorReport};
pub use error::{Damage, Result, StoreError};
pub use extents::{Extent, ExtentAllocator};
pub use external::{ExternalFile, block_sums};
pub use layout::{Layout, STRIPE_BYTES, VolumePiece};
pub use store::{Store, StoreOptions, VolumeReport};
pub use table::{Rewrite, TensorId};
pub use transfer::Transferred;
