use std::collections::BTreeMap;

use memascend_nvme::BLOCK_BYTES;
use serde::Serialize;

/// A block-aligned byte range of the store's address space.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
pub struct Extent {
    /// First byte, a multiple of the block.
    pub offset: u64,
    /// Length in bytes, a multiple of the block.
    pub bytes: u64,
}

impl Extent {
    /// One past the last byte.
    pub fn end(&self) -> u64 {
        self.offset + self.bytes
    }
}

/// First-fit allocator of extents over an address space that grows at its end. Neighbouring free ranges
/// are merged, so freeing everything leaves nothing behind.
#[derive(Debug, Default)]
pub struct ExtentAllocator {
    end: u64,
    free: BTreeMap<u64, u64>,
}

impl ExtentAllocator {
    /// Where an extent of `bytes` bytes (rounded up to a block) would lie, without taking it.
    pub fn preview(&self, bytes: u64) -> Extent {
        let bytes = bytes.max(1).next_multiple_of(BLOCK_BYTES as u64);
        let fit = self.free.iter().find(|(_, length)| **length >= bytes).map(|(offset, _)| *offset);
        // A free range that touches the end may grow into the space behind it.
        let tail = self.free.last_key_value().filter(|(offset, length)| **offset + **length == self.end);
        let offset = fit.or(tail.map(|(offset, _)| *offset)).unwrap_or(self.end);
        Extent { offset, bytes }
    }

    /// Takes an extent returned by [`ExtentAllocator::preview`] since when nothing was taken or freed.
    pub fn take(&mut self, extent: Extent) {
        if let Some(length) = self.free.remove(&extent.offset)
            && length > extent.bytes
        {
            self.free.insert(extent.end(), length - extent.bytes);
        }
        self.end = self.end.max(extent.end());
    }

    /// Gives an extent back.
    ///
    /// # Panics
    /// If any of it is free already.
    pub fn free(&mut self, extent: Extent) {
        let Extent { mut offset, mut bytes } = extent;
        let before = self.free.range(..=offset).next_back().map(|(start, length)| (*start, *length));
        let after = self.free.range(offset..).next().map(|(start, length)| (*start, *length));
        assert!(extent.end() <= self.end, "{extent:?} was never allocated");
        assert!(before.is_none_or(|(start, length)| start + length <= offset), "{extent:?} is free already");
        assert!(after.is_none_or(|(start, _)| extent.end() <= start), "{extent:?} is free already");
        if let Some((start, length)) = before
            && start + length == offset
        {
            self.free.remove(&start);
            offset = start;
            bytes += length;
        }
        if let Some((start, length)) = after
            && offset + bytes == start
        {
            self.free.remove(&start);
            bytes += length;
        }
        self.free.insert(offset, bytes);
    }

    /// Length of the address space ever used.
    pub fn end(&self) -> u64 {
        self.end
    }

    /// Bytes that are free below [`ExtentAllocator::end`].
    pub fn free_bytes(&self) -> u64 {
        self.free.values().sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Extents are aligned and disjoint, accounting is exact, and freeing all leaves one free range.
        #[test]
        fn extents_never_overlap_and_all_space_returns(
            actions in prop::collection::vec((0_u8..3, 1_u64..200_000, any::<prop::sample::Index>()), 1..120)
        ) {
            let mut allocator = ExtentAllocator::default();
            let mut live: Vec<Extent> = Vec::new();
            for (action, bytes, pick) in actions {
                if action < 2 {
                    let extent = allocator.preview(bytes);
                    allocator.take(extent);
                    prop_assert!(extent.bytes >= bytes && extent.bytes < bytes + BLOCK_BYTES as u64);
                    prop_assert_eq!(extent.offset % BLOCK_BYTES as u64, 0);
                    live.push(extent);
                } else if !live.is_empty() {
                    allocator.free(live.swap_remove(pick.index(live.len())));
                }
                let mut sorted = live.clone();
                sorted.sort_by_key(|extent| extent.offset);
                prop_assert!(sorted.windows(2).all(|pair| pair[0].end() <= pair[1].offset));
                let live_bytes: u64 = live.iter().map(|extent| extent.bytes).sum();
                prop_assert_eq!(live_bytes + allocator.free_bytes(), allocator.end());
            }
            for extent in live.drain(..) {
                allocator.free(extent);
            }
            prop_assert!(allocator.free.len() <= 1);
            prop_assert_eq!(allocator.free_bytes(), allocator.end());
        }
    }

    #[test]
    #[should_panic(expected = "free already")]
    fn freeing_twice_is_a_bug_that_shows() {
        let mut allocator = ExtentAllocator::default();
        let extent = allocator.preview(1);
        allocator.take(extent);
        allocator.free(extent);
        allocator.free(extent);
    }
}
