//! The note that a device keeps for its owner: the store's manifest. Two slots are written in turn,
//! so that an interrupted write leaves the note before.
//!
//! A slot begins with a block of 4096 bytes, numbers little-endian, the rest zero; the note
//! follows.
//!
//! | bytes | |
//! | --- | --- |
//! | 0..16 | `memascend-note`, two zeros |
//! | 16..20 | kind: 1 a note, 2 there is none any more |
//! | 20..24 | CRC-32 of the note |
//! | 24..40 | UUID of the device |
//! | 40..48 | sequence number: the valid slot with the higher one counts |
//! | 48..56 | length of the note |
//! | 4092..4096 | CRC-32 of the 4092 bytes before |

use std::fs::File;
use std::io;

use crate::block_device::blocks::Blocks;
use crate::block_device::crc::crc32;
use crate::block_device::superblock::Superblock;
use crate::memory::copy_of;
use crate::{BLOCK_BYTES, Uuid};

const MAGIC: &[u8; 16] = b"memascend-note\0\0";
const CRC_AT: usize = BLOCK_BYTES - 4;
const KEPT: u32 = 1;
const CLEARED: u32 = 2;
/// Far longer than any note that a store needs, and short enough to load. Formatting reserves less.
const NOTE_BYTES_MAX: u64 = 256 << 20;
/// Sequence numbers count upwards from one. None gets this high, so the next one always exists.
const SEQUENCE_MAX: u64 = u64::MAX / 2;

/// The result of looking for a note.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FoundNote {
    /// The last whole note, unless it was removed.
    pub note: Option<Vec<u8>>,
    /// Whether the other slot holds a damaged note that may have been newer. An interrupted write
    /// leaves one, and so does damage.
    pub damaged: bool,
}

/// The medium that slots lie on.
pub(crate) trait Medium {
    /// Reads `bytes` bytes, rounded up to whole blocks.
    fn read(&self, offset: u64, bytes: usize) -> io::Result<Blocks>;
    /// Writes all blocks at `offset`.
    fn write(&self, offset: u64, blocks: &Blocks) -> io::Result<()>;
    /// Waits until everything written is on the medium.
    fn flush(&self) -> io::Result<()>;
}

impl Medium for File {
    fn read(&self, offset: u64, bytes: usize) -> io::Result<Blocks> {
        Blocks::read(self, offset, bytes)
    }

    fn write(&self, offset: u64, blocks: &Blocks) -> io::Result<()> {
        blocks.write(self, offset)
    }

    fn flush(&self) -> io::Result<()> {
        self.sync_data()
    }
}

/// Why a slot was not written durably.
#[derive(Debug)]
pub(crate) enum PutError {
    /// The slots cannot be read or written.
    Transfer(io::Error),
    /// The slot was written, and the medium may not have it.
    Flush(io::Error),
}

/// The two slots of a device.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Notes {
    id: Uuid,
    offset: u64,
    slot_bytes: u64,
}

/// Content of a slot.
enum Content {
    /// The slot was never written.
    Empty,
    /// A checksum is wrong. Holds the sequence number if the header's checksum is right.
    Damaged(Option<u64>),
    /// A note, or a record that the note was removed.
    Whole(Slot),
}

/// A slot whose checksums are right.
struct Slot {
    index: u64,
    sequence: u64,
    kind: u32,
    note: Vec<u8>,
}

impl Notes {
    pub(crate) fn of(superblock: &Superblock) -> Self {
        Self::at(superblock.id, superblock.note_offset, superblock.note_bytes)
    }

    /// Slots at `offset`, of `bytes` bytes together.
    pub(crate) fn at(id: Uuid, offset: u64, bytes: u64) -> Self {
        Self { id, offset, slot_bytes: bytes / 2 / BLOCK_BYTES as u64 * BLOCK_BYTES as u64 }
    }

