//! Where bytes live in RAM: host allocators, one exact arena, the pool cut from it, and leases.
//!
//! A pool is sized by a plan and grows only by [`Pool::resize`]. Exhaustion is a value
//! ([`Pool::try_lease`] returns `None`), never a hidden allocation.

mod allocator;
mod cuda;
mod error;
mod fork;
mod malloc;
mod pool;
mod size;
mod sync;

pub use allocator::{
    CudaAllocator, HostAllocator, HostBlock, LockedAllocator, PageableAllocator, RegisteredAllocator,
    allocator, kinds_for_a_device,
};
pub use cuda::error::CudaError;
pub use cuda::event::{CudaEvent, CudaEvents};
pub use cuda::library::Cudart;
pub use cuda::stream::CudaStream;
pub use error::{MemError, Result};
pub use fork::Origin;
pub use malloc::{GROWTH_BYTES, keep_large_blocks, return_large_blocks_to_system, trim_heap};
pub use pool::{
    ClassAtPeak, ClassPlace, Fence, Lease, LeaseSlice, OutsideMemory, Pool, PoolCounters, ResizeListener,
    SizeClass,
};
pub use size::Size;
pub use sync::{LockExt, WaitExt};

/// The granule of every host buffer and every I/O, in bytes. Sizes are rounded up to a multiple of
/// it and no further.
pub const PAGE_BYTES: usize = 4096;

/// Rounds `bytes` up to a multiple of [`PAGE_BYTES`].
///
/// # Panics
/// If the rounded value does not fit in `usize`.
pub const fn round_up_to_page(bytes: usize) -> usize {
    match bytes.checked_next_multiple_of(PAGE_BYTES) {
        Some(rounded) => rounded,
        None => panic!("size overflows when rounded to a page"),
    }
}
