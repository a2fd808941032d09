//! What the bytes of an extent were when they were written: a CRC-32C for each MiB.
//!
//! Transfers may be cut anywhere at blocks. A written part has a checksum of its own until parts cover a whole MiB, whose
//! checksum is theirs combined. Parts that are read are collected in the same way until they make up what was written.

use std::collections::HashMap;
use std::ops::Range;

use crc_fast::CrcAlgorithm::Crc32Iscsi;
use memascend_nvme::BLOCK_BYTES;
use serde::{Deserialize, Serialize};

/// What one checksum is of, counted from the begin of an extent; the last is of what is left.
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

/// CRC-32C of bytes of which `first` is that of the first ones, and `second` that of the `blocks` blocks behind.
fn combine(first: u32, second: u32, blocks: u32) -> u32 {
    crc_fast::checksum_combine(Crc32Iscsi, first.into(), second.into(), u64::from(blocks) * BLOCK) as u32
}

/// A range of the blocks of one MiB, and the checksum of its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Part {
    begin: u32,
    end: u32,
    sum: u32,
}

impl Part {
    fn overlaps(&self, other: &Range<u32>) -> bool {
        self.begin < other.end && other.start < self.end
    }
}

/// Parts that lie one behind another without a gap from `begin` to `end`, as one.
fn whole(parts: &[Part], begin: u32, end: u32) -> Option<u32> {
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

/// What was written together and is read part by part.
#[derive(Debug)]
struct Pending {
    written: Part,
    /// In order, none over another; and whether it was overwritten since, and cannot be read again.
    seen: Vec<(Part, bool)>,
}

/// A MiB that is more than known or unknown.
#[derive(Debug, Default)]
struct Mixed {
    /// In order, none over another. Empty where the whole MiB is known.
    written: Vec<Part>,
    pending: Vec<Pending>,
}

/// The checksums of one extent: 4 bytes and a bit for each MiB, and the parts where there are any.
#[derive(Debug, Default)]
pub(crate) struct Checksums {
    blocks: u64,
    sums: Vec<u32>,
    known: Vec<u64>,
    mixed: HashMap<u32, Mixed>,
}

/// A part of a transfer with its checksum.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Summed {
    mib: u32,
    part: Part,
}

/// Checksums as a manifest has them.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Encoded {
    /// One for each MiB, in base 64; 0 where it is not known, nothing where none is.
    known: String,
    /// First and number of MiBs of which nothing whole is known.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    unknown: Vec<(u32, u32)>,
    /// MiB, first and last block and checksum of what is known in those.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    parts: Vec<(u32, u32, u32, u32)>,
}

impl Encoded {
    /// How long the text is.
    pub(crate) fn text_bytes(&self) -> usize {
        self.known.len()
    }
}

impl Checksums {
    /// Of an extent of `bytes` bytes of which nothing is known.
    pub(crate) fn new(bytes: u64) -> Self {
        Self { blocks: bytes / BLOCK, ..Self::default() }
    }

    fn mibs(&self) -> usize {
        self.blocks.div_ceil(BLOCKS.into()) as usize
    }

    /// Blocks of a MiB, which are fewer in the last.
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

    /// Forgets everything.
    pub(crate) fn clear(&mut self) {
        self.known.fill(0);
        self.mixed.clear();
    }

    /// What was written in a MiB, in order.
    fn written(&self, mib: u32) -> Vec<Part> {
        match self.known(mib) {
            Some(sum) => vec![Part { begin: 0, end: self.blocks_of(mib), sum }],
            None => self.mixed.get(&mib).map(|mixed| mixed.written.clone()).unwrap_or_default(),
        }
    }

    /// Takes note that `parts` are about to be written.
    pub(crate) fn write(&mut self, parts: &[Summed]) {
        for Summed { mib, part } in parts {
            self.overwrite(*mib, Some(*part), part.begin..part.end);
        }
    }

