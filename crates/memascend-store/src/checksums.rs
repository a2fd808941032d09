//! Checksums of the bytes of an extent: a CRC-32C for each MiB that was written.
//!
//! Transfers may begin and end at any block. A written part has a checksum of its own until parts cover a
//! whole MiB: then their checksums are combined. Parts that are read are collected in the same way until they
//! cover the written part.
//!
//! One checksum for each tensor would not say where damage is. One for each block would take a thousandth of
//! the store in memory. The checksums of parts are combined because a resumed run with another budget may cut
//! transfers differently.

use std::collections::HashMap;
use std::ops::Range;

use crc_fast::CrcAlgorithm::Crc32Iscsi;
use memascend_nvme::BLOCK_BYTES;
use serde::{Deserialize, Serialize};

use crate::base64::{decode_words, encode_words};

/// Bytes that one checksum covers, counted from the start of an extent; the last one covers the
/// rest.
pub(crate) const SUM_BYTES: u64 = 1 << 20;

const BLOCK: u64 = BLOCK_BYTES as u64;
/// Blocks of a MiB.
const BLOCKS: u32 = (SUM_BYTES / BLOCK) as u32;

/// CRC-32C of some bytes.
pub(crate) fn checksum(bytes: &[u8]) -> u32 {
    crc_fast::checksum(Crc32Iscsi, bytes) as u32
}

/// CRC-32C of bytes in two pieces.
pub(crate) fn checksum_of_both(first: &[u8], second: &[u8]) -> u32 {
    let mut digest = crc_fast::Digest::new(Crc32Iscsi);
    digest.update(first);
    digest.update(second);
    digest.finalize() as u32
}

/// Combines the CRC-32C `first` of some bytes with the CRC of the `blocks` blocks behind them.
fn combine(first: u32, second: u32, blocks: u32) -> u32 {
    crc_fast::checksum_combine(Crc32Iscsi, first.into(), second.into(), u64::from(blocks) * BLOCK) as u32
}

/// A range of the blocks of one MiB, and the checksum of its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct SummedPart {
    begin: u32,
    end: u32,
    sum: u32,
}

impl SummedPart {
    fn overlaps(&self, other: &Range<u32>) -> bool {
        self.begin < other.end && other.start < self.end
    }
}

/// The combined checksum of parts that cover `begin..end` without a gap; None if they do not.
fn whole(parts: &[SummedPart], begin: u32, end: u32) -> Option<u32> {
    let (mut at, mut sum) = (begin, None);
    for part in parts {
        if part.begin != at {
            return None;
        }
        at = part.end;
        sum = Some(sum.map_or(part.sum, |sum| combine(sum, part.sum, part.end - part.begin)));
    }
    sum.filter(|_| at == end)
}

/// A part that was written at once and is being read in parts.
#[derive(Debug)]
struct Pending {
    written: SummedPart,
    /// The parts read so far, in order and without overlap; true for one that was overwritten
    /// since, which cannot be read again.
    seen: Vec<(SummedPart, bool)>,
}

/// A MiB that was written or read in parts.
#[derive(Debug, Default)]
struct Mixed {
    /// In order and without overlap. Empty if the checksum of the whole MiB is known.
    written: Vec<SummedPart>,
    pending: Vec<Pending>,
}

/// The checksums of one extent: 4 bytes and a bit for each MiB, and the parts where there are any;
/// 4 bytes for each block of a MiB from which single blocks are read.
#[derive(Debug, Default)]
pub(crate) struct Checksums {
    blocks: u64,
    sums: Vec<u32>,
    known: Vec<u64>,
    mixed: HashMap<u32, Mixed>,
    noted: HashMap<u32, Box<[u32]>>,
}

/// A part of a transfer with its checksum.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Summed {
    mib: u32,
    part: SummedPart,
}

/// Checksums in a manifest.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Encoded {
    /// One for each MiB, in base 64: 0 for a MiB whose checksum is unknown. Empty if all are
    /// unknown.
    known: String,
    /// First MiB and number of MiBs whose checksum is unknown.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    unknown: Vec<(u32, u32)>,
    /// MiB, first block, end block and checksum of the parts that are known in those.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    parts: Vec<(u32, u32, u32, u32)>,
}

impl Encoded {
    /// Length of the text in base 64.
    pub(crate) fn text_bytes(&self) -> usize {
        self.known.len()
    }
}

impl Checksums {
    /// Checksums of an extent of `bytes` bytes that was never written.
    pub(crate) fn new(bytes: u64) -> Self {
        Self { blocks: bytes / BLOCK, ..Self::default() }
    }

    fn mibs(&self) -> usize {
        self.blocks.div_ceil(BLOCKS.into()) as usize
    }

