//! What is on the SSD: the named tensors of one training run, spread over one or more volumes.
//!
//! The volumes form one striped address space (RAID 0 with a fixed stripe); an [`Extent`] is a range of
//! it, and the store maps every transfer to the volumes that hold its stripes.

mod error;
mod extents;
mod lock;
mod store;

pub use error::{Result, StoreError};
pub use extents::{Extent, ExtentAllocator};
pub use store::{Store, StoreOptions, Transferred};
