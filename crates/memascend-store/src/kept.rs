//! Parts of an extent's value that are in host memory: reads are served from there, and the drives
//! may not have them yet.
//!
//! A part ends where the same bytes are written, and all parts of an extent end when the tensor moves to
//! another extent. A commit writes those that were not written. Parts belong to extents, not to tensors: a
//! value that is rolled back, or that a snapshot replaces, takes its parts with it.

use std::collections::BTreeMap;
use std::ops::Range;

use memascend_mem::LeaseSlice;

/// Bytes of an extent that are in a buffer.
#[derive(Debug)]
struct KeptPart {
    buffer: LeaseSlice,
    /// Whether the drives have them, or a write that has been submitted brings them there.
    written: bool,
}

impl KeptPart {
    fn narrow(&self, start: u64, range: Range<u64>) -> Self {
        let bytes = (range.end - range.start) as usize;
        Self { buffer: self.buffer.narrow((range.start - start) as usize, bytes), written: self.written }
    }
}

/// The parts of one extent, without overlap, by the offset at which each begins.
#[derive(Debug, Default)]
pub(crate) struct KeptParts(BTreeMap<u64, KeptPart>);

impl KeptParts {
    /// Keeps `buffer` as the bytes from `offset` on.
    pub(crate) fn insert(&mut self, offset: u64, buffer: LeaseSlice, written: bool) {
        self.cut(offset, buffer.bytes() as u64);
        self.0.insert(offset, KeptPart { buffer, written });
    }

    /// Forgets `bytes` bytes from `offset` on; the parts around them stay.
    pub(crate) fn cut(&mut self, offset: u64, bytes: u64) {
        let end = offset + bytes;
        for start in self.starts(offset, bytes) {
            let part = self.0.remove(&start).expect("found above");
            let part_end = start + part.buffer.bytes() as u64;
            if start < offset {
                self.0.insert(start, part.narrow(start, start..offset));
            }
            if end < part_end {
                self.0.insert(end, part.narrow(start, end..part_end));
            }
        }
    }

    /// Takes the buffer that holds exactly `bytes` bytes from `offset` on.
    pub(crate) fn take(&mut self, offset: u64, bytes: u64) -> Option<LeaseSlice> {
        self.0.get(&offset).filter(|part| part.buffer.bytes() as u64 == bytes)?;
        self.0.remove(&offset).map(|part| part.buffer)
    }

    /// Resident parts of `bytes` bytes from `offset` on, in order, as (start, buffer).
    pub(crate) fn within(&self, offset: u64, bytes: u64) -> Vec<(u64, LeaseSlice)> {
        let end = offset + bytes;
        let part = |start: u64| {
            let part = &self.0[&start];
            let range = start.max(offset)..end.min(start + part.buffer.bytes() as u64);
            (range.start, part.narrow(start, range).buffer)
        };
        self.starts(offset, bytes).into_iter().map(part).collect()
    }

    /// Whether the resident bytes at `offset` are exactly this buffer.
    pub(crate) fn is(&self, offset: u64, buffer: &LeaseSlice) -> bool {
        let (first, mut at) = (buffer.address().as_ptr(), 0);
        for (start, part) in self.within(offset, buffer.bytes() as u64) {
            if (start - offset) as usize != at || part.address().as_ptr() != first.wrapping_add(at) {
                return false;
            }
            at += part.bytes();
        }
        at == buffer.bytes()
    }

    /// The parts that the drives do not have.
    pub(crate) fn unwritten(&self) -> Vec<(u64, LeaseSlice)> {
        let unwritten = self.0.iter().filter(|(_, part)| !part.written);
        unwritten.map(|(offset, part)| (*offset, part.buffer.clone())).collect()
    }

    /// Records that the contents of `buffer` were written as the bytes from `offset` on.
    pub(crate) fn mark_written(&mut self, offset: u64, buffer: &LeaseSlice) {
        if let Some(part) = self.0.get_mut(&offset)
            && (part.buffer.address(), part.buffer.bytes()) == (buffer.address(), buffer.bytes())
        {
            part.written = true;
        }
    }

