use std::fmt;
use std::io::ErrorKind;
use std::ptr::NonNull;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::{HostAllocator, HostBlock, MemError, Result, round_up_to_page};

/// One line of the pool's plan: `count` buffers of `bytes` bytes for `consumer`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SizeClass {
    /// What the buffers are for, as printed in the plan.
    pub consumer: String,
    /// Bytes of one buffer (rounded up to a page by the pool).
    pub bytes: usize,
    /// How many buffers.
    pub count: usize,
}

/// What the pool has done so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PoolCounters {
    /// Leases handed out.
    pub leases: u64,
    /// Leases that had to wait for a return.
    pub waits: u64,
    /// Requests that found nothing free.
    pub refusals: u64,
    /// Bytes asked for by the live leases.
    pub live_bytes: usize,
    /// Highest value of `live_bytes`.
    pub live_bytes_max: usize,
    /// Bytes of the arena.
    pub reserved_bytes: usize,
}

/// The arena cut into size classes. Cheap to clone; the arena lives until the last lease is gone.
#[derive(Clone)]
pub struct Pool {
    inner: Arc<Inner>,
}

struct Inner {
    arena: Arc<HostBlock>,
    allocator: &'static str,
    owner_pid: u32,
    state: Mutex<State>,
    returned: Condvar,
}

struct State {
    classes: Vec<Class>,
    counters: PoolCounters,
}

struct Class {
    bytes: usize,
    /// Offsets into the arena of the buffers not leased, used as a stack so that warm memory is reused.
    free: Vec<usize>,
}

impl Pool {
    /// Reserves one arena for all `groups` of size classes and cuts one pool per group, so that the
    /// consumers of one group can never starve those of another. Within a group, classes of equal size
    /// serve one another.
    pub fn carve(allocator: &dyn HostAllocator, groups: &[Vec<SizeClass>]) -> Result<Vec<Self>> {
        let mut offset = 0;
        let mut cut_groups: Vec<(Vec<Class>, usize)> = Vec::new();
        for group in groups {
            let start = offset;
            let mut sizes: Vec<(usize, usize)> = group
                .iter()
                .filter(|class| class.count > 0)
                .map(|class| (round_up_to_page(class.bytes.max(1)), class.count))
                .collect();
            sizes.sort_unstable();
            let mut cut: Vec<Class> = Vec::new();
            for (bytes, count) in sizes {
                let start = offset;
                offset = bytes.checked_mul(count).and_then(|class| class.checked_add(offset)).ok_or_else(
                    || MemError::Reserve { bytes: usize::MAX, source: ErrorKind::OutOfMemory.into() },
                )?;
                let offsets = (start..offset).step_by(bytes);
                match cut.last_mut() {
                    Some(class) if class.bytes == bytes => class.free.extend(offsets),
                    _ => cut.push(Class { bytes, free: offsets.collect() }),
                }
            }
            cut_groups.push((cut, offset - start));
        }
        let arena = Arc::new(allocator.allocate(offset)?);
        let pool = |(classes, reserved_bytes)| Self {
            inner: Arc::new(Inner {
                arena: Arc::clone(&arena),
                allocator: allocator.name(),
                owner_pid: std::process::id(),
                state: Mutex::new(State {
                    classes,
                    counters: PoolCounters { reserved_bytes, ..PoolCounters::default() },
                }),
                returned: Condvar::new(),
            }),
        };
        Ok(cut_groups.into_iter().map(pool).collect())
    }

    /// Reserves one arena for `classes` alone.
    pub fn new(allocator: &dyn HostAllocator, classes: &[SizeClass]) -> Result<Self> {
        let mut pools = Self::carve(allocator, &[classes.to_vec()])?;
        Ok(pools.pop().expect("one group gives one pool"))
    }

    /// A buffer of the smallest class that holds `bytes`, or `None` when that class has none free. A larger
    /// class never steps in: its buffers are planned for somebody else, who could then starve.
    ///
    /// # Errors
    /// [`MemError::TooLarge`] if no class could ever hold it.
    pub fn try_lease(&self, bytes: usize) -> Result<Option<Lease>> {
        let mut state = self.lock();
        let lease = self.take(&mut state, bytes)?;
        if lease.is_none() {
            state.counters.refusals += 1;
        }
        Ok(lease)
    }

