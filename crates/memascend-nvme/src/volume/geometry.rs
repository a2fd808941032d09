//! Which alignments and lengths a file or device asks of direct transfers.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::PathBuf;

/// The alignments that a volume requires of transfers, and the length that it prefers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Offsets and lengths are multiples of this: the logical block size, 512 or 4096 on most
    /// drives.
    pub block_bytes: usize,
    /// Addresses of buffers are multiples of this.
    pub memory_bytes: usize,
    /// Larger requests are cut into parts of this size, so that they fill the drive's queue and let
    /// others through.
    pub part_bytes: usize,
}

/// The largest part. Larger ones are faster on no drive, and small requests wait longer behind
/// them.
const PART_BYTES_MAX: usize = 1 << 20;
/// The smallest part, even if a device prefers less: every part costs a submission.
const PART_BYTES_MIN: usize = 128 << 10;

impl Geometry {
    /// The geometry without O_DIRECT, which needs no alignment.
    pub(crate) fn buffered() -> Self {
        Self { block_bytes: 1, memory_bytes: 1, part_bytes: PART_BYTES_MAX }
    }

    /// Requirements of direct transfers on `file`, or None where they are refused: by statx (Linux 6.1
    /// and newer), else by the device's logical block size.
    pub(crate) fn direct(file: &File) -> Option<Self> {
        let part_bytes = part_bytes(file);
        let logical = || queue_limit(file, "logical_block_size").unwrap_or(crate::BLOCK_BYTES);
        match dio_alignment(file) {
            Some((0, 0)) => None,
            Some((memory_bytes, block_bytes)) => Some(Self { block_bytes, memory_bytes, part_bytes }),
            None => Some(Self { block_bytes: logical(), memory_bytes: logical(), part_bytes }),
        }
    }
}

/// Alignments of memory and of offsets by statx. Zeros where O_DIRECT is not supported, `None`
/// where the kernel does not report them.
fn dio_alignment(file: &File) -> Option<(usize, usize)> {
    const STATX_DIOALIGN: u32 = 0x2000;
    let mut stat = std::mem::MaybeUninit::<libc::statx>::zeroed();
    // SAFETY: an empty path with AT_EMPTY_PATH asks for the descriptor itself; `stat` is writable.
    let rc = unsafe {
        libc::statx(file.as_raw_fd(), c"".as_ptr(), libc::AT_EMPTY_PATH, STATX_DIOALIGN, stat.as_mut_ptr())
    };
    if rc != 0 {
        return None;
    }
    // SAFETY: statx succeeded and filled it.
    let stat = unsafe { stat.assume_init() };
    (stat.stx_mask & STATX_DIOALIGN != 0)
        .then_some((stat.stx_dio_mem_align as usize, stat.stx_dio_offset_align as usize))
}

fn part_bytes(file: &File) -> usize {
    let preferred = match queue_limit(file, "optimal_io_size") {
        Some(bytes) if bytes >= PART_BYTES_MIN => Some(bytes),
        _ => queue_limit(file, "max_sectors_kb").map(|kib| kib << 10),
    };
    part_of(preferred)
}

/// The power of two up to the device's preference, within bounds: parts stay aligned to each other.
fn part_of(preferred: Option<usize>) -> usize {
    let bytes = preferred.unwrap_or(PART_BYTES_MAX).clamp(PART_BYTES_MIN, PART_BYTES_MAX);
    1 << bytes.ilog2()
}

/// Whether the block device that `file` is or lies on has queues to poll (NVMe's `poll_queues`).
pub(crate) fn has_poll_queues(file: &File) -> bool {
    queue_limit(file, "io_poll") == Some(1)
}

/// A limit of the block device that `file` is or lies on.
fn queue_limit(file: &File, name: &str) -> Option<usize> {
    let metadata = file.metadata().ok()?;
    let device = if metadata.file_type().is_block_device() { metadata.rdev() } else { metadata.dev() };
    let number = format!("{}:{}", libc::major(device), libc::minor(device));
    let directory = PathBuf::from("/sys/dev/block").join(number);
    // A partition uses the queue of its disk.
    ["queue", "../queue"]
        .iter()
        .find_map(|queue| std::fs::read_to_string(directory.join(queue).join(name)).ok()?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_powers_of_two_within_bounds() {
        for (preferred, expected) in [
            (None, 1 << 20),
            (Some(1280 << 10), 1 << 20),
            (Some(768 << 10), 512 << 10),
            (Some(4 << 20), 1 << 20),
            (Some(64 << 10), 128 << 10),
        ] {
            assert_eq!(part_of(preferred), expected, "{preferred:?}");
        }
    }

    #[test]
    fn a_regular_file_tells_its_alignment_or_refuses() {
        let file = tempfile::tempfile().unwrap();
        if let Some(geometry) = Geometry::direct(&file) {
            assert!(geometry.block_bytes.is_power_of_two() && geometry.block_bytes <= 4096, "{geometry:?}");
            assert!(geometry.memory_bytes.is_power_of_two() && geometry.memory_bytes <= 4096, "{geometry:?}");
        }
    }
}
