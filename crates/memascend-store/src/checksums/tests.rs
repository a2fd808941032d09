//! Checksums against a model of the bytes on the drive.

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

    /// Whether a byte belongs to a written part that was partly overwritten after it had been read. A read of
    /// the remainder may find a flip there.
    fn is_collected(&self, at: usize) -> bool {
        let (mib, block) = ((at / SUM_BYTES as usize) as u32, (at / BLOCK_BYTES) as u32 % BLOCKS);
        let holds = |part: &SummedPart| (part.begin..part.end).contains(&block);
        let overwritten = |pending: &Pending| pending.seen.iter().any(|(part, gone)| *gone && holds(part));
        let collected = |pending: &Pending| holds(&pending.written) && !overwritten(pending);
        self.sums.mixed.get(&mib).is_some_and(|mixed| mixed.pending.iter().any(collected))
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
        let (known, collected) = (disk.is_known(flip), disk.is_collected(flip));
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
        // Bytes that were read before the flip count as right when they are read again in smaller
        // pieces. A read of the whole finds the flip.
        let found = if known { found.or_else(|| disk.read(0, BLOCKS_ALL)) } else { found };
        prop_assert!(found.is_some() || !known, "a flip of known bytes was not found");
        prop_assert!(found.is_none() || known || collected, "a flip was found in bytes that are not known");
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
