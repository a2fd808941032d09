//! What is on the SSD: the named tensors of one training run, spread over one or more volumes.
//!
//! The volumes form one address space, striped by what each volume can do ([`Layout`]). A tensor lies in one range of
//! it, or in several when only they have the room ([`ExtentAllocator`]).
//!
//! A tensor that belongs to generations ([`TensorId`]) is not overwritten: [`Store::rewrite`] gives its next value another
//! extent, and [`Store::commit`] makes the values that all tensors have then the durable generation. For that every volume is
//! flushed, then the manifest, which names the extents of each generation and their checksums, goes to every volume,
//! durably, one after another: the newest that is whole counts, so a crash leaves the last generation or the new
//! one, never a mixture. What is superseded is the room for the generation after. A snapshot is a generation that stays.
//! A checksum of each MiB is taken before it is written, and compared when it is read: [`StoreError::Damaged`] says
//! what the drive did not keep. A store that is never committed leaves nothing behind.

mod allocation;
mod base64;
mod checksums;
mod commit;
mod error;
mod extents;
mod external;
mod id;
mod layout;
mod manifest;
mod map;
mod member;
mod open;
mod store;
mod table;
mod transfer;
mod verify;

/// What the fuzz target reaches that nobody else does.
#[cfg(fuzzing)]
#[doc(hidden)]
pub mod fuzzing;

pub use commit::{Snapshot, TensorReport};
pub use error::{Damage, Result, StoreError};
pub use extents::{Extent, ExtentAllocator};
pub use external::ExternalFile;
pub use layout::{Layout, Piece, STRIPE_BYTES};
pub use store::{Store, StoreOptions, VolumeReport};
pub use table::{Rewrite, TensorId};
pub use transfer::Transferred;