    /// Takes note that nobody knows what `bytes` bytes at `offset` are.
    pub(crate) fn forget(&mut self, offset: u64, bytes: u64) {
        for (mib, range, _) in cuts(offset, bytes) {
            self.overwrite(mib, None, range);
        }
    }

    fn overwrite(&mut self, mib: u32, part: Option<Part>, range: Range<u32>) {
        let blocks = self.blocks_of(mib);
        if range == (0..blocks) {
            self.set_known(mib, part.map(|part| part.sum));
            self.mixed.remove(&mib);
            return;
        }
        // A whole MiB whose other parts were not read is not known any more.
        self.set_known(mib, None);
        let mixed = self.mixed.entry(mib).or_default();
        mixed.written.retain(|written| !written.overlaps(&range));
        mixed.pending.retain_mut(|pending| {
            // What was read before it was overwritten still tells whether the rest of what was written with it is right.
            let missing = unseen(pending, &range).next().is_some();
            let overlapped = |(part, gone): &mut (Part, bool)| *gone |= part.overlaps(&range);
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

    /// Where the bytes read at `offset` have to be cut, so that each piece is of one part that was written: MiB, blocks of
    /// it, and bytes of the transfer. What was never written is left out.
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

    /// Takes note of what was read in pieces of [`cut`](Self::cut). Where that completes something that was written and is
    /// not as it was written: offset and bytes of it.
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

    fn read_part(&mut self, mib: u32, part: Part) -> Option<Range<u32>> {
        // The whole of it at once, which is how most is read.
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
            let Part { begin, end, sum } = pending.written;
            if part.begin < begin || end < part.end {
                return true;
            }
            // What was overwritten is another by now; of what is read again the last reading counts.
            if pending.seen.iter().any(|(seen, gone)| *gone && seen.overlaps(&range)) {
                return true;
            }
            pending.seen.retain(|(seen, _)| !seen.overlaps(&range));
            let place = pending.seen.partition_point(|(seen, _)| seen.begin < part.begin);
            pending.seen.insert(place, (part, false));
            let parts: Vec<Part> = pending.seen.iter().map(|(part, _)| *part).collect();
            match whole(&parts, begin, end) {
                Some(found) if found != sum => {
                    damage = Some(begin..end);
                    false
                }
                found => found.is_none(),
            }
        });
        if mixed.written.is_empty() && mixed.pending.is_empty() {
            self.mixed.remove(&mib);
        }
        damage
    }

    /// What was written together was read together: nothing is left to be collected.
    fn settle(&mut self, mib: u32, written: &Part) {
        if let Some(mixed) = self.mixed.get_mut(&mib) {
            mixed.pending.retain(|pending| pending.written != *written);
            if mixed.written.is_empty() && mixed.pending.is_empty() {
                self.mixed.remove(&mib);
            }
        }
    }

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

    /// Those of an extent of `bytes` bytes, if they make sense for it.
    pub(crate) fn decode(bytes: u64, encoded: &Encoded) -> Option<Self> {
        let mut sums = Self::new(bytes);
        let mibs = sums.mibs();
        if encoded.known.is_empty() {
            if encoded.unknown != [(0, u32::try_from(mibs).ok()?)] {
                return None;
            }
        } else if encoded.known.len() as u64 != (mibs as u64 * 4).div_ceil(3) * 4 {
            // The text is in memory, so what it says is no more than there is room for.
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
            sums.mixed.entry(mib).or_default().written.push(Part { begin, end, sum });
        }
        // Those that make up a whole MiB would have been one.
        let merged = |(mib, mixed): (&u32, &Mixed)| whole(&mixed.written, 0, sums.blocks_of(*mib)).is_some();
        (!sums.mixed.iter().any(merged)).then_some(sums)
    }
}

/// The ranges of `range` that were not read yet of what was written together.
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

/// The MiBs that `bytes` bytes at `offset` touch: which, the blocks in it, and the bytes of the transfer.
fn cuts(offset: u64, bytes: u64) -> impl Iterator<Item = (u32, Range<u32>, Range<usize>)> {
    let end = offset + bytes;
    (offset / SUM_BYTES..end.div_ceil(SUM_BYTES)).map(move |mib| {
        let (first, last) = ((mib * SUM_BYTES).max(offset), ((mib + 1) * SUM_BYTES).min(end));
        let block = |at: u64| ((at - mib * SUM_BYTES) / BLOCK) as u32;
        (mib as u32, block(first)..block(last), (first - offset) as usize..(last - offset) as usize)
    })
}

/// The checksums of what is about to be written at `offset`.
pub(crate) fn sum_writes(offset: u64, bytes: &[u8]) -> Vec<Summed> {
    let sum = |(mib, range, place): (u32, Range<u32>, Range<usize>)| Summed {
        mib,
        part: Part { begin: range.start, end: range.end, sum: checksum(&bytes[place]) },
    };
    cuts(offset, bytes.len() as u64).map(sum).collect()
}

/// The checksums of pieces that were read.
pub(crate) fn sum_pieces(pieces: Vec<(u32, Range<u32>, Range<usize>)>, bytes: &[u8]) -> Vec<Summed> {
    let sum = |(mib, range, place): (u32, Range<u32>, Range<usize>)| Summed {
        mib,
        part: Part { begin: range.start, end: range.end, sum: checksum(&bytes[place]) },
    };
    pieces.into_iter().map(sum).collect()
}

const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/// The two digits of each twelve bits.
static PAIRS: [[u8; 2]; 4096] = {
    let mut pairs = [[0; 2]; 4096];
    let mut bits = 0;
    while bits < 4096 {
        pairs[bits] = [DIGITS[bits >> 6], DIGITS[bits & 63]];
        bits += 1;
    }
    pairs
};

/// Words in base 64, little-endian, padded to whole groups with `=`. Each commit writes a hundred thousand.
fn encode_words(mut words: impl ExactSizeIterator<Item = u32>) -> String {
    let mut digits = Vec::with_capacity((words.len() * 4).div_ceil(3) * 4);
    let group = |digits: &mut Vec<u8>, bits: u32| {
        let [[first, second], [third, fourth]] =
            [PAIRS[(bits >> 12 & 0xfff) as usize], PAIRS[(bits & 0xfff) as usize]];
        digits.extend_from_slice(&[first, second, third, fourth]);
    };
    // Three words are four groups of three bytes.
    while words.len() >= 3 {
        let mut next = || words.next().expect("three are left");
        let (a, b, c) = (next(), next(), next());
        group(&mut digits, a.swap_bytes() >> 8);
        group(&mut digits, (a >> 24) << 16 | (b & 0xffff).swap_bytes() >> 16);
        group(&mut digits, (b >> 16).swap_bytes() >> 8 | (c & 0xff));
        group(&mut digits, c.swap_bytes() & 0xff_ffff);
    }
    let mut rest: Vec<u8> = words.flat_map(u32::to_le_bytes).collect();
    let bytes = rest.len();
    rest.resize(bytes.next_multiple_of(3), 0);
    for three in rest.as_chunks::<3>().0 {
        group(&mut digits, u32::from_be_bytes([0, three[0], three[1], three[2]]));
    }
    let padding = rest.len() - bytes;
    let begin = digits.len() - padding;
    digits[begin..].fill(b'=');
    String::from_utf8(digits).expect("digits are ASCII")
}

/// As many words as that, if the text is exactly what they are in base 64.
fn decode_words(text: &str, words: usize) -> Option<Vec<u32>> {
    const VALUES: [u8; 256] = {
        let mut values = [0xff; 256];
        let mut index = 0;
        while index < 64 {
            values[DIGITS[index] as usize] = index as u8;
            index += 1;
        }
        values
    };
    let mut bytes = Vec::with_capacity(words * 4 + 2);
    for group in text.as_bytes().as_chunks::<4>().0 {
        let mut bits = 0;
        for byte in group {
            let value = if *byte == b'=' { 0 } else { VALUES[*byte as usize] };
            if value == 0xff {
                return None;
            }
            bits = bits << 6 | u32::from(value);
        }
        bytes.extend_from_slice(&bits.to_be_bytes()[1..]);
    }
    bytes.truncate(words * 4);
    let decoded: Vec<u32> = bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
    (decoded.len() == words && encode_words(decoded.iter().copied()) == text).then_some(decoded)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const BLOCKS_ALL: usize = 2 * BLOCKS as usize + 50;

    #[derive(Debug, Clone)]
    enum Action {
        Write { first: usize, count: usize, arrives: bool },
        Read { first: usize, count: usize },
        Remember,
    }

    fn range() -> impl Strategy<Value = (usize, usize)> {
        // Often around the ends of MiBs, and whole ones.
        let first = prop_oneof![0..BLOCKS_ALL, Just(0), Just(256), Just(512), 250_usize..262];
        let count = prop_oneof![1..BLOCKS_ALL, Just(256), Just(50), 1_usize..20];
        (first, count).prop_map(|(first, count)| (first, count.min(BLOCKS_ALL - first)))
    }

    fn action() -> impl Strategy<Value = Action> {
        prop_oneof![
            6 => (range(), prop::bool::weighted(0.9))
                .prop_map(|((first, count), arrives)| Action::Write { first, count, arrives }),
            6 => range().prop_map(|(first, count)| Action::Read { first, count }),
            1 => Just(Action::Remember),
        ]
    }

    struct Disk {
        bytes: Vec<u8>,
        sums: Checksums,
        writes: u8,
    }

    impl Disk {
        fn new() -> Self {
            let bytes = vec![0; BLOCKS_ALL * BLOCK_BYTES];
            Self { sums: Checksums::new(bytes.len() as u64), bytes, writes: 0 }
        }

        fn write(&mut self, first: usize, count: usize, arrives: bool) {
            self.writes = self.writes.wrapping_add(1);
            let (offset, length) = (first * BLOCK_BYTES, count * BLOCK_BYTES);
            let new = vec![self.writes; length];
            self.sums.write(&sum_writes(offset as u64, &new));
            if arrives {
                self.bytes[offset..offset + length].copy_from_slice(&new);
            } else {
                // Some of it arrived, and it is told that it did not.
                self.bytes[offset..offset + length / 2].copy_from_slice(&new[..length / 2]);
                self.sums.forget(offset as u64, length as u64);
            }
        }

        fn read(&mut self, first: usize, count: usize) -> Option<(u64, u64)> {
            let (offset, length) = (first * BLOCK_BYTES, count * BLOCK_BYTES);
            let pieces = self.sums.cut(offset as u64, length as u64);
            let sums = sum_pieces(pieces, &self.bytes[offset..offset + length]);
            self.sums.read(&sums)
        }

        /// Whether a byte is of something whose checksum is known.
        fn is_known(&self, at: usize) -> bool {
            let (mib, block) = ((at / SUM_BYTES as usize) as u32, (at / BLOCK_BYTES) as u32 % BLOCKS);
            self.sums.written(mib).iter().any(|part| (part.begin..part.end).contains(&block))
        }

        fn remember(&mut self) {
            let text = serde_json::to_string(&self.sums.encode()).unwrap();
            let decoded = Checksums::decode(self.bytes.len() as u64, &serde_json::from_str(&text).unwrap());
            self.sums = decoded.expect("what was encoded");
            assert_eq!(serde_json::to_string(&self.sums.encode()).unwrap(), text);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn whatever_is_cut_how_ever_right_bytes_are_right_and_a_flip_is_found(
            actions in prop::collection::vec(action(), 1..40),
            flip in 0..BLOCKS_ALL * BLOCK_BYTES,
            bit in 0..8_u32,
            cuts in prop::collection::vec(1_usize..300, 1..40),
        ) {
            let mut disk = Disk::new();
            for action in actions {
                match action {
                    Action::Write { first, count, arrives } => disk.write(first, count, arrives),
                    Action::Read { first, count } => prop_assert_eq!(disk.read(first, count), None),
                    Action::Remember => disk.remember(),
                }
            }
            let known = disk.is_known(flip);
            disk.bytes[flip] ^= 1 << bit;
            // All of it is read, in pieces of any length.
            let (mut at, mut found) = (0, None);
            for count in cuts.iter().cycle() {
                let count = (*count).min(BLOCKS_ALL - at);
                found = found.or(disk.read(at, count));
                at += count;
                if at == BLOCKS_ALL {
                    break;
                }
            }
            prop_assert_eq!(found.is_some(), known);
            if let Some((offset, bytes)) = found {
                prop_assert!((offset..offset + bytes).contains(&(flip as u64)), "{} {}", offset, bytes);
            }
        }

        #[test]
        fn what_was_written_in_parts_is_known_as_a_whole(cuts in prop::collection::vec(1_usize..300, 1..40)) {
            let mut disk = Disk::new();
            let mut parts = Vec::new();
            let mut at = 0;
            for count in cuts.iter().cycle() {
                let count = (*count).min(BLOCKS_ALL - at);
                parts.push((at, count));
                at += count;
                if at == BLOCKS_ALL {
                    break;
                }
            }
            // In some order.
            parts.sort_by_key(|(first, count)| (first * 7 + count * 13) % 31);
            for (first, count) in parts {
                disk.write(first, count, true);
            }
            prop_assert!(disk.sums.mixed.is_empty());
            for mib in 0..3 {
                let begin = mib as usize * SUM_BYTES as usize;
                let end = disk.bytes.len().min(begin + SUM_BYTES as usize);
                prop_assert_eq!(disk.sums.known(mib), Some(checksum(&disk.bytes[begin..end])));
            }
        }
    }

    #[test]
    fn what_is_overwritten_part_by_part_after_it_was_read_is_compared_to_its_end() {
        let mut disk = Disk::new();
        disk.write(0, 256, true);
        let flip = 200 * BLOCK_BYTES + 5;
        disk.bytes[flip] ^= 4;
        // An update in place: each part is read, then written.
        for (first, found) in [(0, None), (64, None), (128, None), (192, Some((0, 1 << 20)))] {
            assert_eq!(disk.read(first, 64), found, "part {first}");
            disk.write(first, 64, true);
        }
        assert_eq!(disk.read(0, 256), None);
        assert!(disk.sums.mixed.is_empty());
    }

    #[test]
    fn crc_32c_is_what_others_compute() {
        // The check value of the catalogues, and RFC 3720's for 32 zeros.
        assert_eq!(checksum(b"123456789"), 0xe306_9283);
        assert_eq!(checksum(&[0; 32]), 0x8a91_36aa);
    }

    #[test]
    fn base_64_is_exact() {
        for words in [
            vec![],
            vec![0],
            vec![1, u32::MAX],
            vec![0x0403_0201, 0x0807_0605, 0x0c0b_0a09],
            (0..50).map(|n| n * 0x1234_5679).collect(),
        ] {
            let text = encode_words(words.iter().copied());
            assert_eq!(decode_words(&text, words.len()), Some(words.clone()), "{text}");
            assert_eq!(decode_words(&text, words.len() + 1), None);
        }
        assert_eq!(decode_words("AQIDBA==", 1), Some(vec![0x0403_0201]));
        assert_eq!(
            encode_words([0x0403_0201, 0x0807_0605, 0x0c0b_0a09, 0x100f_0e0d].into_iter()),
            "AQIDBAUGBwgJCgsMDQ4PEA=="
        );
        for wrong in ["AQIDBB==", "AQIDBA=A", "AQID BA=", "AQIDBA--"] {
            assert_eq!(decode_words(wrong, 1), None, "{wrong}");
        }
    }
}
