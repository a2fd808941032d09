use std::collections::VecDeque;
use std::fmt;
use std::io::ErrorKind;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::sync::{Condvar, LockExt, Mutex, MutexGuard, WaitExt};
use crate::{HostAllocator, HostBlock, MemError, Origin, Result, round_up_to_page};

/// How long the memory of a pool that nobody has any more waits for the devices that still use it.
const FENCE_PATIENCE: Duration = Duration::from_secs(60);
/// How often a waiting request looks at the fences of returned buffers: nobody calls when a device is done.
const FENCE_POLL: Duration = Duration::from_micros(50);

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

/// Work on a buffer that goes on after its owner has dropped the lease: a copy that a device carries out. The
/// buffer returns to its pool when the fence is done.
pub trait Fence: Send + Sync {
    /// Whether the work has ended. Must not block.
    ///
    /// # Errors
    /// When that cannot be told. The buffer then never returns, because the device may still be using it.
    fn is_done(&self) -> Result<bool>;
}

/// What the pool has done so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PoolCounters {
    /// Requests served at once.
    pub hits: u64,
    /// Requests served after waiting for a return.
    pub waits: u64,
    /// Requests that found nothing free and were told so.
    pub refusals: u64,
    /// Bytes asked for by the live leases.
    pub live_bytes: usize,
    /// Highest value of `live_bytes`.
    pub live_bytes_max: usize,
    /// Bytes of the live leases' buffers, which are never smaller than what was asked for.
    pub leased_bytes: usize,
    /// Bytes of buffers that were dropped while a fence still holds them.
    pub fenced_bytes: usize,
    /// Bytes of the pool's share of the arena.
    pub reserved_bytes: usize,
}

impl PoolCounters {
    /// Bytes lost inside live leases: what their buffers are larger than the requests.
    pub fn waste_bytes(&self) -> usize {
        self.leased_bytes - self.live_bytes
    }
}

/// One size class of an arena when the live bytes of all its pools together were highest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClassAtPeak {
    /// Bytes of one buffer.
    pub bytes: usize,
    /// How many buffers.
    pub count: usize,
    /// Bytes asked for by the live leases at that moment.
    pub live_bytes_at_peak: usize,
}

/// A part of an arena cut into size classes. Cheap to clone; the arena lives until the last lease is gone.
#[derive(Clone)]
pub struct Pool {
    arena: Arc<Arena>,
    /// Which of the arena's pools this is.
    index: usize,
    /// Which of the arena's classes are this pool's.
    classes: Range<usize>,
}

/// The one block behind all the pools of a carve. They share a lock: what they do under it is short, and only so
/// is it known how much they hold together.
struct Arena {
    block: HostBlock,
    allocator: &'static str,
    origin: Origin,
    state: Mutex<State>,
    returned: Condvar,
}

struct State {
    /// Every pool's classes, one pool after another, by ascending size within each.
    classes: Vec<Class>,
    counters: Vec<PoolCounters>,
    live_bytes: usize,
    live_bytes_max: usize,
    /// Requests waiting for a return; without any, a return calls nobody.
    waiting: usize,
}

struct Class {
    bytes: usize,
    count: usize,
    /// Which pool it belongs to.
    pool: usize,
    live_bytes: usize,
    /// Its live bytes when those of all classes together were highest.
    live_bytes_at_peak: usize,
    /// Offsets into the arena of the buffers not leased, used as a stack so that warm memory is reused.
    free: Vec<usize>,
    /// Buffers dropped before their fences were done, oldest first.
    fenced: VecDeque<(usize, Fences)>,
}

type Fences = Vec<Arc<dyn Fence>>;

