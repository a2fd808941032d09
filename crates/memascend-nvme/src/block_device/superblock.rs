//! The superblock of a formatted block device, and how a device is divided.
//!
//! ```text
//! 0                 superblock (4096 bytes); nothing else in the first MiB
//! 1 MiB             note area: two slots of equal length
//! ...               data area, from a multiple of 1 MiB
//! end - 1 MiB       reserved; the last whole 4096 bytes of the device are a copy of the superblock
//! ```
//!
//! The superblock, numbers little-endian, the rest zero:
//!
//! | bytes | |
//! | --- | --- |
//! | 0..16 | `memascend-device` |
//! | 16..20 | format version |
//! | 20..24 | logical block size of the device when it was formatted |
//! | 24..40 | UUID |
//! | 40..48 | size of the device in bytes |
//! | 48..56, 56..64 | offset and length of the note area |
//! | 64..72, 72..80 | offset and length of the data area |
//! | 4092..4096 | CRC-32 of the 4092 bytes before, in this place in every version |

use crate::block_device::crc::crc32;
use crate::{BLOCK_BYTES, Uuid};

/// The smallest device that can be formatted.
pub(crate) const DEVICE_BYTES_MIN: u64 = 16 * MIB;
pub(crate) const MIB: u64 = 1 << 20;
/// The version that is written, and the latest that is read.
pub(crate) const VERSION: u32 = 1;

const MAGIC: &[u8; 16] = b"memascend-device";
const CRC_AT: usize = BLOCK_BYTES - 4;
const BLOCK: u64 = BLOCK_BYTES as u64;

/// The fields of a superblock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Superblock {
    pub id: Uuid,
    pub device_bytes: u64,
    pub logical_block_bytes: u32,
    pub note_offset: u64,
    pub note_bytes: u64,
    pub data_offset: u64,
    pub data_bytes: u64,
}

/// Why a block is no superblock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NotSuperblock {
    /// The block has another content.
    Absent,
    /// The block was a superblock and is damaged.
    Damaged,
    /// The block is a superblock of a later version.
    Newer(u32),
}

impl Superblock {
    /// Divides a device of at least [`DEVICE_BYTES_MIN`].
    pub(crate) fn plan(id: Uuid, device_bytes: u64, logical_block_bytes: u32) -> Self {
        assert!(device_bytes >= DEVICE_BYTES_MIN, "the device's size was checked before");
        let note_bytes = (device_bytes / 64).clamp(MIB, 64 * MIB) / MIB * MIB;
        let data_offset = MIB + note_bytes;
        let data_end = device_bytes / MIB * MIB - MIB;
        Self {
            id,
            device_bytes,
            logical_block_bytes,
            note_offset: MIB,
            note_bytes,
            data_offset,
            data_bytes: data_end - data_offset,
        }
    }

    /// Where the copy lies on a device of that size.
    pub(crate) fn copy_offset(device_bytes: u64) -> u64 {
        device_bytes / BLOCK * BLOCK - BLOCK
    }

    pub(crate) fn encode(&self) -> [u8; BLOCK_BYTES] {
        let mut block = [0; BLOCK_BYTES];
        block[..16].copy_from_slice(MAGIC);
        block[16..20].copy_from_slice(&VERSION.to_le_bytes());
        block[20..24].copy_from_slice(&self.logical_block_bytes.to_le_bytes());
        block[24..40].copy_from_slice(self.id.as_bytes());
        let numbers =
            [self.device_bytes, self.note_offset, self.note_bytes, self.data_offset, self.data_bytes];
        for (place, number) in block[40..80].chunks_exact_mut(8).zip(numbers) {
            place.copy_from_slice(&number.to_le_bytes());
        }
        let crc = crc32(&block[..CRC_AT]);
        block[CRC_AT..].copy_from_slice(&crc.to_le_bytes());
        block
    }

