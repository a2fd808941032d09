//! One arena, cut into pools of size classes; a buffer is leased and returns when the lease is
//! dropped.

mod arena;
mod counters;
mod lease;
mod outside;
mod resize;
#[cfg(test)]
mod tests;

use std::fmt;
use std::io::ErrorKind;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub use self::arena::Fence;
use self::arena::{Arena, Class, FENCE_POLL, State};
pub use self::counters::{ClassAtPeak, PoolCounters};
pub use self::lease::{Lease, LeaseSlice};
use self::outside::Counted;
pub use self::outside::OutsideMemory;
pub use self::resize::{ClassPlace, ResizeListener};
use crate::sync::{Condvar, Mutex, WaitExt};
use crate::{HostAllocator, MemError, Origin, Result, round_up_to_page};

/// One line of the pool's plan: `count` buffers of `bytes` bytes for `consumer`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SizeClass {
    /// Purpose of the buffers, as printed in the plan.
    pub consumer: String,
    /// Bytes of one buffer (rounded up to a page by the pool).
    pub bytes: usize,
    /// How many buffers.
    pub count: usize,
    /// How many there can be, if [`Pool::resize`] may change the number.
    pub count_max: Option<usize>,
}

impl SizeClass {
    /// `count` buffers of `bytes` bytes, always.
    pub fn new(consumer: impl Into<String>, bytes: usize, count: usize) -> Self {
        Self { consumer: consumer.into(), bytes, count, count_max: None }
    }

    /// The same class, with a number that may change: addresses are reserved for `count_max`
    /// buffers, or for `count` if those are more.
    pub fn up_to(self, count_max: usize) -> Self {
        Self { count_max: Some(count_max.max(self.count)), ..self }
    }
}

/// A part of an arena, cut into size classes. Cheap to clone. The arena lives until the last lease
/// is dropped.
#[derive(Clone)]
pub struct Pool {
    arena: Arc<Arena>,
    /// Which of the arena's pools this is.
    index: usize,
    /// Which of the arena's classes are this pool's.
    classes: Range<usize>,
}

impl Pool {
    /// Reserves one arena for all `groups` of size classes and cuts one pool per group, so that consumers of
    /// one group cannot starve another group. Classes of equal size in a group are merged.
    ///
    /// If a class may change its number, the arena reserves addresses and only the first buffers of each
    /// class are memory: not every allocator offers such an arena.
    pub fn carve(allocator: &dyn HostAllocator, groups: &[Vec<SizeClass>]) -> Result<Vec<Self>> {
        Self::carve_counted(allocator, groups, None)
    }

    fn carve_counted(
        allocator: &dyn HostAllocator,
        groups: &[Vec<SizeClass>],
        counted: Option<Counted>,
    ) -> Result<Vec<Self>> {
        let mut offset: usize = 0;
        let mut state = State::default();
        let mut ranges = Vec::new();
        for (pool, group) in groups.iter().enumerate() {
            let first = state.classes.len();
            let mut lines: Vec<&SizeClass> = group.iter().collect();
            lines.sort_by_key(|line| line.bytes);
            for line in lines {
                let count_max = line.count_max.unwrap_or(line.count).max(line.count);
                let bytes = round_up_to_page(line.bytes.max(1));
                if count_max == 0 {
                    continue;
                }
                let start = offset;
                offset =
                    bytes.checked_mul(count_max).and_then(|class| class.checked_add(offset)).ok_or_else(
                        || MemError::Reserve { bytes: usize::MAX, source: ErrorKind::OutOfMemory.into() },
                    )?;
                let classes = &mut state.classes;
                if classes[first..].last().is_none_or(|class| class.bytes != bytes) {
                    classes.push(Class { start, bytes, pool, ..Class::default() });
                }
                let class = classes.last_mut().expect("pushed if there was none");
                class.count += line.count;
                class.count_max += count_max;
                class.elastic |= line.count_max.is_some();
            }
            let mut reserved_bytes = 0;
            for class in &mut state.classes[first..] {
                let mut offsets = (0..class.count_max).map(|index| class.start + index * class.bytes);
                class.free = offsets.by_ref().take(class.count).collect();
                // Those that come next are taken from the end.
                class.absent = offsets.rev().collect();
                reserved_bytes += class.count * class.bytes;
            }
            state.counters.push(PoolCounters { reserved_bytes, ..PoolCounters::default() });
            ranges.push(first..state.classes.len());
        }
        let block = if state.classes.iter().any(|class| class.elastic) {
            let block = allocator.reserve(offset)?;
            // Classes that begin whole; see `Arena::shrink`.
            for class in state.classes.iter().filter(|class| class.count == class.count_max) {
                block.use_huge_pages(class.start..class.start + class.count_max * class.bytes);
            }
            block.commit(&state.classes.iter().flat_map(Class::memory).collect::<Vec<_>>())?;
            block
        } else {
            allocator.allocate(offset)?
        };
        let arena = Arc::new(Arena {
            block,
            allocator: allocator.name(),
            origin: Origin::here(),
            state: Mutex::new(state),
            returned: Condvar::new(),
            resizing: Mutex::new(Vec::new()),
            leaving: Condvar::new(),
            _counted: counted,
        });
        let pool = |(index, classes)| Self { arena: Arc::clone(&arena), index, classes };
        Ok(ranges.into_iter().enumerate().map(pool).collect())
    }

    /// Reserves one arena for `classes` alone.
    pub fn new(allocator: &dyn HostAllocator, classes: &[SizeClass]) -> Result<Self> {
        let mut pools = Self::carve(allocator, &[classes.to_vec()])?;
        Ok(pools.pop().expect("one group gives one pool"))
    }

    /// A buffer of the smallest class that holds `bytes`, or `None` when that class has none free.
    /// A larger class never steps in: its buffers are planned for another consumer, which could
    /// then starve.
    ///
    /// # Errors
    /// [`MemError::TooLarge`] if no class holds `bytes`; the error of a [`Fence`] if no buffer is
    /// free and the state of a fenced one is unknown.
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

    /// As [`Pool::try_lease`], but only if more than `reserve` buffers of the class are free.
    pub fn try_lease_spare(&self, bytes: usize, reserve: usize) -> Result<Option<Lease>> {
        let mut state = self.arena.lock();
        let class = self.class_of(&state, bytes)?;
        if state.classes[class].free.len() <= reserve {
            match state.settle(class) {
                // A free buffer still serves other requests, so the fence's error is not reported
                // here.
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

    /// The highest sum of live bytes over all pools carved together, and every class at that
    /// moment, in the order of the groups and of the sizes within them.
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

    /// Bytes of the arena that lie in huge pages now; see [`HostBlock::huge_page_bytes`].
    pub fn huge_page_bytes(&self) -> Option<usize> {
        self.arena.block.huge_page_bytes()
    }

    /// Number of the smallest class that holds `bytes`.
    fn class_of(&self, state: &State, bytes: usize) -> Result<usize> {
        let classes = &state.classes[self.classes.clone()];
        let smallest = classes.iter().position(|class| class.bytes >= bytes);
        smallest.map(|index| self.classes.start + index).ok_or_else(|| MemError::TooLarge {
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

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("counters", &self.counters()).finish_non_exhaustive()
    }
}
