//! Entry points for the fuzz targets: the parsers of superblocks and notes, with arbitrary bytes,
//! and with bytes whose checksums were corrected, since a wrong checksum ends parsing early.

use std::io;
use std::sync::Mutex;

use crate::block_device::blocks::Blocks;
use crate::block_device::crc::crc32;
use crate::block_device::notes::{FoundNote, Medium, Notes};
use crate::block_device::superblock::Superblock;
use crate::{BLOCK_BYTES, Uuid};

const CRC_AT: usize = BLOCK_BYTES - 4;

fn block_of(bytes: &[u8]) -> [u8; BLOCK_BYTES] {
    let mut block = [0; BLOCK_BYTES];
    let length = bytes.len().min(BLOCK_BYTES);
    block[..length].copy_from_slice(&bytes[..length]);
    block
}

fn sign(block: &mut [u8]) {
    let crc = crc32(&block[..CRC_AT]);
    block[CRC_AT..BLOCK_BYTES].copy_from_slice(&crc.to_le_bytes());
}

/// Parses a block as a superblock. An accepted superblock must divide a device soundly.
pub fn superblock(data: &[u8]) {
    let Some((mode, data)) = data.split_first() else { return };
    let mut block = block_of(data);
    if mode & 1 == 1 {
        block[..16].copy_from_slice(b"memascend-device");
        sign(&mut block);
    }
    let Ok(superblock) = Superblock::decode(&block) else { return };
    assert!(superblock.note_offset >= BLOCK_BYTES as u64);
    assert!(superblock.note_offset + superblock.note_bytes <= superblock.data_offset);
    assert!(
        superblock.data_offset + superblock.data_bytes <= Superblock::copy_offset(superblock.device_bytes)
    );
    let notes = Notes::of(&superblock);
    let [first, second] = notes.slot_offsets();
    assert!(first >= superblock.note_offset && second + notes.limit_bytes() < superblock.data_offset);
    assert_eq!(Superblock::decode(&superblock.encode()), Ok(superblock));
}

/// A note area in memory. An access outside of it panics.
struct Area(Mutex<Vec<u8>>);

const AREA_AT: usize = 3 * BLOCK_BYTES;
const AREA_BYTES: usize = 16 * BLOCK_BYTES;

impl Medium for Area {
    fn read(&self, offset: u64, bytes: usize) -> io::Result<Blocks> {
        let mut blocks = Blocks::zeroed(bytes)?;
        let at = offset as usize - AREA_AT;
        let length = blocks.bytes().len();
        blocks.bytes_mut().copy_from_slice(&self.0.lock().unwrap()[at..at + length]);
        Ok(blocks)
    }

    fn write(&self, offset: u64, blocks: &Blocks) -> io::Result<()> {
        let at = offset as usize - AREA_AT;
        self.0.lock().unwrap()[at..at + blocks.bytes().len()].copy_from_slice(blocks.bytes());
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }
}

/// Finds the note in two slots of arbitrary content, then writes and finds another.
pub fn notes(data: &[u8]) {
    let id = Uuid::from_bytes(*b"0123456789abcdef");
    let notes = Notes::at(id, AREA_AT as u64, AREA_BYTES as u64);
    let mut bytes = vec![0; AREA_BYTES];
    let Some((mode, data)) = data.split_first() else { return };
    let slots = data.split_at(data.len() / 2);
    for (index, content) in [slots.0, slots.1].into_iter().enumerate() {
        let slot = &mut bytes[index * AREA_BYTES / 2..(index + 1) * AREA_BYTES / 2];
        // The interesting part of the header, then the note.
        let (header, note) = content.split_at(content.len().min(64));
        slot[..header.len()].copy_from_slice(header);
        let length = note.len().min(slot.len() - BLOCK_BYTES);
        slot[BLOCK_BYTES..BLOCK_BYTES + length].copy_from_slice(&note[..length]);
        let signs = mode >> (2 * index);
        if signs & 1 == 1 {
            slot[..16].copy_from_slice(b"memascend-note\0\0");
            slot[24..40].copy_from_slice(id.as_bytes());
            let says = u64::from_le_bytes(slot[48..56].try_into().expect("eight bytes"));
            if signs & 2 == 2 && says <= notes.limit_bytes() {
                let crc = crc32(&slot[BLOCK_BYTES..BLOCK_BYTES + says as usize]);
                slot[20..24].copy_from_slice(&crc.to_le_bytes());
            }
            sign(slot);
        }
    }
    let area = Area(Mutex::new(bytes));
    let found = notes.find(&area).expect("memory can be read");
    assert!(found.note.is_none_or(|note| note.len() as u64 <= notes.limit_bytes()));
    notes.write(&area, data.get(..100).unwrap_or(data)).expect("memory can be written");
    let written = notes.find(&area).expect("memory can be read").note;
    assert_eq!(written.as_deref(), Some(data.get(..100).unwrap_or(data)));
    notes.clear(&area).expect("memory can be written");
    assert_eq!(notes.find(&area).expect("memory can be read").note, FoundNote::default().note);
}
