//! Buffers of their own, outside of every arena that a plan sized.

use std::io::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::{Lease, Pool, SizeClass};
use crate::{MemError, PAGE_BYTES, PageableAllocator, Result, round_up_to_page};

/// Counts the memory of buffers that belong to no pool. Each is freed with the last owner of its
/// lease.
#[derive(Debug, Default)]
pub struct OutsideMemory {
    bytes: AtomicUsize,
    bytes_most: AtomicUsize,
}

impl OutsideMemory {
    /// A buffer of `bytes` bytes, rounded up to a page, of ordinary memory.
    ///
    /// # Errors
    /// If there is no such memory.
    pub fn lease(self: &Arc<Self>, bytes: usize) -> Result<Lease> {
        if bytes > isize::MAX as usize - PAGE_BYTES {
            return Err(MemError::Reserve { bytes, source: ErrorKind::OutOfMemory.into() });
        }
        let counted = Counted::new(self, round_up_to_page(bytes.max(1)));
        let class = SizeClass::new("outside of the pools", bytes, 1);
        let pools =
            Pool::carve_counted(&PageableAllocator { huge_pages: true }, &[vec![class]], Some(counted))?;
        Ok(pools[0].try_lease(bytes)?.expect("the only buffer is free"))
    }

    /// Bytes of the buffers that exist.
    pub fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Highest value of [`OutsideMemory::bytes`].
    pub fn bytes_most(&self) -> usize {
        self.bytes_most.load(Ordering::Relaxed)
    }
}

/// Memory that is counted while it exists.
pub(super) struct Counted {
    outside: Arc<OutsideMemory>,
    bytes: usize,
}

impl Counted {
    fn new(outside: &Arc<OutsideMemory>, bytes: usize) -> Self {
        let now = outside.bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        outside.bytes_most.fetch_max(now, Ordering::Relaxed);
        Self { outside: Arc::clone(outside), bytes }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.outside.bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}
