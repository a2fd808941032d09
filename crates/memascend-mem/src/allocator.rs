use std::io;
use std::ptr::{self, NonNull};

use crate::{MemError, Result, round_up_to_page};

/// A source of host memory. A block's size is the requested size rounded up to
/// [`PAGE_BYTES`](crate::PAGE_BYTES), not one byte more.
pub trait HostAllocator: Send + Sync {
    /// Short name for reports: `locked`, `pageable`.
    fn name(&self) -> &'static str;

    /// Reserves a zero-filled block of at least `bytes` bytes, aligned to a page.
    fn allocate(&self, bytes: usize) -> Result<HostBlock>;
}

/// A contiguous, page-aligned range of host memory; unmapped when dropped.
#[derive(Debug)]
pub struct HostBlock {
    address: NonNull<u8>,
    bytes: usize,
    owner_pid: u32,
}

// SAFETY: the block owns its mapping; the address is valid from any thread until drop.
unsafe impl Send for HostBlock {}
// SAFETY: a shared reference only hands out the address; access is governed by the pool's leases.
unsafe impl Sync for HostBlock {}

impl HostBlock {
    fn map(bytes: usize) -> Result<Self> {
        let bytes = round_up_to_page(bytes.max(1));
        // SAFETY: a fresh anonymous private mapping; no existing memory is touched.
        let address = unsafe {
            libc::mmap(
                ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if address == libc::MAP_FAILED {
            return Err(MemError::Reserve { bytes, source: io::Error::last_os_error() });
        }
        // A forked DataLoader worker must neither inherit the arena nor copy it on write, and in-flight
        // direct I/O into copy-on-write pages would be lost. A refusal (old kernel) is harmless.
        // SAFETY: the range is the mapping made above.
        unsafe { libc::madvise(address, bytes, libc::MADV_DONTFORK) };
        let address = NonNull::new(address.cast()).expect("mmap never returns null without MAP_FIXED");
        Ok(Self { address, bytes, owner_pid: std::process::id() })
    }

    /// First byte.
    pub fn address(&self) -> NonNull<u8> {
        self.address
    }

    /// Size in bytes, a multiple of the page.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for HostBlock {
    fn drop(&mut self) {
        // A forked child did not inherit the mapping; by now its addresses may hold something else of the child's.
        if self.owner_pid != std::process::id() {
            return;
        }
        // SAFETY: the mapping was made by `map`, is owned by self, and every lease into it is gone
        // (the pool keeps the block alive as long as a lease lives).
        unsafe { libc::munmap(self.address.as_ptr().cast(), self.bytes) };
    }
}

/// Ordinary anonymous memory, faulted in on first use.
#[derive(Debug, Default, Clone, Copy)]
pub struct PageableAllocator;

impl HostAllocator for PageableAllocator {
    fn name(&self) -> &'static str {
        "pageable"
    }

    fn allocate(&self, bytes: usize) -> Result<HostBlock> {
        HostBlock::map(bytes)
    }
}

/// Anonymous memory locked into RAM with `mlock`: never swapped, faulted in at once.
#[derive(Debug, Default, Clone, Copy)]
pub struct LockedAllocator;

impl HostAllocator for LockedAllocator {
    fn name(&self) -> &'static str {
        "locked"
    }

    fn allocate(&self, bytes: usize) -> Result<HostBlock> {
        let block = HostBlock::map(bytes)?;
        // SAFETY: the range is the whole mapping just made; munmap unlocks it.
        if unsafe { libc::mlock(block.address().as_ptr().cast(), block.bytes()) } != 0 {
            let source = io::Error::last_os_error();
            return Err(MemError::Lock { bytes: block.bytes(), limit_bytes: memlock_limit_bytes(), source });
        }
        Ok(block)
    }
}

fn memlock_limit_bytes() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is a valid, writable rlimit.
    unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &mut limit) };
    limit.rlim_cur
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PAGE_BYTES;

    #[test]
    fn sizes_are_rounded_to_the_page_and_no_further() {
        for (asked, given) in [(1, PAGE_BYTES), (PAGE_BYTES, PAGE_BYTES), (PAGE_BYTES + 1, 2 * PAGE_BYTES)] {
            let block = PageableAllocator.allocate(asked).unwrap();
            assert_eq!(block.bytes(), given);
            assert_eq!(block.address().as_ptr() as usize % PAGE_BYTES, 0);
        }
    }

    #[test]
    fn an_impossible_reservation_is_an_error_with_its_size() {
        let error = PageableAllocator.allocate(1 << 60).unwrap_err();
        assert!(error.to_string().contains(&(1_usize << 60).to_string()), "{error}");
    }

    #[test]
    fn locked_memory_is_resident_at_once() {
        let bytes = 8 * PAGE_BYTES;
        let block = match LockedAllocator.allocate(bytes) {
            Ok(block) => block,
            Err(error) => {
                assert!(error.to_string().contains("ulimit -l"), "{error}");
                return;
            }
        };
        let mut resident = [0_u8; 8];
        // SAFETY: the range is a live mapping of 8 pages and `resident` has a byte for each.
        let rc = unsafe { libc::mincore(block.address().as_ptr().cast(), bytes, resident.as_mut_ptr()) };
        assert_eq!(rc, 0);
        assert!(resident.iter().all(|page| page & 1 == 1));
    }
}