    /// Forgets everything.
    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }

    /// Forgets the parts that reach beyond `from`, whole; gives those that the drives do not have.
    pub(crate) fn release(&mut self, from: u64) -> Vec<(u64, LeaseSlice)> {
        let across = self.starts(from, 1).first().copied().unwrap_or(from);
        let beyond = self.0.split_off(&across).into_iter().filter(|(_, part)| !part.written);
        beyond.map(|(offset, part)| (offset, part.buffer)).collect()
    }

    /// Where the parts begin that overlap `bytes` bytes from `offset` on.
    fn starts(&self, offset: u64, bytes: u64) -> Vec<u64> {
        let before = self.0.range(..offset).next_back();
        let before = before.filter(|(start, part)| *start + part.buffer.bytes() as u64 > offset);
        let inside = self.0.range(offset..offset + bytes);
        before.into_iter().chain(inside).map(|(start, _)| *start).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use memascend_mem::{PAGE_BYTES, PageableAllocator, Pool, SizeClass};
    use proptest::prelude::*;

    use super::*;

    const PAGES: usize = 8;

    /// A buffer of some pages filled with `value`.
    fn buffer(pages: usize, value: u8) -> LeaseSlice {
        let class = SizeClass::new("test", pages * PAGE_BYTES, 1);
        let pool = Pool::new(&PageableAllocator::default(), &[class]).unwrap();
        let lease = pool.try_lease(pages * PAGE_BYTES).unwrap().unwrap();
        let buffer = LeaseSlice::new(Arc::new(lease), 0, pages * PAGE_BYTES);
        // SAFETY: the lease is fresh.
        unsafe { buffer.as_mut_slice() }.fill(value);
        buffer
    }

    fn at(page: usize) -> u64 {
        (page * PAGE_BYTES) as u64
    }

    #[derive(Debug, Clone)]
    enum Change {
        Insert { page: usize, pages: usize, written: bool },
        Cut { page: usize, pages: usize },
        Take { page: usize, pages: usize },
        Release { page: usize },
        Write,
    }

    fn change() -> impl Strategy<Value = Change> {
        let range = (0..PAGES).prop_flat_map(|page| (Just(page), 1..=PAGES - page));
        prop_oneof![
            3 => (range.clone(), any::<bool>())
                .prop_map(|((page, pages), written)| Change::Insert { page, pages, written }),
            2 => range.clone().prop_map(|(page, pages)| Change::Cut { page, pages }),
            1 => range.prop_map(|(page, pages)| Change::Take { page, pages }),
            1 => (0..=PAGES).prop_map(|page| Change::Release { page }),
            1 => Just(Change::Write),
        ]
    }

    proptest! {
        /// Each page holds the part that was kept there last: compared with an array with an entry for each
        /// page.
        #[test]
        fn keeps_what_was_kept_last(changes in prop::collection::vec(change(), 1..40)) {
            let mut kept = KeptParts::default();
            let mut pages_kept: [Option<(u8, bool)>; PAGES] = [None; PAGES];
            for (number, change) in changes.into_iter().enumerate() {
                let value = number as u8 + 1;
                match change {
                    Change::Insert { page, pages, written } => {
                        kept.insert(at(page), buffer(pages, value), written);
                        pages_kept[page..page + pages].fill(Some((value, written)));
                    }
                    Change::Cut { page, pages } => {
                        kept.cut(at(page), at(pages));
                        pages_kept[page..page + pages].fill(None);
                    }
                    Change::Take { page, pages } => {
                        if let Some(taken) = kept.take(at(page), at(pages)) {
                            // SAFETY: no other code has the buffer.
                            let first = unsafe { taken.as_slice() }[0];
                            let here = &mut pages_kept[page..page + pages];
                            prop_assert!(here.iter().all(|kept| kept.is_some_and(|(value, _)| value == first)));
                            here.fill(None);
                        }
                    }
                    Change::Release { page } => {
                        let before = kept.unwritten();
                        let all = kept.within(0, at(PAGES));
                        let gone = kept.release(at(page));
                        let beyond = |(offset, part): &(u64, LeaseSlice)| offset + part.bytes() as u64 > at(page);
                        for (start, part) in all.iter().filter(|part| beyond(part)) {
                            let pages = (*start as usize / PAGE_BYTES)..;
                            pages_kept[pages.start..pages.start + part.bytes() / PAGE_BYTES].fill(None);
                        }
                        let place = |(offset, part): &(u64, LeaseSlice)| (*offset, part.address());
                        let unwritten = before.iter().filter(|part| beyond(part)).map(place);
                        prop_assert!(gone.iter().map(place).eq(unwritten));
                    }
                    Change::Write => {
                        for (offset, buffer) in kept.unwritten() {
                            kept.mark_written(offset, &buffer);
                        }
                        pages_kept.iter_mut().flatten().for_each(|(_, written)| *written = true);
                    }
                }
                for (page, expected) in pages_kept.iter().enumerate() {
                    let found = kept.within(at(page), at(1));
                    // SAFETY: as above.
                    let value = found.first().map(|(_, part)| unsafe { part.as_slice() }[0]);
                    prop_assert_eq!(value, expected.map(|(value, _)| value));
                    if let Some((offset, part)) = found.first() {
                        prop_assert!(kept.is(*offset, part));
                    }
                }
                let unwritten: usize = kept.unwritten().iter().map(|(_, part)| part.bytes() / PAGE_BYTES).sum();
                let expected = pages_kept.iter().flatten().filter(|(_, written)| !written).count();
                prop_assert_eq!(unwritten, expected);
            }
        }
    }

    #[test]
    fn a_buffer_is_kept_where_all_of_it_is() {
        let (mut kept, whole) = (KeptParts::default(), buffer(4, 1));
        kept.insert(at(2), whole.narrow(0, 2 * PAGE_BYTES), true);
        assert!(!kept.is(at(2), &whole));
        kept.insert(at(4), whole.narrow(2 * PAGE_BYTES, 2 * PAGE_BYTES), true);
        assert!(kept.is(at(2), &whole));
        assert!(!kept.is(at(3), &whole) && !kept.is(at(2), &buffer(4, 1)));
        kept.cut(at(3), at(1));
        assert!(!kept.is(at(2), &whole));
    }
}