    /// The longest note. A superblock that a stranger wrote may have slots as long as the drive.
    pub(crate) fn limit_bytes(&self) -> u64 {
        (self.slot_bytes - BLOCK_BYTES as u64).min(NOTE_BYTES_MAX)
    }

    /// Where the slots begin.
    pub(crate) fn slot_offsets(&self) -> [u64; 2] {
        [self.offset, self.offset + self.slot_bytes]
    }

    /// The note that was written last and is whole. It may not be on the medium yet.
    pub(crate) fn read(&self, medium: &impl Medium) -> io::Result<Option<Vec<u8>>> {
        Ok(self.look(medium)?.note)
    }

    /// As [`Notes::read`], and whether there may have been a newer note. What is found is on the medium
    /// when this returns.
    pub(crate) fn find(&self, medium: &impl Medium) -> io::Result<FoundNote> {
        let found = self.look(medium)?;
        medium.flush()?;
        Ok(found)
    }

    fn look(&self, medium: &impl Medium) -> io::Result<FoundNote> {
        let (newest, damaged) = self.newest(medium)?;
        Ok(FoundNote { note: newest.filter(|slot| slot.kind == KEPT).map(|slot| slot.note), damaged })
    }

    /// Writes a note of at most [`limit_bytes`](Self::limit_bytes), which is on the medium when this returns.
    pub(crate) fn write(&self, medium: &impl Medium, note: &[u8]) -> Result<(), PutError> {
        self.put(medium, KEPT, note)
    }

    /// Records that there is no note. The record is on the medium when this returns.
    pub(crate) fn clear(&self, medium: &impl Medium) -> Result<(), PutError> {
        self.put(medium, CLEARED, &[])
    }

    fn put(&self, medium: &impl Medium, kind: u32, note: &[u8]) -> Result<(), PutError> {
        self.write_slot(medium, kind, note).map_err(PutError::Transfer)?;
        medium.flush().map_err(PutError::Flush)
    }

    fn write_slot(&self, medium: &impl Medium, kind: u32, note: &[u8]) -> io::Result<()> {
        assert!(note.len() as u64 <= self.limit_bytes(), "the note's length was checked before");
        let (index, sequence) = match self.newest(medium)?.0 {
            Some(newest) => (1 - newest.index, newest.sequence + 1),
            None => (0, 1),
        };
        let mut blocks = Blocks::zeroed(BLOCK_BYTES + note.len())?;
        let bytes = blocks.bytes_mut();
        bytes[..16].copy_from_slice(MAGIC);
        bytes[16..20].copy_from_slice(&kind.to_le_bytes());
        bytes[20..24].copy_from_slice(&crc32(note).to_le_bytes());
        bytes[24..40].copy_from_slice(self.id.as_bytes());
        bytes[40..48].copy_from_slice(&sequence.to_le_bytes());
        bytes[48..56].copy_from_slice(&(note.len() as u64).to_le_bytes());
        let crc = crc32(&bytes[..CRC_AT]);
        bytes[CRC_AT..BLOCK_BYTES].copy_from_slice(&crc.to_le_bytes());
        bytes[BLOCK_BYTES..BLOCK_BYTES + note.len()].copy_from_slice(note);
        medium.write(self.slot_offsets()[index as usize], &blocks)
    }

    /// The valid slot with the highest sequence number, and whether the other one is damaged and
    /// may be newer. A slot that cannot be read is an error: its note may be newer than the other.
    fn newest(&self, medium: &impl Medium) -> io::Result<(Option<Slot>, bool)> {
        let mut newest: Option<Slot> = None;
        let mut damaged = None;
        for index in 0..2 {
            match self.slot(medium, index)? {
                Content::Empty => {}
                Content::Damaged(sequence) => damaged = damaged.max(Some(sequence.unwrap_or(u64::MAX))),
                Content::Whole(slot) => {
                    if newest.as_ref().is_none_or(|newest| slot.sequence > newest.sequence) {
                        newest = Some(slot);
                    }
                }
            }
        }
        let sequence = newest.as_ref().map(|slot| slot.sequence);
        Ok((newest, damaged > sequence))
    }

