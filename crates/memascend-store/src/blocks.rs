//! Single blocks of an extent, compared when they are read.
//!
//! The store keeps a checksum for each MiB. So the first read of a block reads the whole of its
//! MiB, compares that, and notes a checksum for each of its blocks; later reads of single blocks
//! are compared with those, until the MiB is written again.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use crc_fast::CrcAlgorithm::Crc32Iscsi;
use crc_fast::Digest;
use memascend_mem::LeaseSlice;
use memascend_nvme::BLOCK_BYTES;

use crate::checksums::{SUM_BYTES, checksum, cuts, sum_writes};
use crate::map::Map;
use crate::table::Bytes;
use crate::{Extent, Result, Store};

/// A MiB that is being read as a whole.
struct Collected {
    digest: Digest,
    /// Checksums of its blocks so far, from the first on.
    blocks: Vec<u32>,
}

/// Compares scattered reads of an extent, in one pass from its start to its end.
pub struct BlockCheck {
    of: Arc<Bytes>,
    map: Arc<Map>,
    collected: HashMap<u32, Collected>,
}

impl Store {
    /// A check of reads of single blocks of `extent`, whose writes have ended.
    ///
    /// # Panics
    /// If the tensor was freed.
    pub fn check_blocks(&self, extent: Extent) -> BlockCheck {
        BlockCheck {
            of: self.part_of(extent, 0, extent.bytes),
            map: Arc::clone(&self.map),
            collected: HashMap::new(),
        }
    }

    /// Whether `buffer` holds the bytes that the drives have of `extent` from its start on, by their
    /// checksums. False where a checksum is unknown: for bytes that only memory has, and without checksums.
    ///
    /// # Panics
    /// As [`Store::transfer`].
    pub fn is_stored(&self, extent: Extent, buffer: &LeaseSlice) -> bool {
        let of = self.part_of(extent, 0, buffer.bytes() as u64);
        // SAFETY: the caller leaves the buffer unchanged meanwhile.
        let sums = sum_writes(0, unsafe { buffer.as_slice() });
        of.sums().are(&sums)
    }
}

impl BlockCheck {
    /// Widens `ranges`, ascending ranges of whole blocks that are to be read, to the whole of each MiB
    /// whose blocks have no checksums of their own yet.
    pub fn widen(&mut self, ranges: Vec<Range<usize>>) -> Vec<Range<usize>> {
        let bytes = self.of.extent().bytes as usize;
        let sums = self.of.sums();
        let mut widened: Vec<Range<usize>> = Vec::with_capacity(ranges.len());
        for mut range in ranges {
            for (mib, _, _) in cuts(range.start as u64, range.len() as u64) {
                if sums.is_whole(mib) && sums.blocks(mib).is_none() {
                    let start = mib as usize * SUM_BYTES as usize;
                    range = range.start.min(start)..range.end.max(bytes.min(start + SUM_BYTES as usize));
                    self.collected
                        .entry(mib)
                        .or_insert_with(|| Collected { digest: Digest::new(Crc32Iscsi), blocks: Vec::new() });
                }
            }
            match widened.last_mut() {
                Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
                _ => widened.push(range),
            }
        }
        drop(sums);
        widened
    }

    /// Compares the next `bytes`, whole blocks from `offset` on, of the ranges that [`widen`](Self::widen)
    /// returned. Bytes without a checksum pass.
    ///
    /// # Errors
    /// If they differ from the written bytes.
    ///
    /// # Panics
    /// If a MiB is not read from its first block on.
    pub fn compare(&mut self, offset: u64, bytes: &[u8]) -> Result<()> {
        for (mib, range, place) in cuts(offset, bytes.len() as u64) {
            let part = &bytes[place];
            let found = part.chunks(BLOCK_BYTES).map(checksum);
            if let Some(collected) = self.collected.get_mut(&mib) {
                assert_eq!(collected.blocks.len(), range.start as usize, "a MiB is read in order");
                collected.digest.update(part);
                collected.blocks.extend(found);
                if !self.of.sums().note_blocks(mib, &collected.blocks, collected.digest.finalize() as u32) {
                    let whole = collected.blocks.len() * BLOCK_BYTES;
                    return Err(self.map.damage(&self.of, u64::from(mib) * SUM_BYTES, whole as u64).into());
                }
                continue;
            }
            let sums = self.of.sums();
            let Some(noted) = sums.blocks(mib) else { continue };
            let noted = &noted[range.start as usize..range.end as usize];
            let differs = found.zip(noted).position(|(found, noted)| found != *noted);
            drop(sums);
            if let Some(block) = differs {
                let at =
                    u64::from(mib) * SUM_BYTES + (range.start as u64 + block as u64) * BLOCK_BYTES as u64;
                return Err(self.map.damage(&self.of, at, BLOCK_BYTES as u64).into());
            }
        }
        Ok(())
    }
}
