//! What is on the SSD: the named tensors of one training run, spread over one or more volumes.
//!
//! The volumes form one address space, striped by what each volume can do ([`Layout`]). A tensor lies in one range of
//! it, or in several when only they have the room ([`ExtentAllocator`]).

mod error;
mod extents;
mod layout;
mod store;

pub use error::{Result, StoreError};
pub use extents::{Extent, ExtentAllocator};
pub use layout::{Layout, Piece, STRIPE_BYTES};
pub use store::{Store, StoreOptions, Transferred, VolumeReport};