    fn slot(&self, medium: &impl Medium, index: u64) -> io::Result<Content> {
        let offset = self.slot_offsets()[index as usize];
        let header = medium.read(offset, BLOCK_BYTES)?;
        let header = header.first();
        if header.iter().all(|byte| *byte == 0) {
            return Ok(Content::Empty);
        }
        let u32_at = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().expect("four bytes"));
        let u64_at = |at: usize| u64::from_le_bytes(header[at..at + 8].try_into().expect("eight bytes"));
        let (kind, note_crc, sequence, length) = (u32_at(16), u32_at(20), u64_at(40), u64_at(48));
        let is_header = header[..16] == *MAGIC
            && header[24..40] == *self.id.as_bytes()
            && u32_at(CRC_AT) == crc32(&header[..CRC_AT]);
        let is_possible =
            matches!(kind, KEPT | CLEARED) && sequence <= SEQUENCE_MAX && length <= self.limit_bytes();
        if !is_header || !is_possible {
            return Ok(Content::Damaged(None));
        }
        let length = usize::try_from(length).expect("a slot fits into memory");
        let note = medium.read(offset + BLOCK_BYTES as u64, length)?;
        let note = &note.bytes()[..length];
        if crc32(note) != note_crc {
            return Ok(Content::Damaged(Some(sequence)));
        }
        Ok(Content::Whole(Slot { index, sequence, kind, note: copy_of(note)? }))
    }
}

