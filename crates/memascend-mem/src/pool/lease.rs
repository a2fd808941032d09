//! Leases: buffers of a pool while they are in use.

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::pool::arena::{Arena, Fence, Fences};
use crate::sync::LockExt;

/// A pool buffer in use. Dropping the lease returns the buffer to the pool. A lease cannot be
/// cloned, so a buffer cannot be returned twice; share a lease as `Arc<Lease>`.
pub struct Lease {
    pub(super) arena: Arc<Arena>,
    pub(super) class: usize,
    pub(super) offset: usize,
    pub(super) requested: usize,
    pub(super) capacity: usize,
    pub(super) fences: std::sync::Mutex<Fences>,
}

impl Lease {
    /// First byte of the buffer, page aligned.
    pub fn address(&self) -> NonNull<u8> {
        // SAFETY: `offset + capacity` lies inside the arena, by construction of the classes.
        unsafe { self.arena.block.address().add(self.offset) }
    }

    /// Delays the buffer's return, after the lease is dropped, until `fence` is done.
    pub fn return_after(&self, fence: Arc<dyn Fence>) {
        let mut fences = self.fences.locked();
        // Drop the fences that are done, so that a lease that is copied from many times does not
        // accumulate fences.
        fences.retain(|fence| !matches!(fence.is_done(), Ok(true)));
        fences.push(fence);
    }

    /// Usable bytes: the size of the class, at least the requested size.
    pub fn capacity(&self) -> usize {
        self.capacity
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // A forked child has a copy of the bookkeeping without the memory, and the lock may have
        // been held by a thread that the child does not have. The child must not touch either.
        if !self.arena.origin.is_here() {
            return;
        }
        let fences = std::mem::take(self.fences.exclusive());
        let mut state = self.arena.lock();
        state.note_return(self.class, self.requested);
        let drains = state.classes[self.class].surplus > 0;
        if fences.is_empty() {
            state.classes[self.class].put_back(self.offset);
        } else {
            let pool = state.classes[self.class].pool;
            state.counters[pool].fenced_bytes += self.capacity;
            state.classes[self.class].fenced.push_back((self.offset, fences));
        }
        let has_waiters = state.waiting > 0;
        drop(state);
        // Notify all waiters: those waiting for another class go back to sleep.
        if has_waiters {
            self.arena.returned.notify_all();
        }
        if drains {
            self.arena.leaving.notify_all();
        }
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease").field("offset", &self.offset).field("capacity", &self.capacity).finish()
    }
}

/// A byte range of a shared lease, or of memory that is not a pool's. An I/O request owns one while the
/// request is in flight.
#[derive(Debug, Clone)]
pub struct LeaseSlice {
    owner: Owner,
    offset: usize,
    bytes: usize,
}

#[derive(Debug, Clone)]
enum Owner {
    Lease(Arc<Lease>),
    /// Address of memory that the maker of the slice keeps alive.
    Caller(NonNull<u8>),
}

// SAFETY: a lease can be used by any thread, and so can the caller's memory, as `LeaseSlice::of_caller`
// demands.
unsafe impl Send for Owner {}
// SAFETY: as above.
unsafe impl Sync for Owner {}

impl LeaseSlice {
    /// The range `offset .. offset + bytes` of `lease`.
    ///
    /// # Panics
    /// If the range does not lie inside the lease.
    pub fn new(lease: Arc<Lease>, offset: usize, bytes: usize) -> Self {
        let end = offset.checked_add(bytes).expect("slice end overflows");
        assert!(end <= lease.capacity(), "slice {offset}..{end} exceeds a lease of {}", lease.capacity());
        Self { owner: Owner::Lease(lease), offset, bytes }
    }

    /// `bytes` bytes at `address`, in memory that is not a pool's.
    ///
    /// # Safety
    /// The range is valid memory, which any thread may use, while the slice or a clone or part of it
    /// lives.
    pub unsafe fn of_caller(address: NonNull<u8>, bytes: usize) -> Self {
        Self { owner: Owner::Caller(address), offset: 0, bytes }
    }

    /// The range `offset .. offset + bytes` of this slice.
    ///
    /// # Panics
    /// If the range does not lie inside the slice.
    pub fn narrow(&self, offset: usize, bytes: usize) -> Self {
        let end = offset.checked_add(bytes).expect("slice end overflows");
        assert!(end <= self.bytes, "narrowing {offset}..{end} of {}", self.bytes);
        Self { owner: self.owner.clone(), offset: self.offset + offset, bytes }
    }

    /// First byte.
    pub fn address(&self) -> NonNull<u8> {
        let start = match &self.owner {
            Owner::Lease(lease) => lease.address(),
            Owner::Caller(address) => *address,
        };
        // SAFETY: the range lies inside the lease or the caller's memory, checked by `new` and `narrow`.
        unsafe { start.add(self.offset) }
    }

    /// Length in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The bytes, to read.
    ///
    /// # Safety
    /// The range must not be written while the returned slice lives.
    pub unsafe fn as_slice(&self) -> &[u8] {
        // SAFETY: in bounds and alive as long as self; the caller excludes writers.
        unsafe { std::slice::from_raw_parts(self.address().as_ptr(), self.bytes) }
    }

    /// The bytes, to write.
    ///
    /// # Safety
    /// The range must not be read or written in any other way while the returned slice lives.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn as_mut_slice(&self) -> &mut [u8] {
        // SAFETY: in bounds and alive as long as self; the caller excludes every other access.
        unsafe { std::slice::from_raw_parts_mut(self.address().as_ptr(), self.bytes) }
    }
}
