//! How much of a block the system has put into huge pages.

use std::fs;

use super::{HUGE_PAGE_BYTES, HostBlock};

impl HostBlock {
    /// Bytes of the block's mappings that lie in huge pages now; `None` where the system does not
    /// tell. The system walks through all pages of the process for that: not for a hot path.
    pub fn huge_page_bytes(&self) -> Option<usize> {
        if self.bytes() < HUGE_PAGE_BYTES {
            return Some(0);
        }
        let start = self.address().as_ptr().addr();
        let maps = fs::read_to_string("/proc/self/smaps").ok()?;
        // Mappings that touch may be one to the system.
        Some(huge_page_bytes(&maps, start, start + self.bytes()).min(self.bytes()))
    }
}

/// The bytes in huge pages of all mappings in `maps`, a text like /proc/self/smaps, that have
/// addresses from `start` to below `end`.
fn huge_page_bytes(maps: &str, start: usize, end: usize) -> usize {
    let mut inside = false;
    let mut kib = 0;
    for line in maps.lines() {
        let mut fields = line.split_whitespace();
        let first = fields.next().unwrap_or_default();
        if first == "AnonHugePages:" && inside {
            kib += fields.next().and_then(|number| number.parse().ok()).unwrap_or(0);
        } else if let Some((begins, ends)) = addresses(first) {
            inside = begins < end && start < ends;
        }
    }
    kib << 10
}

/// The addresses of a mapping from the first field of its line, `begin-end`.
fn addresses(field: &str) -> Option<(usize, usize)> {
    let (begin, end) = field.split_once('-')?;
    Some((usize::from_str_radix(begin, 16).ok()?, usize::from_str_radix(end, 16).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{HostAllocator, PageableAllocator};

    #[test]
    fn huge_pages_of_other_mappings_do_not_count() {
        let maps = "\
7f0000000000-7f0000400000 rw-p 00000000 00:00 0
Size:               4096 kB
AnonHugePages:      4096 kB
7f0000400000-7f0000600000 rw-p 00000000 00:00 0
AnonHugePages:      2048 kB
VmFlags: rd wr mr mw me ac hg
7f0000600000-7f0000601000 ---p 00000000 00:00 0
AnonHugePages:         0 kB
7f0000a00000-7f0000c00000 rw-p 00000000 00:00 0
AnonHugePages:      2048 kB
";
        assert_eq!(huge_page_bytes(maps, 0x7f00_0040_0000, 0x7f00_0060_1000), 2 << 20);
        assert_eq!(huge_page_bytes(maps, 0x7f00_0000_0000, 0x7f00_0060_1000), 6 << 20);
        assert_eq!(huge_page_bytes(maps, 0, 0x1000), 0);
        assert_eq!(huge_page_bytes(maps, 0x7f00_0050_0000, 0x7f00_0050_1000), 2 << 20);
        assert_eq!(huge_page_bytes("", 0, usize::MAX), 0);
    }

    #[test]
    fn small_pages_are_none() {
        let block = PageableAllocator { huge_pages: false }.allocate(3 << 20).unwrap();
        // A system that gives huge pages unasked gives this block one at most: a huge page begins at a
        // multiple of its size.
        assert!(block.huge_page_bytes().unwrap() <= 2 << 20);
    }
}