impl Pool {
    /// Reserves one arena for all `groups` of size classes and cuts one pool per group, so that the
    /// consumers of one group can never starve those of another. Within a group, classes of equal size
    /// serve one another.
    pub fn carve(allocator: &dyn HostAllocator, groups: &[Vec<SizeClass>]) -> Result<Vec<Self>> {
        let mut offset = 0;
        let mut state =
            State { classes: Vec::new(), counters: Vec::new(), live_bytes: 0, live_bytes_max: 0, waiting: 0 };
        let mut ranges = Vec::new();
        for (pool, group) in groups.iter().enumerate() {
            let (first, first_offset) = (state.classes.len(), offset);
            let mut sizes: Vec<(usize, usize)> = group
                .iter()
                .filter(|class| class.count > 0)
                .map(|class| (round_up_to_page(class.bytes.max(1)), class.count))
                .collect();
            sizes.sort_unstable();
            for (bytes, count) in sizes {
                let start = offset;
                offset = bytes.checked_mul(count).and_then(|class| class.checked_add(offset)).ok_or_else(
                    || MemError::Reserve { bytes: usize::MAX, source: ErrorKind::OutOfMemory.into() },
                )?;
                let offsets = (start..offset).step_by(bytes);
                match state.classes[first..].last_mut() {
                    Some(class) if class.bytes == bytes => {
                        class.free.extend(offsets);
                        class.count += count;
                    }
                    _ => state.classes.push(Class {
                        bytes,
                        count,
                        pool,
                        live_bytes: 0,
                        live_bytes_at_peak: 0,
                        free: offsets.collect(),
                        fenced: VecDeque::new(),
                    }),
                }
            }
            let reserved_bytes = offset - first_offset;
            state.counters.push(PoolCounters { reserved_bytes, ..PoolCounters::default() });
            ranges.push(first..state.classes.len());
        }
        let arena = Arc::new(Arena {
            block: allocator.allocate(offset)?,
            allocator: allocator.name(),
            origin: Origin::here(),
            state: Mutex::new(state),
            returned: Condvar::new(),
        });
        let pool = |(index, classes)| Self { arena: Arc::clone(&arena), index, classes };
        Ok(ranges.into_iter().enumerate().map(pool).collect())
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
    /// [`MemError::TooLarge`] if no class could ever hold it; what a [`Fence`] says when it is all that is left.
    pub fn try_lease(&self, bytes: usize) -> Result<Option<Lease>> {
        let mut state = self.arena.lock();
        let class = self.class_of(&state, bytes)?;
        let lease = self.take(&mut state, class, bytes)?;
        match lease {
            Some(_) => state.counters[self.index].hits += 1,
            None => state.counters[self.index].refusals += 1,
        }
        Ok(lease)
    }

    /// As [`Pool::try_lease`], waiting up to `patience` for a return.
    pub fn lease(&self, bytes: usize, patience: Duration) -> Result<Option<Lease>> {
        let mut state = self.arena.lock();
        let class = self.class_of(&state, bytes)?;
        if let Some(lease) = self.take(&mut state, class, bytes)? {
            state.counters[self.index].hits += 1;
            return Ok(Some(lease));
        }
        let deadline = Instant::now() + patience;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                state.counters[self.index].refusals += 1;
                return Ok(None);
            }
            let nap = if state.classes[class].fenced.is_empty() { left } else { left.min(FENCE_POLL) };
            state.waiting += 1;
            state = self.arena.returned.wait_locked_for(state, nap);
            state.waiting -= 1;
            if let Some(lease) = self.take(&mut state, class, bytes)? {
                state.counters[self.index].waits += 1;
                return Ok(Some(lease));
            }
        }
    }

    /// A buffer as by [`Pool::try_lease`], if more than `reserve` of its class are free.
    pub fn try_lease_spare(&self, bytes: usize, reserve: usize) -> Result<Option<Lease>> {
        let mut state = self.arena.lock();
        let class = self.class_of(&state, bytes)?;
        if state.classes[class].free.len() <= reserve {
            match state.settle(class) {
                // What is left without it still serves somebody.
                Err(error) if state.classes[class].free.is_empty() => return Err(error),
                _ => {}
            }
            if state.classes[class].free.len() <= reserve {
                return Ok(None);
            }
        }
        state.counters[self.index].hits += 1;
        self.take(&mut state, class, bytes)
    }

    /// How many buffers would serve requests of `bytes` bytes now.
    pub fn free_buffers(&self, bytes: usize) -> usize {
        let state = self.arena.lock();
        let class = self.classes.clone().find(|class| state.classes[*class].bytes >= bytes);
        class.map_or(0, |class| state.classes[class].free.len())
    }

    /// The whole arena that this pool is a part of: its first byte and its length.
    pub fn arena(&self) -> (NonNull<u8>, usize) {
        (self.arena.block.address(), self.arena.block.bytes())
    }

    /// Counters so far.
    pub fn counters(&self) -> PoolCounters {
        self.arena.lock().counters[self.index]
    }

    /// The highest sum of live bytes over all pools carved together, and every class at that moment, in the order
    /// of the groups and of the sizes within them.
    pub fn joint_peak(&self) -> (usize, Vec<ClassAtPeak>) {
        let state = self.arena.lock();
        let classes = state.classes.iter().map(|class| ClassAtPeak {
            bytes: class.bytes,
            count: class.count,
            live_bytes_at_peak: class.live_bytes_at_peak,
        });
        (state.live_bytes_max, classes.collect())
    }

    /// Name of the allocator behind the arena.
    pub fn allocator(&self) -> &'static str {
        self.arena.allocator
    }

    /// Number of the smallest class that holds `bytes`.
    fn class_of(&self, state: &State, bytes: usize) -> Result<usize> {
        let classes = &state.classes[self.classes.clone()];
        let found = classes.iter().position(|class| class.bytes >= bytes);
        found.map(|index| self.classes.start + index).ok_or_else(|| MemError::TooLarge {
            bytes,
            largest_bytes: classes.last().map_or(0, |class| class.bytes),
        })
    }

    fn take(&self, state: &mut State, class: usize, bytes: usize) -> Result<Option<Lease>> {
        if state.classes[class].free.is_empty() {
            state.settle(class)?;
        }
        let Some(offset) = state.classes[class].free.pop() else { return Ok(None) };
        let capacity = state.classes[class].bytes;
        state.note_lease(class, bytes);
        Ok(Some(Lease {
            arena: Arc::clone(&self.arena),
            class,
            offset,
            requested: bytes,
            capacity,
            fences: std::sync::Mutex::default(),
        }))
    }
}

