//! Looks for data that no signature announces: a database's raw volume, plain dm-crypt, LUKS with a detached
//! header, text. A device is blank if every inspected place is: all 0x00 or all 0xff, as drives return blocks
//! that were never written or were discarded.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use crate::BLOCK_BYTES;
use crate::block_device::blocks::Blocks;
use crate::block_device::superblock::MIB;

/// Read whole at either end of a device, where most programs begin.
const END_BYTES: u64 = 16 * MIB;
/// A smaller device is read whole.
const WHOLE_BYTES: u64 = 256 * MIB;
/// Places in between, at equal distances, and bytes read at each: 128 MiB of any device.
const PLACES: u64 = 2048;
const PLACE_BYTES: u64 = 64 << 10;
/// The most read at once.
const READ_BYTES: u64 = MIB;
/// Bytes of an example that are shown.
const SHOWN_BYTES: usize = 24;
/// Random bytes, as encryption and compression leave them, repeat no value more often in a block of 4096; the mean
/// is 16.
const REPEATED_MAX: usize = 64;

/// Data of an unknown kind on a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnknownData {
    /// How many blocks of 4096 bytes were looked at.
    pub looked_at_blocks: u64,
    /// How many of them are not blank.
    pub written_blocks: u64,
    /// The first block that is not blank, and the last one if there are several.
    pub examples: Vec<Example>,
}

/// A block that is not blank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Example {
    /// Where the block's first byte lies that is not like the drive's blank ones.
    pub offset: u64,
    /// Likely content of the block: `text`, `random or encrypted bytes`, `bytes`.
    pub kind: &'static str,
    /// The bytes from there on, as text or in hexadecimal digits.
    pub shown: String,
}

impl fmt::Display for UnknownData {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { looked_at_blocks, written_blocks, examples } = self;
        write!(
            out,
            "data of an unknown kind ({written_blocks} of {looked_at_blocks} blocks of 4096 bytes that were looked \
             at): "
        )?;
        for (at, Example { offset, kind, shown }) in examples.iter().enumerate() {
            let comma = if at == 0 { "" } else { ", and " };
            write!(out, "{comma}{kind} at byte {offset} ({shown})")?;
        }
        Ok(())
    }
}

/// Looks at the beginning of a device, its end, and places in between. `None` if all of them are blank. Data that
/// lies in one run is found if the run is longer than a 2,048th of the device.
pub(crate) fn unknown_data(file: &File, device_bytes: u64) -> io::Result<Option<UnknownData>> {
    let mut buffer = Blocks::zeroed(READ_BYTES as usize)?;
    let mut found = UnknownData { looked_at_blocks: 0, written_blocks: 0, examples: Vec::new() };
    for (begin, end) in places(device_bytes) {
        let mut offset = begin;
        while offset < end {
            let bytes = (end - offset).min(READ_BYTES) as usize;
            let read = &mut buffer.bytes_mut()[..bytes];
            file.read_exact_at(read, offset)?;
            found.take(read, offset);
            offset += bytes as u64;
        }
        forget_read(file, begin, end - begin);
    }
    Ok((found.written_blocks > 0).then_some(found))
}

/// The ranges of bytes to look at, in order.
fn places(device_bytes: u64) -> Vec<(u64, u64)> {
    if device_bytes <= WHOLE_BYTES {
        return vec![(0, device_bytes)];
    }
    let (first, last) = (END_BYTES, device_bytes - END_BYTES);
    let between = (0..PLACES).map(|place| {
        // In 128 bits: a device may have 8 EiB.
        let share = u128::from(last - first - PLACE_BYTES) * u128::from(place + 1) / u128::from(PLACES + 1);
        let begin = (first + share as u64) / BLOCK_BYTES as u64 * BLOCK_BYTES as u64;
        (begin, begin + PLACE_BYTES)
    });
    [(0, first)].into_iter().chain(between).chain([(last, device_bytes)]).collect()
}

impl UnknownData {
    /// Counts the blocks read at `offset`, and keeps examples.
    fn take(&mut self, read: &[u8], offset: u64) {
        for (at, block) in read.chunks(BLOCK_BYTES).enumerate() {
            self.looked_at_blocks += 1;
            if is_blank(block) {
                continue;
            }
            self.written_blocks += 1;
            self.examples.truncate(1);
            self.examples.push(Example::of(block, offset + (at * BLOCK_BYTES) as u64));
        }
    }
}

/// Whether a block looks as if it was never written.
fn is_blank(block: &[u8]) -> bool {
    let first = block[0];
    matches!(first, 0x00 | 0xff) && block.iter().all(|&byte| byte == first)
}