    /// Blocks of a MiB: fewer in the last one.
    fn blocks_of(&self, mib: u32) -> u32 {
        (self.blocks - u64::from(mib) * u64::from(BLOCKS)).min(BLOCKS.into()) as u32
    }

    fn known(&self, mib: u32) -> Option<u32> {
        let word = self.known.get(mib as usize / 64)?;
        (word >> (mib % 64) & 1 == 1).then(|| self.sums[mib as usize])
    }

    fn set_known(&mut self, mib: u32, sum: Option<u32>) {
        if self.sums.is_empty() {
            if sum.is_none() {
                return;
            }
            self.sums = vec![0; self.mibs()];
            self.known = vec![0; self.mibs().div_ceil(64)];
        }
        let (index, word, bit) = (mib as usize, mib as usize / 64, 1 << (mib % 64));
        match sum {
            Some(sum) => {
                self.sums[index] = sum;
                self.known[word] |= bit;
            }
            None => self.known[word] &= !bit,
        }
    }

    /// Whether every MiB has a checksum, or parts of it have.
    pub(crate) fn is_complete(&self) -> bool {
        (0..self.mibs() as u32).all(|mib| !self.written(mib).is_empty())
    }

    /// Forgets all checksums.
    pub(crate) fn clear(&mut self) {
        self.known.fill(0);
        self.mixed.clear();
        self.noted.clear();
    }

    /// Whether all of a MiB has one checksum.
    pub(crate) fn is_whole(&self, mib: u32) -> bool {
        self.known(mib).is_some()
    }

    /// Whether the checksums of bytes from the first on, by MiBs, match the written bytes.
    pub(crate) fn are(&self, sums: &[Summed]) -> bool {
        sums.iter().all(|Summed { mib, part }| {
            (part.begin, part.end) == (0, self.blocks_of(*mib)) && self.known(*mib) == Some(part.sum)
        })
    }

    /// The checksums of the blocks of a MiB, where they are noted.
    pub(crate) fn blocks(&self, mib: u32) -> Option<&[u32]> {
        self.noted.get(&mib).map(AsRef::as_ref)
    }

    /// Records the checksums of the blocks of a MiB that was read. `sum` is the checksum of all its bytes.
    /// Returns false if it differs from the written one.
    pub(crate) fn note_blocks(&mut self, mib: u32, blocks: &[u32], sum: u32) -> bool {
        if blocks.len() < self.blocks_of(mib) as usize {
            return true;
        }
        let same = self.known(mib) == Some(sum);
        if same {
            self.noted.insert(mib, blocks.into());
        }
        same
    }

    /// The written parts of a MiB, in order.
    fn written(&self, mib: u32) -> Vec<SummedPart> {
        match self.known(mib) {
            Some(sum) => vec![SummedPart { begin: 0, end: self.blocks_of(mib), sum }],
            None => self.mixed.get(&mib).map(|mixed| mixed.written.clone()).unwrap_or_default(),
        }
    }

    /// Records the checksums of parts that are about to be written.
    pub(crate) fn write(&mut self, parts: &[Summed]) {
        for Summed { mib, part } in parts {
            self.overwrite(*mib, Some(*part), part.begin..part.end);
        }
    }

    /// Forgets the checksums of `bytes` bytes at `offset`.
    pub(crate) fn forget(&mut self, offset: u64, bytes: u64) {
        for (mib, range, _) in cuts(offset, bytes) {
            self.overwrite(mib, None, range);
        }
    }

    fn overwrite(&mut self, mib: u32, part: Option<SummedPart>, range: Range<u32>) {
        let blocks = self.blocks_of(mib);
        self.noted.remove(&mib);
        if range == (0..blocks) {
            self.set_known(mib, part.map(|part| part.sum));
            self.mixed.remove(&mib);
            return;
        }
        // The checksum of the MiB does not yield the checksum of the surviving part.
        self.set_known(mib, None);
        let mixed = self.mixed.entry(mib).or_default();
        mixed.written.retain(|written| !written.overlaps(&range));
        mixed.pending.retain_mut(|pending| {
            // A part that was read before it was overwritten still counts towards the check of the part
            // written with it.
            let missing = unseen(pending, &range).next().is_some();
            let overlapped = |(part, gone): &mut (SummedPart, bool)| *gone |= part.overlaps(&range);
            pending.seen.iter_mut().for_each(overlapped);
            !missing
        });
        if let Some(part) = part {
            let place = mixed.written.partition_point(|written| written.begin < part.begin);
            mixed.written.insert(place, part);
            if let Some(sum) = whole(&mixed.written, 0, blocks) {
                mixed.written.clear();
                let done = mixed.pending.is_empty();
                self.set_known(mib, Some(sum));
                if done {
                    self.mixed.remove(&mib);
                }
            }
        } else if mixed.written.is_empty() && mixed.pending.is_empty() {
            self.mixed.remove(&mib);
        }
    }