impl State {
    fn note_lease(&mut self, class: usize, bytes: usize) {
        let class = &mut self.classes[class];
        class.live_bytes += bytes;
        let counters = &mut self.counters[class.pool];
        counters.leased_bytes += class.bytes;
        counters.live_bytes += bytes;
        counters.live_bytes_max = counters.live_bytes_max.max(counters.live_bytes);
        self.live_bytes += bytes;
        if self.live_bytes > self.live_bytes_max {
            self.live_bytes_max = self.live_bytes;
            for class in &mut self.classes {
                class.live_bytes_at_peak = class.live_bytes;
            }
        }
    }

    fn note_return(&mut self, class: usize, bytes: usize) {
        let class = &mut self.classes[class];
        class.live_bytes -= bytes;
        let counters = &mut self.counters[class.pool];
        counters.leased_bytes -= class.bytes;
        counters.live_bytes -= bytes;
        self.live_bytes -= bytes;
    }

    /// Frees the dropped buffers of a class whose fences are done.
    ///
    /// # Errors
    /// What a fence says that cannot tell, unless another buffer came free.
    fn settle(&mut self, class: usize) -> Result<()> {
        let class = &mut self.classes[class];
        let (mut settled, mut outcome) = (0, Ok(()));
        for _ in 0..class.fenced.len() {
            let Some((offset, mut fences)) = class.fenced.pop_front() else { break };
            fences.retain(|fence| match fence.is_done() {
                Ok(done) => !done,
                Err(error) => {
                    outcome = Err(error);
                    true
                }
            });
            if fences.is_empty() {
                class.free.push(offset);
                settled += 1;
            } else {
                class.fenced.push_back((offset, fences));
            }
        }
        self.counters[class.pool].fenced_bytes -= settled * class.bytes;
        if settled > 0 { Ok(()) } else { outcome }
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("counters", &self.counters()).finish_non_exhaustive()
    }
}

impl Arena {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.locked()
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        if !self.origin.is_here() {
            return;
        }
        let mut state = self.lock();
        let fenced: Vec<_> = state.classes.iter_mut().flat_map(|class| class.fenced.drain(..)).collect();
        drop(state);
        let deadline = Instant::now() + FENCE_PATIENCE;
        for fence in fenced.into_iter().flat_map(|(_, fences)| fences) {
            loop {
                match fence.is_done() {
                    Ok(true) => break,
                    Ok(false) if Instant::now() < deadline => std::thread::sleep(FENCE_POLL),
                    _ => {
                        // Better lost than freed under a device that writes to it.
                        self.block.keep_forever();
                        return;
                    }
                }
            }
        }
    }
}

/// A pool buffer in use; returned to the pool when dropped. It cannot be cloned, so it cannot be
/// returned twice; share it as `Arc<Lease>`.
pub struct Lease {
    arena: Arc<Arena>,
    class: usize,
    offset: usize,
    requested: usize,
    capacity: usize,
    fences: std::sync::Mutex<Fences>,
}