    /// As [`Pool::try_lease`], waiting up to `patience` for a return.
    pub fn lease(&self, bytes: usize, patience: Duration) -> Result<Option<Lease>> {
        let deadline = Instant::now() + patience;
        let mut state = self.lock();
        let mut waited = false;
        loop {
            if let Some(lease) = self.take(&mut state, bytes)? {
                state.counters.waits += u64::from(waited);
                return Ok(Some(lease));
            }
            waited = true;
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                state.counters.refusals += 1;
                return Ok(None);
            }
            (state, _) =
                self.inner.returned.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// How many buffers of the smallest class that holds `bytes` are free now.
    pub fn free_count(&self, bytes: usize) -> usize {
        self.lock().classes.iter().find(|class| class.bytes >= bytes).map_or(0, |class| class.free.len())
    }

    /// Counters so far.
    pub fn counters(&self) -> PoolCounters {
        self.lock().counters
    }

    /// Name of the allocator behind the arena.
    pub fn allocator(&self) -> &'static str {
        self.inner.allocator
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.inner.lock()
    }

    fn take(&self, state: &mut State, bytes: usize) -> Result<Option<Lease>> {
        let largest_bytes = state.classes.last().map_or(0, |class| class.bytes);
        if bytes > largest_bytes {
            return Err(MemError::TooLarge { bytes, largest_bytes });
        }
        let Some((index, offset)) = state
            .classes
            .iter_mut()
            .enumerate()
            .find(|(_, class)| class.bytes >= bytes)
            .and_then(|(index, class)| class.free.pop().map(|offset| (index, offset)))
        else {
            return Ok(None);
        };
        state.counters.leases += 1;
        state.counters.live_bytes += bytes;
        state.counters.live_bytes_max = state.counters.live_bytes_max.max(state.counters.live_bytes);
        let capacity = state.classes[index].bytes;
        Ok(Some(Lease { inner: Arc::clone(&self.inner), class: index, offset, requested: bytes, capacity }))
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("counters", &self.counters()).finish_non_exhaustive()
    }
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, State> {
        // The critical sections do not panic half-way, so a poisoned lock still guards a sound state.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A pool buffer in use; returned to the pool when dropped. It cannot be cloned, so it cannot be
/// returned twice; share it as `Arc<Lease>`.
pub struct Lease {
    inner: Arc<Inner>,
    class: usize,
    offset: usize,
    requested: usize,
    capacity: usize,
}

impl Lease {
    /// First byte of the buffer, page aligned.
    pub fn address(&self) -> NonNull<u8> {
        // SAFETY: `offset + capacity` lies inside the arena, by construction of the classes.
        unsafe { self.inner.arena.address().add(self.offset) }
    }

    /// Bytes that may be used: the size class, at least what was asked for.
    pub fn capacity(&self) -> usize {
        self.capacity
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // A forked child holds a copy of the bookkeeping but not the memory, and perhaps a lock that a
        // thread of the parent held: it must not touch either.
        if self.inner.owner_pid != std::process::id() {
            return;
        }
        let mut state = self.inner.lock();
        state.counters.live_bytes -= self.requested;
        state.classes[self.class].free.push(self.offset);
        drop(state);
        self.inner.returned.notify_all();
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease").field("offset", &self.offset).field("capacity", &self.capacity).finish()
    }
}

/// A byte range of a shared lease: what an I/O request owns while it is in flight.
#[derive(Debug, Clone)]
pub struct LeaseSlice {
    lease: Arc<Lease>,
    offset: usize,
    bytes: usize,
}

impl LeaseSlice {
    /// The range `offset .. offset + bytes` of `lease`.
    ///
    /// # Panics
    /// If the range does not lie inside the lease.
    pub fn new(lease: Arc<Lease>, offset: usize, bytes: usize) -> Self {
        let end = offset.checked_add(bytes).expect("slice end overflows");
        assert!(end <= lease.capacity(), "slice {offset}..{end} exceeds a lease of {}", lease.capacity());
        Self { lease, offset, bytes }
    }

    /// The range `offset .. offset + bytes` of this slice.
    ///
    /// # Panics
    /// If the range does not lie inside the slice.
    pub fn narrow(&self, offset: usize, bytes: usize) -> Self {
        let end = offset.checked_add(bytes).expect("slice end overflows");
        assert!(end <= self.bytes, "narrowing {offset}..{end} of {}", self.bytes);
        Self { lease: Arc::clone(&self.lease), offset: self.offset + offset, bytes }
    }

    /// First byte.
    pub fn address(&self) -> NonNull<u8> {
        // SAFETY: the range lies inside the lease, checked by `new` and `narrow`.
        unsafe { self.lease.address().add(self.offset) }
    }

    /// Length in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The bytes, to read.
    ///
    /// # Safety
    /// Nobody may write the range while the returned slice lives.
    pub unsafe fn as_slice(&self) -> &[u8] {
        // SAFETY: in bounds and alive as long as self; the caller excludes writers.
        unsafe { std::slice::from_raw_parts(self.address().as_ptr(), self.bytes) }
    }

    /// The bytes, to write.
    ///
    /// # Safety
    /// Nobody else may read or write the range while the returned slice lives.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn as_mut_slice(&self) -> &mut [u8] {
        // SAFETY: in bounds and alive as long as self; the caller excludes every other access.
        unsafe { std::slice::from_raw_parts_mut(self.address().as_ptr(), self.bytes) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{PAGE_BYTES, PageableAllocator};
    use proptest::prelude::*;

    fn class(bytes: usize, count: usize) -> SizeClass {
        SizeClass { consumer: "test".into(), bytes, count }
    }

    fn pool(classes: &[SizeClass]) -> Pool {
        Pool::new(&PageableAllocator, classes).unwrap()
    }

    #[test]
    fn reserves_exactly_the_sum_of_its_classes() {
        let pool = pool(&[class(10_000, 3), class(4096, 2), class(1, 1)]);
        assert_eq!(pool.counters().reserved_bytes, 3 * 12_288 + 3 * 4096);
    }

    #[test]
    fn groups_share_one_arena_but_never_each_others_buffers() {
        let groups = [vec![class(4096, 1)], vec![class(8192, 2)]];
        let pools = Pool::carve(&PageableAllocator, &groups).unwrap();
        let held = pools[0].try_lease(4096).unwrap().unwrap();
        assert!(pools[0].try_lease(1).unwrap().is_none(), "the second group's buffers are not ours");
        let other = pools[1].try_lease(1).unwrap().unwrap();
        assert_eq!(other.address().as_ptr() as usize - held.address().as_ptr() as usize, 4096 + 8192);
    }

    #[test]
    fn exhaustion_is_a_value_and_a_return_serves_the_next() {
        let pool = pool(&[class(8192, 1)]);
        let held = pool.try_lease(5000).unwrap().unwrap();
        assert!(pool.try_lease(1).unwrap().is_none());
        assert!(matches!(pool.try_lease(8193), Err(MemError::TooLarge { largest_bytes: 8192, .. })));
        drop(held);
        assert!(pool.try_lease(8192).unwrap().is_some());
    }

    #[test]
    fn a_waiting_lease_gets_the_buffer_that_another_thread_returns() {
        let pool = pool(&[class(4096, 1)]);
        let held = pool.try_lease(1).unwrap().unwrap();
        let waiter = std::thread::spawn({
            let pool = pool.clone();
            move || pool.lease(1, Duration::from_secs(30)).unwrap().is_some()
        });
        drop(held);
        assert!(waiter.join().unwrap());
    }

    #[test]
    fn the_arena_outlives_the_pool_while_a_lease_lives() {
        let pool = pool(&[class(4096, 1)]);
        let slice = LeaseSlice::new(Arc::new(pool.try_lease(4096).unwrap().unwrap()), 0, 4096);
        drop(pool);
        // SAFETY: this test holds the only handle to the range.
        unsafe { slice.as_mut_slice().fill(7) };
        // SAFETY: as above.
        assert!(unsafe { slice.as_slice() }.iter().all(|byte| *byte == 7));
    }

    #[test]
    #[should_panic(expected = "exceeds a lease")]
    fn a_slice_past_its_lease_is_refused() {
        let pool = pool(&[class(4096, 1)]);
        let lease = Arc::new(pool.try_lease(1).unwrap().unwrap());
        let _ = LeaseSlice::new(lease, 4096, 1);
    }

    proptest! {
        /// Live leases never overlap, never leave the arena, and all bytes come back.
        #[test]
        fn live_leases_are_disjoint(
            classes in prop::collection::vec((1_usize..40_000, 1_usize..5), 1..5),
            actions in prop::collection::vec((any::<bool>(), 1_usize..40_000, any::<prop::sample::Index>()), 1..80),
        ) {
            let classes: Vec<_> = classes.into_iter().map(|(bytes, count)| class(bytes, count)).collect();
            let pool = pool(&classes);
            let free = |pool: &Pool| pool.lock().classes.iter().map(|class| class.free.len()).sum::<usize>();
            let total = free(&pool);
            let mut live: Vec<Lease> = Vec::new();
            for (take, bytes, pick) in actions {
                if take {
                    if let Ok(Some(lease)) = pool.try_lease(bytes) {
                        prop_assert!(lease.capacity() >= bytes);
                        prop_assert_eq!(lease.address().as_ptr() as usize % PAGE_BYTES, 0);
                        live.push(lease);
                    }
                } else if !live.is_empty() {
                    live.swap_remove(pick.index(live.len()));
                }
                let mut ranges: Vec<_> = live.iter()
                    .map(|lease| (lease.address().as_ptr() as usize, lease.capacity()))
                    .collect();
                ranges.sort_unstable();
                prop_assert!(ranges.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0));
                prop_assert_eq!(free(&pool) + live.len(), total);
            }
            live.clear();
            prop_assert_eq!(pool.counters().live_bytes, 0);
            prop_assert_eq!(free(&pool), total);
        }
    }
}