    /// Cuts the bytes read at `offset` so that each piece belongs to one written part: MiB, its
    /// blocks, and bytes of the transfer. Bytes without a checksum are left out.
    pub(crate) fn cut(&self, offset: u64, bytes: u64) -> Vec<(u32, Range<u32>, Range<usize>)> {
        let mut pieces = Vec::new();
        for (mib, range, place) in cuts(offset, bytes) {
            let pending = self.mixed.get(&mib).map(|mixed| mixed.pending.as_slice()).unwrap_or_default();
            let written = self.written(mib);
            let parts = || written.iter().chain(pending.iter().map(|pending| &pending.written));
            let mut at: Vec<u32> = parts().flat_map(|part| [part.begin, part.end]).collect();
            at.retain(|at| range.contains(at));
            at.extend([range.start, range.end]);
            at.sort_unstable();
            at.dedup();
            for pair in at.windows(2) {
                let piece = pair[0]..pair[1];
                if parts().any(|part| part.overlaps(&piece)) {
                    let start = place.start + ((piece.start - range.start) as usize) * BLOCK_BYTES;
                    let end = start + (piece.end - piece.start) as usize * BLOCK_BYTES;
                    pieces.push((mib, piece, start..end));
                }
            }
        }
        pieces
    }

    /// Records the checksums of pieces of [`cut`](Self::cut) that were read. Returns offset and length of a
    /// part that these pieces complete and that is damaged.
    pub(crate) fn read(&mut self, parts: &[Summed]) -> Option<(u64, u64)> {
        let mut damage = None;
        for Summed { mib, part } in parts {
            if let Some(bad) = self.read_part(*mib, *part) {
                let offset = u64::from(*mib) * SUM_BYTES + u64::from(bad.start) * BLOCK;
                damage.get_or_insert((offset, u64::from(bad.end - bad.start) * BLOCK));
            }
        }
        damage
    }

    fn read_part(&mut self, mib: u32, part: SummedPart) -> Option<Range<u32>> {
        // The whole part at once, which is the usual case.
        let written = self.written(mib);
        let around = written.iter().find(|written| written.begin <= part.begin && part.end <= written.end);
        if let Some(same) = around.filter(|around| (around.begin, around.end) == (part.begin, part.end)) {
            self.settle(mib, same);
            return (same.sum != part.sum).then_some(part.begin..part.end);
        }
        if around.is_none() && !self.mixed.contains_key(&mib) {
            return None;
        }
        let mixed = self.mixed.entry(mib).or_default();
        if let Some(around) = around
            && !mixed.pending.iter().any(|pending| pending.written == *around)
        {
            mixed.pending.push(Pending { written: *around, seen: Vec::new() });
        }
        let range = part.begin..part.end;
        let mut damage = None;
        mixed.pending.retain_mut(|pending| {
            let SummedPart { begin, end, sum } = pending.written;
            if part.begin < begin || end < part.end {
                return true;
            }
            // An overwritten part has other bytes by now. If a part is read again, the last read
            // counts.
            if pending.seen.iter().any(|(seen, gone)| *gone && seen.overlaps(&range)) {
                return true;
            }
            pending.seen.retain(|(seen, _)| !seen.overlaps(&range));
            let place = pending.seen.partition_point(|(seen, _)| seen.begin < part.begin);
            pending.seen.insert(place, (part, false));
            let parts: Vec<SummedPart> = pending.seen.iter().map(|(part, _)| *part).collect();
            match whole(&parts, begin, end) {
                Some(read_sum) if read_sum != sum => {
                    damage = Some(begin..end);
                    false
                }
                read_sum => read_sum.is_none(),
            }
        });
        if mixed.written.is_empty() && mixed.pending.is_empty() {
            self.mixed.remove(&mib);
        }
        damage
    }

    /// Ends the collection of a written part that was read at once.
    fn settle(&mut self, mib: u32, written: &SummedPart) {
        if let Some(mixed) = self.mixed.get_mut(&mib) {
            mixed.pending.retain(|pending| pending.written != *written);
            if mixed.written.is_empty() && mixed.pending.is_empty() {
                self.mixed.remove(&mib);
            }
        }
    }