    pub(crate) fn decode(block: &[u8; BLOCK_BYTES]) -> Result<Self, NotSuperblock> {
        let u32_at = |at: usize| u32::from_le_bytes(block[at..at + 4].try_into().expect("four bytes"));
        let u64_at = |at: usize| u64::from_le_bytes(block[at..at + 8].try_into().expect("eight bytes"));
        if block[..16] != *MAGIC {
            return Err(NotSuperblock::Absent);
        }
        if u32_at(CRC_AT) != crc32(&block[..CRC_AT]) {
            return Err(NotSuperblock::Damaged);
        }
        let version = u32_at(16);
        if version > VERSION {
            return Err(NotSuperblock::Newer(version));
        }
        let superblock = Self {
            id: Uuid::from_bytes(block[24..40].try_into().expect("sixteen bytes")),
            logical_block_bytes: u32_at(20),
            device_bytes: u64_at(40),
            note_offset: u64_at(48),
            note_bytes: u64_at(56),
            data_offset: u64_at(64),
            data_bytes: u64_at(72),
        };
        if version != 0 && superblock.is_sound() { Ok(superblock) } else { Err(NotSuperblock::Damaged) }
    }

    /// Whether the areas lie in order within the device, on block boundaries. A right checksum does
    /// not prove that the writer was right.
    fn is_sound(&self) -> bool {
        let numbers = [self.note_offset, self.note_bytes, self.data_offset, self.data_bytes];
        let ends =
            self.note_offset.checked_add(self.note_bytes).zip(self.data_offset.checked_add(self.data_bytes));
        numbers.iter().all(|number| number.is_multiple_of(BLOCK))
            && self.device_bytes >= DEVICE_BYTES_MIN
            && self.note_offset >= BLOCK
            && self.note_bytes >= 4 * BLOCK
            && ends.is_some_and(|(note_end, data_end)| {
                note_end <= self.data_offset && data_end <= Self::copy_offset(self.device_bytes)
            })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn superblock(device_bytes: u64) -> Superblock {
        Superblock::plan(Uuid::from_bytes(*b"0123456789abcdef"), device_bytes, 512)
    }

    #[test]
    fn a_newer_version_is_told_from_damage() {
        let mut block = superblock(1 << 30).encode();
        block[16..20].copy_from_slice(&7_u32.to_le_bytes());
        assert_eq!(Superblock::decode(&block), Err(NotSuperblock::Damaged));
        let crc = crc32(&block[..CRC_AT]);
        block[CRC_AT..].copy_from_slice(&crc.to_le_bytes());
        assert_eq!(Superblock::decode(&block), Err(NotSuperblock::Newer(7)));
    }

    #[test]
    fn areas_that_overlap_are_refused_whatever_the_checksum_says() {
        let sound = superblock(1 << 30);
        let unsound = [
            Superblock { note_offset: 0, ..sound },
            Superblock { note_bytes: sound.note_bytes + BLOCK, ..sound },
            Superblock { data_bytes: sound.data_bytes + MIB, ..sound },
            Superblock { data_offset: sound.data_offset + 512, ..sound },
            Superblock { data_bytes: u64::MAX / BLOCK * BLOCK, ..sound },
            Superblock { device_bytes: sound.device_bytes / 2, ..sound },
        ];
        assert_eq!(Superblock::decode(&sound.encode()), Ok(sound));
        for superblock in unsound {
            assert_eq!(
                Superblock::decode(&superblock.encode()),
                Err(NotSuperblock::Damaged),
                "{superblock:?}"
            );
        }
    }

    proptest! {
        #[test]
        fn a_device_is_divided_in_order(device_bytes in DEVICE_BYTES_MIN..1 << 45) {
            let plan = superblock(device_bytes);
            prop_assert_eq!(Superblock::decode(&plan.encode()), Ok(plan));
            prop_assert!(plan.note_offset >= MIB);
            prop_assert!((MIB..=64 * MIB).contains(&plan.note_bytes));
            prop_assert_eq!(plan.data_offset % MIB, 0);
            prop_assert!(plan.data_offset >= plan.note_offset + plan.note_bytes);
            prop_assert!(plan.data_bytes >= 13 * MIB);
            prop_assert!(plan.data_offset + plan.data_bytes + MIB <= device_bytes);
            prop_assert!(Superblock::copy_offset(device_bytes) >= plan.data_offset + plan.data_bytes);
        }

        #[test]
        fn a_changed_byte_is_never_accepted(device_bytes in DEVICE_BYTES_MIN..1 << 45, change in 1_u8..) {
            let block = superblock(device_bytes).encode();
            for at in 0..BLOCK_BYTES {
                let mut changed = block;
                changed[at] ^= change;
                let decoded = Superblock::decode(&changed);
                let expected = if at < 16 { NotSuperblock::Absent } else { NotSuperblock::Damaged };
                prop_assert_eq!(decoded, Err(expected), "byte {}", at);
            }
        }
    }
}