impl Lease {
    /// First byte of the buffer, page aligned.
    pub fn address(&self) -> NonNull<u8> {
        // SAFETY: `offset + capacity` lies inside the arena, by construction of the classes.
        unsafe { self.arena.block.address().add(self.offset) }
    }

    /// Has the buffer return to its pool, once the lease is dropped, only when `fence` is done too.
    pub fn return_after(&self, fence: Arc<dyn Fence>) {
        let mut fences = self.fences.locked();
        // A lease that is kept and copied from again and again gathers no more of them than are still going on.
        fences.retain(|fence| !matches!(fence.is_done(), Ok(true)));
        fences.push(fence);
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
        if !self.arena.origin.is_here() {
            return;
        }
        let fences = std::mem::take(self.fences.exclusive());
        let mut state = self.arena.lock();
        state.note_return(self.class, self.requested);
        if fences.is_empty() {
            state.classes[self.class].free.push(self.offset);
        } else {
            let pool = state.classes[self.class].pool;
            state.counters[pool].fenced_bytes += self.capacity;
            state.classes[self.class].fenced.push_back((self.offset, fences));
        }
        let somebody_waits = state.waiting > 0;
        drop(state);
        // All of them: those who wait for another class go back to sleep.
        if somebody_waits {
            self.arena.returned.notify_all();
        }
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
    use std::sync::atomic::Ordering;

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
    fn the_joint_peak_is_that_of_one_moment() {
        let groups = [vec![class(4096, 1), class(4096, 1)], vec![class(8192, 2)]];
        let pools = Pool::carve(&PageableAllocator, &groups).unwrap();
        drop(pools[0].try_lease(4000).unwrap().unwrap());
        drop(pools[1].try_lease(8000).unwrap().unwrap());
        let at_peak = |bytes, count, live_bytes_at_peak| ClassAtPeak { bytes, count, live_bytes_at_peak };
        // Each pool had its own peak; together they never held 12,000 bytes.
        let expected = (8000, vec![at_peak(4096, 2, 0), at_peak(8192, 2, 8000)]);
        assert_eq!(pools[0].joint_peak(), expected);
        let _held = [pools[0].try_lease(100).unwrap(), pools[1].try_lease(8192).unwrap()];
        assert_eq!(pools[1].joint_peak(), (8292, vec![at_peak(4096, 2, 100), at_peak(8192, 2, 8192)]));
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

    /// A fence that a test opens, or breaks.
    #[derive(Default)]
    struct Gate {
        open: std::sync::atomic::AtomicBool,
        broken: std::sync::atomic::AtomicBool,
    }

    impl Gate {
        fn open(&self) {
            self.open.store(true, Ordering::Release);
        }
    }

    impl Fence for Gate {
        fn is_done(&self) -> Result<bool> {
            if self.broken.load(Ordering::Acquire) {
                return Err(MemError::TooLarge { bytes: 1, largest_bytes: 0 });
            }
            Ok(self.open.load(Ordering::Acquire))
        }
    }

    #[test]
    fn a_fenced_buffer_returns_when_lease_and_every_fence_are_gone() {
        let pool = pool(&[class(4096, 1)]);
        let gates = [Arc::new(Gate::default()), Arc::new(Gate::default())];
        let lease = pool.try_lease(1).unwrap().unwrap();
        for gate in &gates {
            lease.return_after(Arc::clone(gate) as Arc<dyn Fence>);
        }
        gates[0].open();
        assert!(pool.try_lease(1).unwrap().is_none(), "the lease lives");
        drop(lease);
        assert_eq!((pool.counters().live_bytes, pool.counters().fenced_bytes), (0, 4096));
        assert!(pool.try_lease(1).unwrap().is_none(), "one fence is left");
        gates[1].open();
        assert!(pool.try_lease(1).unwrap().is_some());
        assert_eq!(pool.counters().fenced_bytes, 0);
    }

    #[test]
    fn waiting_for_a_fence_ends_when_it_is_done_though_nobody_calls() {
        let pool = pool(&[class(4096, 1)]);
        let gate = Arc::new(Gate::default());
        let lease = pool.try_lease(1).unwrap().unwrap();
        lease.return_after(Arc::clone(&gate) as Arc<dyn Fence>);
        drop(lease);
        assert!(pool.lease(1, Duration::from_millis(5)).unwrap().is_none());
        let waiter = std::thread::spawn({
            let pool = pool.clone();
            move || pool.lease(1, Duration::from_secs(30)).unwrap().is_some()
        });
        while pool.arena.lock().waiting == 0 {
            std::thread::yield_now();
        }
        gate.open();
        assert!(waiter.join().unwrap());
        assert_eq!(pool.counters().waits, 1);
    }

    #[test]
    fn the_arena_waits_for_the_device_that_uses_it() {
        let (gate, freed) = (Arc::new(Gate::default()), Arc::new(std::sync::atomic::AtomicBool::new(false)));
        let pool = pool(&[class(4096, 1)]);
        let lease = pool.try_lease(1).unwrap().unwrap();
        let address = lease.address().as_ptr() as usize;
        lease.return_after(Arc::clone(&gate) as Arc<dyn Fence>);
        drop(lease);
        let closing = std::thread::spawn({
            let freed = Arc::clone(&freed);
            move || {
                drop(pool);
                freed.store(true, Ordering::Release);
            }
        });
        std::thread::sleep(Duration::from_millis(20));
        assert!(!freed.load(Ordering::Acquire), "freed while the device was at work");
        // SAFETY: the arena is still there, which is what is tested; nobody else touches it.
        unsafe { (address as *mut u8).write_volatile(1) };
        gate.open();
        closing.join().unwrap();
    }

    #[test]
    fn a_fence_that_cannot_tell_keeps_its_buffer_and_says_why() {
        let pool = pool(&[class(4096, 2)]);
        let gate = Arc::new(Gate::default());
        let lease = pool.try_lease(1).unwrap().unwrap();
        lease.return_after(Arc::clone(&gate) as Arc<dyn Fence>);
        drop(lease);
        gate.broken.store(true, Ordering::Release);
        let other = pool.try_lease(1).unwrap().expect("the second buffer is free");
        assert!(pool.try_lease(1).is_err());
        drop(other);
        assert!(pool.try_lease(1).unwrap().is_some());
    }

    #[test]
    fn counters_tell_hits_waits_refusals_and_waste() {
        let groups = [vec![class(8192, 1)], vec![class(4096, 1)]];
        let pools = Pool::carve(&PageableAllocator, &groups).unwrap();
        let first = pools[0].try_lease(5000).unwrap().unwrap();
        let second = pools[1].try_lease(100).unwrap().unwrap();
        assert!(pools[0].try_lease(1).unwrap().is_none());
        let counters = pools[0].counters();
        assert_eq!((counters.hits, counters.waits, counters.refusals), (1, 0, 1));
        assert_eq!((counters.live_bytes, counters.leased_bytes, counters.waste_bytes()), (5000, 8192, 3192));
        drop(second);
        drop(first);
        let _third = pools[0].try_lease(8192).unwrap().unwrap();
        assert_eq!(pools[0].counters().live_bytes_max, 8192);
        assert!(pools[1].try_lease_spare(1, 1).unwrap().is_none());
        assert!(pools[1].try_lease_spare(1, 0).unwrap().is_some());
    }

    /// A small generator of well-mixed numbers (Steele and others 2014, SplitMix64): seeded, so that a failure repeats.
    struct Mix(u64);

    impl Mix {
        fn next(&mut self, below: usize) -> usize {
            self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut value = self.0;
            value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            ((value ^ (value >> 31)) % below as u64) as usize
        }
    }

    /// What must hold whatever happened: buffers are live, free or fenced, each once, and the counters agree.
    fn check(pool: &Pool, live: &[Lease]) {
        let state = pool.arena.lock();
        let arena = pool.arena.block.address().as_ptr() as usize;
        let mut ranges: Vec<(usize, usize)> =
            live.iter().map(|lease| (lease.address().as_ptr() as usize - arena, lease.capacity())).collect();
        let mut fenced_bytes = 0;
        for class in &state.classes {
            ranges.extend(class.free.iter().map(|offset| (*offset, class.bytes)));
            ranges.extend(class.fenced.iter().map(|(offset, _)| (*offset, class.bytes)));
            fenced_bytes += class.fenced.len() * class.bytes;
        }
        ranges.sort_unstable();
        assert!(ranges.iter().all(|(offset, bytes)| (offset | bytes).is_multiple_of(PAGE_BYTES)));
        // Every byte of the arena is in exactly one of them.
        let end = ranges.iter().fold(0, |end, (offset, bytes)| {
            assert_eq!(*offset, end, "a gap or an overlap");
            offset + bytes
        });
        let counters = state.counters[0];
        assert_eq!(end, counters.reserved_bytes);
        assert_eq!(counters.fenced_bytes, fenced_bytes);
        assert_eq!(counters.leased_bytes, live.iter().map(Lease::capacity).sum::<usize>());
        assert_eq!(counters.live_bytes, live.iter().map(|lease| lease.requested).sum::<usize>());
        assert!(
            counters.live_bytes <= counters.live_bytes_max && counters.live_bytes <= counters.leased_bytes
        );
    }

    #[test]
    fn a_million_random_steps_keep_every_byte_accounted_for() {
        let mut mix = Mix(4);
        for _ in 0..100 {
            let classes: Vec<_> =
                (0..=mix.next(4)).map(|_| class(1 + mix.next(60_000), 1 + mix.next(6))).collect();
            let largest = classes.iter().map(|class| class.bytes).max().unwrap();
            let pool = pool(&classes);
            let (mut live, mut gates): (Vec<Lease>, Vec<Arc<Gate>>) = Default::default();
            for step in 0..10_000 {
                match mix.next(5) {
                    0 | 1 => live.extend(pool.try_lease(1 + mix.next(largest)).unwrap()),
                    2 if !live.is_empty() => drop(live.swap_remove(mix.next(live.len()))),
                    3 if !live.is_empty() => {
                        let gate = Arc::new(Gate::default());
                        live[mix.next(live.len())].return_after(Arc::clone(&gate) as Arc<dyn Fence>);
                        gates.push(gate);
                    }
                    4 if !gates.is_empty() => gates.swap_remove(mix.next(gates.len())).open(),
                    _ => {}
                }
                if step % 16 == 0 {
                    check(&pool, &live);
                }
            }
            gates.iter().for_each(|gate| gate.open());
            live.clear();
            check(&pool, &live);
        }
    }

    #[test]
    fn sixteen_threads_never_share_a_buffer() {
        let pool = pool(&[class(4096, 3), class(8192, 2)]);
        let workers: Vec<_> = (0..16_u64)
            .map(|worker| {
                let pool = pool.clone();
                std::thread::spawn(move || {
                    let mut mix = Mix(worker);
                    for turn in 0..2000 {
                        let bytes = [4096, 8192][mix.next(2)];
                        let lease = pool
                            .lease(bytes, Duration::from_secs(60))
                            .unwrap()
                            .expect("somebody returns one");
                        let slice = LeaseSlice::new(Arc::new(lease), 0, bytes);
                        let mark = (worker as u8).wrapping_mul(31).wrapping_add(turn as u8);
                        // SAFETY: the lease is this thread's alone, which is what is tested.
                        unsafe { slice.as_mut_slice() }.fill(mark);
                        std::thread::yield_now();
                        // SAFETY: as above.
                        assert!(unsafe { slice.as_slice() }.iter().all(|byte| *byte == mark));
                    }
                })
            })
            .collect();
        workers.into_iter().for_each(|worker| worker.join().unwrap());
        let counters = pool.counters();
        assert_eq!(counters.hits + counters.waits, 16 * 2000);
        check(&pool, &[]);
    }

    proptest! {
        /// Any sequence of requests, drops and fences leaves every byte live, free or fenced.
        #[test]
        fn every_byte_is_in_one_place(
            classes in prop::collection::vec((1_usize..40_000, 1_usize..5), 1..5),
            actions in prop::collection::vec((0_u8..4, 1_usize..50_000, any::<prop::sample::Index>()), 1..80),
        ) {
            let classes: Vec<_> = classes.into_iter().map(|(bytes, count)| class(bytes, count)).collect();
            let pool = pool(&classes);
            let (mut live, mut gates): (Vec<Lease>, Vec<Arc<Gate>>) = Default::default();
            for (action, bytes, pick) in actions {
                match action {
                    0 => if let Ok(Some(lease)) = pool.try_lease(bytes) {
                        prop_assert!(lease.capacity() >= bytes);
                        live.push(lease);
                    },
                    1 if !live.is_empty() => drop(live.swap_remove(pick.index(live.len()))),
                    2 if !live.is_empty() => {
                        gates.push(Arc::new(Gate::default()));
                        let gate = Arc::clone(gates.last().unwrap());
                        live[pick.index(live.len())].return_after(gate);
                    }
                    3 if !gates.is_empty() => gates.swap_remove(pick.index(gates.len())).open(),
                    _ => {}
                }
                check(&pool, &live);
            }
            gates.iter().for_each(|gate| gate.open());
        }
    }
}