    /// The checksums as a manifest holds them.
    pub(crate) fn encode(&self) -> Encoded {
        let mut encoded = Encoded { known: String::new(), unknown: Vec::new(), parts: Vec::new() };
        if self.known.iter().any(|word| *word != 0) {
            let known = |mib: u32| self.known(mib).unwrap_or(0);
            encoded.known = encode_words((0..self.mibs() as u32).map(known));
        }
        for mib in 0..self.mibs() as u32 {
            if self.known(mib).is_some() {
                continue;
            }
            match encoded.unknown.last_mut() {
                Some((first, count)) if *first + *count == mib => *count += 1,
                _ => encoded.unknown.push((mib, 1)),
            }
            let parts = self.mixed.get(&mib).map(|mixed| mixed.written.as_slice()).unwrap_or_default();
            encoded.parts.extend(parts.iter().map(|part| (mib, part.begin, part.end, part.sum)));
        }
        encoded
    }

    /// The checksums of an extent of `bytes` bytes; None if they do not fit its length.
    pub(crate) fn decode(bytes: u64, encoded: &Encoded) -> Option<Self> {
        let mut sums = Self::new(bytes);
        let mibs = sums.mibs();
        if encoded.known.is_empty() {
            if encoded.unknown != [(0, u32::try_from(mibs).ok()?)] {
                return None;
            }
        } else if encoded.known.len() as u64 != (mibs as u64 * 4).div_ceil(3) * 4 {
            // Compared with the length of the text before memory is allocated for its words.
            return None;
        } else {
            sums.sums = decode_words(&encoded.known, mibs)?;
            sums.known = vec![u64::MAX; mibs.div_ceil(64)];
        }
        let mut end = 0;
        for &(first, count) in &encoded.unknown {
            let last = first.checked_add(count)?;
            if first < end || count == 0 || last as usize > mibs {
                return None;
            }
            end = last;
            if sums.sums.is_empty() {
                break;
            }
            (first..last).for_each(|mib| sums.set_known(mib, None));
        }
        let mut before = None;
        for &(mib, begin, end, sum) in &encoded.parts {
            let inside = (mib as usize) < mibs && begin < end && end <= sums.blocks_of(mib);
            if !inside || sums.known(mib).is_some() || before.is_some_and(|before| (mib, begin) < before) {
                return None;
            }
            before = Some((mib, end));
            sums.mixed.entry(mib).or_default().written.push(SummedPart { begin, end, sum });
        }
        // Parts that cover a whole MiB are encoded as one checksum.
        let merged = |(mib, mixed): (&u32, &Mixed)| whole(&mixed.written, 0, sums.blocks_of(*mib)).is_some();
        (!sums.mixed.iter().any(merged)).then_some(sums)
    }
}

/// The parts of `range` that belong to a written part and were not read yet.
fn unseen(pending: &Pending, range: &Range<u32>) -> impl Iterator<Item = Range<u32>> {
    let mut at = range.start.max(pending.written.begin);
    let end = range.end.min(pending.written.end);
    let mut missing = Vec::new();
    for (part, _) in &pending.seen {
        if part.begin > at && at < end {
            missing.push(at..part.begin.min(end));
        }
        at = at.max(part.end);
    }
    if at < end {
        missing.push(at..end);
    }
    missing.into_iter()
}

/// The MiBs that `bytes` bytes at `offset` touch: the MiB, its blocks, and the bytes of the
/// transfer.
pub(crate) fn cuts(offset: u64, bytes: u64) -> impl Iterator<Item = (u32, Range<u32>, Range<usize>)> {
    let end = offset + bytes;
    (offset / SUM_BYTES..end.div_ceil(SUM_BYTES)).map(move |mib| {
        let (first, last) = ((mib * SUM_BYTES).max(offset), ((mib + 1) * SUM_BYTES).min(end));
        let block = |at: u64| ((at - mib * SUM_BYTES) / BLOCK) as u32;
        (mib as u32, block(first)..block(last), (first - offset) as usize..(last - offset) as usize)
    })
}

/// The checksums of bytes that are about to be written at `offset`.
pub(crate) fn sum_writes(offset: u64, bytes: &[u8]) -> Vec<Summed> {
    let sum = |(mib, range, place): (u32, Range<u32>, Range<usize>)| Summed {
        mib,
        part: SummedPart { begin: range.start, end: range.end, sum: checksum(&bytes[place]) },
    };
    cuts(offset, bytes.len() as u64).map(sum).collect()
}

/// The checksums of pieces that were read.
pub(crate) fn sum_pieces(pieces: Vec<(u32, Range<u32>, Range<usize>)>, bytes: &[u8]) -> Vec<Summed> {
    let sum = |(mib, range, place): (u32, Range<u32>, Range<usize>)| Summed {
        mib,
        part: SummedPart { begin: range.start, end: range.end, sum: checksum(&bytes[place]) },
    };
    pieces.into_iter().map(sum).collect()
}

#[cfg(test)]
mod tests;