impl Example {
    fn of(block: &[u8], offset: u64) -> Self {
        let background = if block[0] == 0xff { 0xff } else { 0x00 };
        let begin = block.iter().position(|&byte| byte != background).unwrap_or(0);
        let shown = &block[begin..block.len().min(begin + SHOWN_BYTES)];
        let is_text = |byte: &u8| matches!(byte, b'\t' | b'\n' | b'\r' | b' '..=b'~');
        // Up to a terminating zero.
        let text = shown.split(|&byte| byte == 0).next().unwrap_or_default();
        let (kind, shown) = if !text.is_empty() && text.iter().all(is_text) {
            ("text", format!("{:?}", String::from_utf8_lossy(text)))
        } else {
            let digits: Vec<String> = shown.iter().map(|byte| format!("{byte:02x}")).collect();
            (if looks_random(block) { "random or encrypted bytes" } else { "bytes" }, digits.join(" "))
        };
        Self { offset: offset + begin as u64, kind, shown }
    }
}

fn looks_random(block: &[u8]) -> bool {
    let mut counts = [0_usize; 256];
    for &byte in block {
        counts[usize::from(byte)] += 1;
    }
    counts.into_iter().all(|count| count <= REPEATED_MAX)
}

/// Drops the read pages from the kernel's cache. A precaution: a failure is ignored.
fn forget_read(file: &File, offset: u64, bytes: u64) {
    // SAFETY: a plain system call on a descriptor that lives. It leaves what is in use.
    unsafe {
        libc::posix_fadvise(
            file.as_raw_fd(),
            offset.cast_signed(),
            bytes.cast_signed(),
            libc::POSIX_FADV_DONTNEED,
        )
    };
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::block_device::superblock::DEVICE_BYTES_MIN;

    proptest! {
        #[test]
        fn both_ends_are_looked_at_and_no_run_longer_than_a_share_is_missed(
            device_bytes in DEVICE_BYTES_MIN..1 << 62, run in 0.0..1.0,
        ) {
            let places = places(device_bytes);
            prop_assert!(places.iter().all(|&(begin, end)| begin < end && end <= device_bytes));
            prop_assert!(places.is_sorted());
            prop_assert_eq!(places[0].0, 0);
            prop_assert_eq!(places[places.len() - 1].1, device_bytes);
            prop_assert!(places[0].1 >= END_BYTES.min(device_bytes));
            prop_assert!(places[places.len() - 1].0 <= device_bytes - END_BYTES.min(device_bytes));
            // A run of that share of the device, wherever it lies, meets a place.
            let length = device_bytes / PLACES;
            let begin = ((device_bytes - length) as f64 * run) as u64;
            prop_assert!(places.iter().any(|&(from, to)| from < begin + length && to > begin));
            let read: u64 = places.iter().map(|(begin, end)| end - begin).sum();
            prop_assert!(read <= WHOLE_BYTES);
        }
    }

    #[test]
    fn only_what_drives_return_for_unwritten_blocks_is_blank() {
        for byte in 0..=255 {
            assert_eq!(is_blank(&[byte; BLOCK_BYTES]), byte == 0 || byte == 255, "{byte}");
        }
        for at in [0, 1, 2047, 4095] {
            for (background, byte) in [(0, 1), (0, 255), (255, 0), (255, 254)] {
                let mut block = [background; BLOCK_BYTES];
                block[at] = byte;
                assert!(!is_blank(&block), "{byte} at {at} of {background}");
            }
        }
        // The last block of a device whose size is an odd number of sectors.
        assert!(is_blank(&[0; 512]) && !is_blank(&[7; 512]));
    }

    #[test]
    fn the_first_and_the_last_block_are_shown_with_what_they_seem_to_hold() {
        let mut read = vec![0; 4 * BLOCK_BYTES];
        read[100..117].copy_from_slice(b"precious raw data");
        read[117..BLOCK_BYTES].fill(b'\n');
        for (at, byte) in read[2 * BLOCK_BYTES..3 * BLOCK_BYTES].iter_mut().enumerate() {
            *byte = (at * 167 % 256) as u8 ^ (at / 256) as u8;
        }
        read[3 * BLOCK_BYTES + 8] = 0xab;
        let mut found = UnknownData { looked_at_blocks: 0, written_blocks: 0, examples: Vec::new() };
        found.take(&read[..3 * BLOCK_BYTES], MIB);
        assert_eq!((found.looked_at_blocks, found.written_blocks), (3, 2));
        let text = found.to_string();
        assert!(text.contains("text at byte 1048676 (\"precious raw data\\n"), "{text}");
        assert!(text.contains("random or encrypted bytes at byte 1056769 (a7 4e"), "{text}");

        found.take(&read[3 * BLOCK_BYTES..], MIB + 3 * BLOCK_BYTES as u64);
        let text = found.to_string();
        assert_eq!(found.examples.len(), 2);
        assert!(text.contains("3 of 4 blocks"), "{text}");
        assert!(text.contains("precious") && text.contains("and bytes at byte 1060872 (ab 00"), "{text}");
    }
}
