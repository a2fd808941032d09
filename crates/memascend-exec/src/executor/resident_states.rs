//! Memory in which states stay from one step to the next.
//!
//! All planes of a piece lie in one buffer, so that a buffer is free again when few pieces are evicted; with
//! each plane where there was room, every buffer would hold a bit of something that stays. Eviction is a job
//! like a fetch: it waits for the unit's `InFlightCounter` and later jobs of the unit wait for it. If the caller did
//! it, it could come between the count that an update has waited for and the states that the update then
//! reads.

use std::sync::{Arc, Mutex, Weak};

use memascend_mem::{Lease, LeaseSlice, LockExt, Pool};

use crate::Result;

/// How many buffers are filled at once. A piece that does not fit in one may fit in another.
const OPEN_MAX: usize = 4;

/// Buffers for planes that stay in memory. Each is filled with one piece after another, and returns
/// to its pool when the last of them is gone.
pub struct ResidentStates {
    pool: Pool,
    bytes: usize,
    /// Buffers with room left, while something is in them, and how far they are filled.
    open: Mutex<Vec<(Weak<Lease>, usize)>>,
}

impl ResidentStates {
    /// Buffers of `bytes` bytes of `pool`.
    pub fn new(pool: Pool, bytes: usize) -> Self {
        Self { pool, bytes, open: Mutex::default() }
    }

    /// Memory for each of the planes of a piece, `planes` bytes, whole pages; None where there is
    /// none left. Never waits.
    ///
    /// All of them lie in one buffer, unless that is too small for them: so a buffer is free again
    /// when few pieces are released. Either all of them get memory then, or none.
    pub(super) fn take(&self, planes: &[usize]) -> Result<Vec<Option<LeaseSlice>>> {
        let sum = planes.iter().sum();
        if sum > self.bytes {
            return planes.iter().map(|bytes| self.take_one(*bytes)).collect();
        }
        let Some(room) = self.take_one(sum)? else { return Ok(vec![None; planes.len()]) };
        let mut end = 0;
        let slice = |bytes: &usize| {
            end += bytes;
            Some(room.narrow(end - bytes, *bytes))
        };
        Ok(planes.iter().map(slice).collect())
    }

    fn take_one(&self, bytes: usize) -> Result<Option<LeaseSlice>> {
        if bytes == 0 || bytes > self.bytes {
            return Ok(None);
        }
        let mut open = self.open.locked();
        // An unused buffer has returned.
        open.retain(|(lease, _)| lease.strong_count() > 0);
        for (lease, filled) in &mut *open {
            if *filled + bytes <= self.bytes
                && let Some(lease) = lease.upgrade()
            {
                let slice = LeaseSlice::new(lease, *filled, bytes);
                *filled += bytes;
                return Ok(Some(slice));
            }
        }
        let Some(lease) = self.pool.try_lease(self.bytes)?.map(Arc::new) else { return Ok(None) };
        if bytes < self.bytes {
            open.push((Arc::downgrade(&lease), bytes));
        }
        if open.len() > OPEN_MAX {
            let fullest = (0..open.len()).max_by_key(|index| open[*index].1).expect("some are open");
            open.swap_remove(fullest);
        }
        Ok(Some(LeaseSlice::new(lease, 0, bytes)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memascend_mem::{PAGE_BYTES, PageableAllocator, SizeClass};

    fn resident(buffers: usize) -> (ResidentStates, Pool) {
        let class = SizeClass::new("test", 4 * PAGE_BYTES, buffers).up_to(buffers);
        let pool = Pool::new(&PageableAllocator::default(), &[class]).unwrap();
        (ResidentStates::new(pool.clone(), 4 * PAGE_BYTES), pool)
    }

    /// Memory for planes of so many pages, if there is any for all of them.
    fn take(resident: &ResidentStates, pages: &[usize]) -> Option<Vec<LeaseSlice>> {
        let planes: Vec<_> = pages.iter().map(|pages| pages * PAGE_BYTES).collect();
        let slices: Vec<_> = resident.take(&planes).unwrap();
        assert_eq!(slices.len(), planes.len());
        let slices: Option<Vec<_>> = slices.into_iter().collect();
        let sizes = slices.iter().flatten().map(LeaseSlice::bytes);
        assert!(slices.is_none() || sizes.eq(planes));
        slices
    }

    fn all_differ<'a>(slices: impl IntoIterator<Item = &'a LeaseSlice>) -> bool {
        let pages = slices.into_iter().flat_map(|slice| {
            let first = slice.address().as_ptr().addr();
            (first..first + slice.bytes()).step_by(PAGE_BYTES)
        });
        let mut seen = std::collections::BTreeSet::new();
        pages.into_iter().all(|page| seen.insert(page))
    }

    #[test]
    fn buffers_are_filled_and_come_back() {
        let (resident, pool) = resident(2);
        let first = take(&resident, &[2, 1, 1]).unwrap();
        let next = take(&resident, &[3]).unwrap();
        assert!(take(&resident, &[2]).is_none() && take(&resident, &[5]).is_none());
        let last = take(&resident, &[1]).unwrap();
        assert!(all_differ(first.iter().chain(&next).chain(&last)));
        drop(first);
        assert_eq!(pool.free_buffers(1), 1);
        assert!(take(&resident, &[4]).is_some());
        // One that is not full returns as well.
        drop(next);
        drop(last);
        let part = take(&resident, &[1]);
        drop(part);
        assert_eq!(pool.free_buffers(1), 2);
    }

    #[test]
    fn ends_of_buffers_are_filled_while_others_are_open() {
        let (resident, pool) = resident(3);
        let large: Vec<_> = (0..3).map(|_| take(&resident, &[2, 1]).unwrap()).collect();
        assert!(take(&resident, &[1, 1]).is_none(), "the planes of a piece lie together");
        let small: Vec<_> = (0..3).map(|_| take(&resident, &[1]).unwrap()).collect();
        assert!(take(&resident, &[1]).is_none());
        assert!(all_differ(large.iter().chain(&small).flatten()));
        drop((large, small));
        assert_eq!(pool.free_buffers(1), 3);
        // Larger than a buffer: each plane by itself.
        let wide = take(&resident, &[3, 3, 3, 1]).unwrap();
        assert!(all_differ(&wide));
        assert!(take(&resident, &[]).unwrap().is_empty());
    }

    #[test]
    fn few_buffers_are_open_at_once() {
        let (resident, pool) = resident(8);
        let large: Vec<_> = (0..8).map(|_| take(&resident, &[3]).unwrap()).collect();
        let small: Vec<_> = (0..8).map_while(|_| take(&resident, &[1])).collect();
        assert_eq!(small.len(), OPEN_MAX);
        pool.resize(4 * PAGE_BYTES, 0).unwrap();
        drop((large, small));
        assert!(take(&resident, &[1]).is_none(), "a buffer that is to be given back was filled");
    }
}