#[cfg(test)]
#[path = "notes_power.rs"]
mod power;

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use proptest::prelude::*;

    use super::*;
    use crate::random_uuid;

    const DEVICE_BYTES: u64 = 16 << 20;

    fn area() -> (File, Notes) {
        // In memory where that is possible: each note is flushed.
        let file = tempfile::tempfile_in("/dev/shm").or_else(|_| tempfile::tempfile()).unwrap();
        file.set_len(DEVICE_BYTES).unwrap();
        let superblock = Superblock::plan(random_uuid().unwrap(), DEVICE_BYTES, 512);
        (file, Notes::of(&superblock))
    }

    fn slot_of(file: &File, notes: &Notes, index: usize) -> Vec<u8> {
        let mut bytes = vec![0; notes.slot_bytes as usize];
        file.read_exact_at(&mut bytes, notes.slot_offsets()[index]).unwrap();
        bytes
    }

    /// A drive whose superblock gives notes all of it, and whose slots say that they are as long as that.
    struct Tampered(Notes, u64);

    impl Medium for Tampered {
        fn read(&self, offset: u64, bytes: usize) -> io::Result<Blocks> {
            assert!(bytes <= BLOCK_BYTES, "{bytes} bytes of a note are read at {offset}");
            let mut header = Blocks::zeroed(BLOCK_BYTES)?;
            let block = header.bytes_mut();
            block[..16].copy_from_slice(MAGIC);
            block[16..20].copy_from_slice(&KEPT.to_le_bytes());
            block[24..40].copy_from_slice(self.0.id.as_bytes());
            block[40..48].copy_from_slice(&1_u64.to_le_bytes());
            block[48..56].copy_from_slice(&self.1.to_le_bytes());
            let crc = crc32(&block[..CRC_AT]);
            block[CRC_AT..].copy_from_slice(&crc.to_le_bytes());
            Ok(header)
        }

        fn write(&self, _: u64, _: &Blocks) -> io::Result<()> {
            unreachable!("nothing is written")
        }

        fn flush(&self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_note_that_says_it_is_longer_than_any_is_damaged_and_not_read() {
        let id = random_uuid().unwrap();
        let notes = Notes::at(id, 1 << 20, 1 << 60);
        assert_eq!(notes.limit_bytes(), NOTE_BYTES_MAX);
        for length in [NOTE_BYTES_MAX + 1, 1 << 40, notes.slot_bytes, u64::MAX] {
            assert_eq!(
                notes.find(&Tampered(notes, length)).unwrap(),
                FoundNote { note: None, damaged: true }
            );
        }
    }

    /// What has no medium cannot be flushed, and the system says so.
    #[test]
    fn a_flush_reaches_the_system() {
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let file = File::from(std::os::fd::OwnedFd::from(socket));
        assert_eq!(Medium::flush(&file).unwrap_err().raw_os_error(), Some(libc::EINVAL));
    }

    #[test]
    fn the_last_note_is_read() {
        let (file, notes) = area();
        assert_eq!(notes.read(&file).unwrap(), None);
        for length in [0, 1, 4096, 5000, notes.limit_bytes() as usize, 3] {
            let note = vec![length as u8; length];
            notes.write(&file, &note).unwrap();
            assert_eq!(notes.read(&file).unwrap(), Some(note));
        }
        notes.clear(&file).unwrap();
        assert_eq!(notes.read(&file).unwrap(), None);
        notes.write(&file, b"again").unwrap();
        assert_eq!(notes.read(&file).unwrap(), Some(b"again".to_vec()));
    }

    #[test]
    fn slots_stay_within_the_area() {
        let (file, notes) = area();
        let superblock = Superblock::plan(notes.id, DEVICE_BYTES, 512);
        let note = vec![0xff; notes.limit_bytes() as usize];
        notes.write(&file, &note).unwrap();
        notes.write(&file, &note).unwrap();
        let mut bytes = vec![0; DEVICE_BYTES as usize];
        file.read_exact_at(&mut bytes, 0).unwrap();
        let (start, end) = (superblock.note_offset as usize, superblock.data_offset as usize);
        assert!(bytes[..start].iter().chain(&bytes[end..]).all(|&byte| byte == 0));
        assert_eq!(bytes[end - 1], 0xff);
    }

    /// How many of `bits` bits are flipped.
    fn flips(bits: u64) -> u64 {
        match std::env::var("MEMASCEND_FLIPS") {
            Ok(count) if count == "all" => bits,
            Ok(count) => count.parse().expect("a number, or all"),
            Err(_) => 10_000,
        }
    }

    /// On the image of a device with superblocks and two notes, a flipped bit changes the result,
    /// or lies in unused bytes. `MEMASCEND_FLIPS` is how many places are tried, or `all`.
    #[test]
    fn a_flipped_bit_is_noticed_or_in_unused_bytes() {
        use crate::block_device::format::Standing;
        let (file, _) = area();
        let superblock = Superblock::plan(random_uuid().unwrap(), DEVICE_BYTES, 512);
        let notes = Notes::of(&superblock);
        let (copy, block) = (Superblock::copy_offset(DEVICE_BYTES), BLOCK_BYTES as u64);
        for place in [0, copy] {
            file.write_all_at(&superblock.encode(), place).unwrap();
        }
        let written = [vec![1; 700], vec![2; 5000]];
        written.iter().for_each(|note| notes.write(&file, note).unwrap());
        let [older, newer] = notes.slot_offsets();
        // Where something is written, and as much behind it.
        let areas =
            [0..2 * block, older..older + 2 * block, newer..newer + 4 * block, copy - block..copy + block];
        let bits: u64 = areas.iter().map(|area| (area.end - area.start) * 8).sum();
        let count = flips(bits);
        let mut counts = [0; 2];
        for index in 0..count {
            let mut bit = if count >= bits { index } else { index * 0x9E37_79B9 % bits };
            let mut areas = areas.iter();
            let place = loop {
                let area = areas.next().expect("the bit is in one of them");
                let length = (area.end - area.start) * 8;
                if bit < length {
                    break area.start + bit / 8;
                }
                bit -= length;
            };
            let mut byte = [0];
            file.read_exact_at(&mut byte, place).unwrap();
            file.write_all_at(&[byte[0] ^ 1 << (bit % 8)], place).unwrap();
            let standing = Standing::read(&file, DEVICE_BYTES).unwrap();
            let found = notes.look(&file).unwrap();
            file.write_all_at(&byte, place).unwrap();
            let within = |begin: u64, bytes: u64| (begin..begin + bytes).contains(&place);
            let (newest, before) = (Some(written[1].clone()), Some(written[0].clone()));
            if within(0, block) {
                // Opening is refused, and says that the copy is whole.
                assert!(matches!(standing, Standing::FirstBlockLost(found) if found == superblock));
            } else {
                assert!(matches!(standing, Standing::Whole(found) if found == superblock));
            }
            // The superblock's copy is used only if the first superblock is damaged, and an older
            // note only if the newer one is.
            let expected = match place {
                _ if within(newer, block + 5000) => FoundNote { note: before, damaged: true },
                _ => FoundNote { note: newest, damaged: within(older, block) },
            };
            assert_eq!(found, expected, "byte {place}");
            let used = within(0, block) || within(newer, block + 5000) || within(older, block);
            counts[usize::from(used)] += 1;
        }
        assert!(counts.iter().all(|found| *found > count / 10), "{counts:?}");
    }

    #[test]
    fn a_note_of_another_device_is_none() {
        let (file, notes) = area();
        notes.write(&file, b"mine").unwrap();
        let other = Notes { id: random_uuid().unwrap(), ..notes };
        assert_eq!(other.read(&file).unwrap(), None);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// A crash leaves any mixture of the old sectors of the slot and the new ones: the note
        /// before is read then, or the new one if all of it arrived.
        #[test]
        fn a_write_that_is_cut_short_leaves_the_note_before(
            lengths in prop::collection::vec(0_usize..20_000, 1..5),
            cleared in any::<bool>(),
            last in prop::collection::vec(any::<u8>(), 1..20_000),
            arrived in prop::collection::vec(any::<bool>(), 64),
        ) {
            let (file, notes) = area();
            for (number, &length) in lengths.iter().enumerate() {
                notes.write(&file, &vec![number as u8 + 1; length]).unwrap();
            }
            if cleared {
                notes.clear(&file).unwrap();
            }
            let before = notes.read(&file).unwrap();
            let target = (lengths.len() + usize::from(cleared)) % 2;
            let old = slot_of(&file, &notes, target);
            notes.write(&file, &last).unwrap();
            let new = slot_of(&file, &notes, target);
            prop_assert_ne!(&old, &new);
            let mut torn = old.clone();
            for (sector, arrived) in arrived.iter().enumerate() {
                let range = sector * 512..(sector + 1) * 512;
                if *arrived {
                    torn[range.clone()].copy_from_slice(&new[range]);
                }
            }
            file.write_all_at(&torn, notes.slot_offsets()[target]).unwrap();
            // The bytes behind the note are unused.
            let end = BLOCK_BYTES + last.len();
            let expected = if torn[..end] == new[..end] { Some(last) } else { before };
            prop_assert_eq!(notes.read(&file).unwrap(), expected);
            // The next write succeeds, whatever state the crash left.
            notes.write(&file, b"after").unwrap();
            prop_assert_eq!(notes.read(&file).unwrap(), Some(b"after".to_vec()));
        }

        #[test]
        fn a_garbled_note_is_not_read(
            note in prop::collection::vec(any::<u8>(), 1..5_000), place in any::<prop::sample::Index>(), change in 1_u8..
        ) {
            let (file, notes) = area();
            notes.write(&file, b"older").unwrap();
            notes.write(&file, &note).unwrap();
            let at = place.index(BLOCK_BYTES + note.len());
            let mut slot = slot_of(&file, &notes, 1);
            slot[at] ^= change;
            file.write_all_at(&slot, notes.slot_offsets()[1]).unwrap();
            prop_assert_eq!(notes.read(&file).unwrap(), Some(b"older".to_vec()));
        }
    }
}
