//! Host allocators: page-locked, registered with CUDA, locked, or ordinary memory.
//!
//! A block of 2 MiB or more begins at a huge page, in a mapping whose ends are trimmed, so huge pages cost no
//! memory. Where free memory lies scattered, small pages make 256 segments of each MiB of a request, and the
//! drive of a virtual machine moved less than half as many bytes per second (docs/measurements.md, *Huge
//! pages*). In an elastic arena only classes that begin with all of their buffers ask for them: a huge page that
//! was returned in part stays resident until memory is short.

mod huge_pages;
mod parts;
mod pinned;

use std::ops::Range;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::{io, panic, thread};

use self::parts::Backing;
use self::pinned::PreferredAllocator;
pub use self::pinned::{CudaAllocator, RegisteredAllocator, kinds_for_a_device};
use crate::{Cudart, MemError, Origin, PAGE_BYTES, Result, round_up_to_page};

/// Size and alignment of a huge page; a thread's share of a block is a multiple of it.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// A source of host memory. A block's size is the requested size rounded up to [`PAGE_BYTES`], not
/// one byte more.
///
/// A request either gives a whole block or leaves nothing behind.
pub trait HostAllocator: Send + Sync {
    /// Short name for reports: `cuda`, `registered`, `locked`, `pageable`.
    fn name(&self) -> &'static str;

    /// Reserves a zero-filled block of at least `bytes` bytes, aligned to a page.
    fn allocate(&self, bytes: usize) -> Result<HostBlock>;

    /// Reserves addresses only: [`HostBlock::commit`] puts memory behind them.
    ///
    /// # Errors
    /// [`MemError::FixedMemory`] if memory of this kind comes only as whole blocks.
    fn reserve(&self, bytes: usize) -> Result<HostBlock> {
        let _ = bytes;
        Err(MemError::FixedMemory { allocator: self.name() })
    }
}

/// The allocator called `name`: `cuda`, `registered`, `locked`, `pageable`, or `auto`. `auto` is the
/// first of [`kinds_for_a_device`] that works where the CUDA runtime can be used, and `locked`
/// elsewhere. With `cuda` CUDA chooses its own pages, whatever `huge_pages` says.
///
/// # Errors
/// If the name is none of these, or if `cuda` or `registered` is asked for and the CUDA runtime
/// cannot be used.
pub fn allocator(name: &str, huge_pages: bool) -> Result<Box<dyn HostAllocator>> {
    let locked = LockedAllocator { huge_pages, threads: 0 };
    Ok(match name {
        "auto" => match Cudart::find() {
            Ok(cudart) => Box::new(PreferredAllocator::new(&cudart, huge_pages)),
            Err(_) => Box::new(locked),
        },
        "cuda" => Box::new(CudaAllocator::new()?),
        "registered" => Box::new(RegisteredAllocator { cudart: Cudart::find()?, huge_pages, threads: 0 }),
        "locked" => Box::new(locked),
        "pageable" => Box::new(PageableAllocator { huge_pages }),
        _ => return Err(MemError::UnknownAllocator { name: name.to_owned() }),
    })
}

/// A contiguous, page-aligned range of host memory. Dropping the block releases the memory.
#[derive(Debug)]
pub struct HostBlock {
    address: NonNull<u8>,
    bytes: usize,
    release: Release,
    /// Kind of memory that is put behind the parts of a reserved block.
    backing: Option<Backing>,
    /// Whether the block begins at a huge page and may have some.
    huge_pages: bool,
    origin: Origin,
}

/// How a block's memory is released.
#[derive(Debug)]
enum Release {
    Unmap,
    UnregisterAndUnmap(Arc<Cudart>),
    CudaFree(Arc<Cudart>, NonNull<u8>),
    Never,
}

// SAFETY: the block owns its memory; the address is valid from any thread until drop.
unsafe impl Send for HostBlock {}
// SAFETY: a shared reference only hands out the address; access is governed by the pool's leases.
unsafe impl Sync for HostBlock {}

impl HostBlock {
    /// A fresh mapping that can be read and written.
    fn map(bytes: usize, huge_pages: bool) -> Result<Self> {
        let block = Self::map_for(libc::PROT_READ | libc::PROT_WRITE, bytes, huge_pages)?;
        if block.huge_pages {
            block.ask_for_huge_pages(0..block.bytes);
        }
        Ok(block)
    }

    /// A fresh mapping. With `huge_pages` a mapping that holds one begins at a multiple of a huge
    /// page, so that the kernel can use them.
    fn map_for(protection: libc::c_int, bytes: usize, huge_pages: bool) -> Result<Self> {
        let bytes = rounded(bytes)?;
        let huge_pages = huge_pages && bytes >= HUGE_PAGE_BYTES;
        let refused = |source| MemError::Reserve { bytes, source };
        let slack = if huge_pages { HUGE_PAGE_BYTES - PAGE_BYTES } else { 0 };
        let mapped = bytes.checked_add(slack).ok_or_else(|| refused(io::ErrorKind::OutOfMemory.into()))?;
        // SAFETY: a fresh anonymous private mapping; no existing memory is touched.
        let start = unsafe {
            libc::mmap(
                ptr::null_mut(),
                mapped,
                protection,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(refused(io::Error::last_os_error()));
        }
        let start = NonNull::new(start.cast::<u8>()).expect("mmap never returns null without MAP_FIXED");
        let mut block = Self {
            address: start,
            bytes: mapped,
            release: Release::Unmap,
            backing: None,
            huge_pages,
            origin: Origin::here(),
        };
        if slack > 0 {
            block.trim(bytes).map_err(refused)?;
        }
        let address = block.address.as_ptr().cast();
        // A forked DataLoader worker must not inherit the arena: copy-on-write would duplicate the
        // arena, and direct I/O in flight into copy-on-write pages would be lost. An old kernel
        // refuses the call, which is harmless. SAFETY: the range is the mapping made above.
        unsafe { libc::madvise(address, bytes, libc::MADV_DONTFORK) };
        Ok(block)
    }

    /// Asks for huge pages behind a part of the block, before any of it is faulted in. A drive's
    /// driver then gets a few long runs of memory for a request, and not 256 for each MiB, where
    /// the system's free memory lies scattered.
    fn ask_for_huge_pages(&self, part: Range<usize>) {
        // A kernel without huge pages refuses the call; small pages give the same results.
        // SAFETY: the part lies within the mapping, which the block owns.
        unsafe {
            libc::madvise(self.address.as_ptr().add(part.start).cast(), part.len(), libc::MADV_HUGEPAGE)
        };
    }

    /// Unmaps all but `bytes` bytes from the first huge page on. The block always describes exactly the
    /// mapped range, so dropping it after an error leaves nothing mapped.
    fn trim(&mut self, bytes: usize) -> io::Result<()> {
        let head = self.address.as_ptr().align_offset(HUGE_PAGE_BYTES);
        if head > 0 {
            unmap(self.address, head)?;
            // SAFETY: the mapping is longer than the head by `bytes` at least.
            self.address = unsafe { self.address.add(head) };
            self.bytes -= head;
        }
        let tail = self.bytes - bytes;
        if tail > 0 {
            // SAFETY: the tail lies within the mapping.
            unmap(unsafe { self.address.add(bytes) }, tail)?;
            self.bytes = bytes;
        }
        Ok(())
    }

    /// First byte.
    pub fn address(&self) -> NonNull<u8> {
        self.address
    }

    /// Size in bytes, a multiple of the page.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Gives processes forked from now on copies of the block, as of ordinary memory. Must not be
    /// called while a device or the kernel writes to the block. Memory known to CUDA stays hidden
    /// from forked processes.
    pub fn show_to_forks(&self) {
        if let Release::Unmap = self.release {
            // SAFETY: the range is a mapping of our own. A refusal leaves it hidden.
            unsafe { libc::madvise(self.address.as_ptr().cast(), self.bytes, libc::MADV_DOFORK) };
        }
    }

    /// Leaks the block's memory, because a device may still be writing to it.
    pub(crate) fn keep_forever(&mut self) {
        self.release = Release::Never;
    }

    /// Faults every page of a part in, on `threads` threads; the pages are fresh, and therefore zero.
    fn populate(&self, part: Range<usize>, threads: usize) -> Result<()> {
        let bytes = part.len();
        self.in_parts(part, threads, |part| self.populate_part(part))
            .map_err(|source| MemError::Reserve { bytes, source })
    }

    fn populate_part(&self, part: Range<usize>) -> io::Result<()> {
        loop {
            // SAFETY: the part lies within the block, which is not shared yet.
            let rc = unsafe {
                let start = self.address.as_ptr().add(part.start);
                libc::madvise(start.cast(), part.len(), libc::MADV_POPULATE_WRITE)
            };
            if rc == 0 {
                return Ok(());
            }
            let error = io::Error::last_os_error();
            match error.raw_os_error() {
                Some(libc::EINTR) => {}
                // A kernel before 5.14 does not know the request.
                Some(libc::EINVAL) => {
                    self.touch_part(part);
                    return Ok(());
                }
                _ => return Err(error),
            }
        }
    }

    /// Locks each page of a part when it is faulted in; `munmap` unlocks it.
    fn lock_on_fault(&self, part: Range<usize>) -> Result<()> {
        // SAFETY: the part lies within the block.
        let (address, bytes) = (unsafe { self.address.add(part.start) }.as_ptr().cast(), part.len());
        // SAFETY: the range is a part of a mapping of our own.
        if unsafe { libc::mlock2(address, bytes, libc::MLOCK_ONFAULT) } == 0 {
            return Ok(());
        }
        let source = io::Error::last_os_error();
        // A sandbox may lack or refuse mlock2. mlock faults every page in at once.
        if matches!(source.raw_os_error(), Some(libc::ENOSYS | libc::EPERM)) {
            // SAFETY: as above.
            if unsafe { libc::mlock(address, bytes) } == 0 {
                return Ok(());
            }
        }
        Err(MemError::Lock { bytes, limit_bytes: memlock_limit_bytes(), source })
    }

    fn touch_part(&self, part: Range<usize>) {
        for offset in part.step_by(PAGE_BYTES) {
            // SAFETY: the page lies within the block, which is still zero and not shared yet.
            unsafe { self.address.add(offset).write_volatile(0) };
        }
    }

    /// Runs `work` on pieces of a part of the block, one to each of `threads` threads; 0 means one
    /// for each core.
    fn in_parts(
        &self,
        whole: Range<usize>,
        threads: usize,
        work: impl Fn(Range<usize>) -> io::Result<()> + Sync,
    ) -> io::Result<()> {
        let threads =
            if threads == 0 { thread::available_parallelism().map_or(1, usize::from) } else { threads };
        let part_bytes = whole.len().div_ceil(threads).next_multiple_of(HUGE_PAGE_BYTES);
        let (first, end) = (whole.start, whole.end);
        let part = |start: usize| start..end.min(start + part_bytes);
        let work = &work;
        thread::scope(|scope| {
            let mut result = Ok(());
            let mut running = Vec::new();
            for start in (first + part_bytes..end).step_by(part_bytes) {
                match thread::Builder::new().spawn_scoped(scope, move || work(part(start))) {
                    Ok(thread) => running.push(thread),
                    // The system starts no more threads: this thread does the part.
                    Err(_) => result = result.and_then(|()| work(part(start))),
                }
            }
            result = result.and_then(|()| work(part(first)));
            for thread in running {
                result = result.and(thread.join().unwrap_or_else(|payload| panic::resume_unwind(payload)));
            }
            result
        })
    }
}

impl Drop for HostBlock {
    fn drop(&mut self) {
        // A forked child did not inherit the mapping, and may have mapped something else at these
        // addresses. CUDA does not survive a fork either.
        if !self.origin.is_here() {
            return;
        }
        // No lease into the block is left: the pool keeps the block alive as long as a lease lives.
        match &self.release {
            // As below: a block that stays registered is leaked.
            Release::Unmap if !self.parts_are_unregistered() => return,
            Release::Unmap => {}
            Release::Never => return,
            // While the range is registered, CUDA would copy from and to the old pages on behalf of
            // the next mapping at these addresses. So the memory is leaked. This happens at the end
            // of the process or in a broken context.
            Release::UnregisterAndUnmap(cudart) if cudart.host_unregister(self.address).is_err() => return,
            Release::UnregisterAndUnmap(_) => {}
            Release::CudaFree(cudart, start) => {
                // A failure is ignored: at the end of the process CUDA may have shut down before.
                // SAFETY: the address came from `host_alloc` of this runtime and is owned by self.
                let _ = unsafe { cudart.free_host(*start) };
                return;
            }
        }
        // A failure leaves the memory mapped, and a destructor cannot report an error.
        let _ = unmap(self.address, self.bytes);
    }
}

/// Unmaps a part of a block's mapping that nothing refers to any more.
fn unmap(address: NonNull<u8>, bytes: usize) -> io::Result<()> {
    // SAFETY: the callers, all in this file, pass ranges of mappings made by `HostBlock::map`.
    match unsafe { libc::munmap(address.as_ptr().cast(), bytes) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn rounded(bytes: usize) -> Result<usize> {
    // A larger size cannot be rounded up, and no system has that much memory.
    if bytes > isize::MAX as usize {
        return Err(MemError::Reserve { bytes, source: io::ErrorKind::OutOfMemory.into() });
    }
    Ok(round_up_to_page(bytes.max(1)))
}

/// Ordinary anonymous memory, faulted in on first use.
#[derive(Debug, Default, Clone, Copy)]
pub struct PageableAllocator {
    /// Whether to ask for huge pages. A first use then faults in a whole one.
    pub huge_pages: bool,
}

impl HostAllocator for PageableAllocator {
    fn name(&self) -> &'static str {
        "pageable"
    }

    fn allocate(&self, bytes: usize) -> Result<HostBlock> {
        HostBlock::map(bytes, self.huge_pages)
    }

    fn reserve(&self, bytes: usize) -> Result<HostBlock> {
        HostBlock::reserve(bytes, self.huge_pages, Backing::Pageable)
    }
}

/// Anonymous memory locked into RAM with `mlock`: never swapped, faulted in at once.
#[derive(Debug, Default, Clone, Copy)]
pub struct LockedAllocator {
    /// Whether to ask for huge pages.
    pub huge_pages: bool,
    /// Threads that fault the pages in; 0 means one for each core.
    pub threads: usize,
}

impl HostAllocator for LockedAllocator {
    fn name(&self) -> &'static str {
        "locked"
    }

    fn allocate(&self, bytes: usize) -> Result<HostBlock> {
        let block = HostBlock::map(bytes, self.huge_pages)?;
        // Locking first checks the limit before any page is touched, and lets several threads fault
        // the pages in. `mlock` alone faults them in on one thread, with huge pages ten times more
        // slowly.
        let whole = 0..block.bytes();
        block.lock_on_fault(whole.clone())?;
        block.populate(whole, self.threads)?;
        Ok(block)
    }

    fn reserve(&self, bytes: usize) -> Result<HostBlock> {
        HostBlock::reserve(bytes, self.huge_pages, Backing::Locked { threads: self.threads })
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

    fn resident_pages(block: &HostBlock) -> usize {
        let mut resident = vec![0_u8; block.bytes() / PAGE_BYTES];
        // SAFETY: the range is a live mapping and `resident` has a byte for each of its pages.
        let rc =
            unsafe { libc::mincore(block.address().as_ptr().cast(), block.bytes(), resident.as_mut_ptr()) };
        assert_eq!(rc, 0, "{}", io::Error::last_os_error());
        resident.iter().filter(|page| *page & 1 == 1).count()
    }

    /// The kernel's flags of the mapping that holds an address.
    fn vm_flags(address: NonNull<u8>) -> Vec<String> {
        let address = address.as_ptr().addr();
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut inside = false;
        for line in smaps.lines() {
            let range = line.split(' ').next().and_then(|range| range.split_once('-'));
            if let Some((Ok(start), Ok(end))) =
                range.map(|(start, end)| (usize::from_str_radix(start, 16), usize::from_str_radix(end, 16)))
            {
                inside = (start..end).contains(&address);
            } else if let Some(flags) = line.strip_prefix("VmFlags:").filter(|_| inside) {
                return flags.split_whitespace().map(str::to_owned).collect();
            }
        }
        panic!("{address:#x} is not mapped")
    }

    #[test]
    fn sizes_are_rounded_to_the_page_and_no_further() {
        for (asked, given) in [(1, PAGE_BYTES), (PAGE_BYTES, PAGE_BYTES), (PAGE_BYTES + 1, 2 * PAGE_BYTES)] {
            let block = PageableAllocator::default().allocate(asked).unwrap();
            assert_eq!(block.bytes(), given);
            assert_eq!(block.address().as_ptr() as usize % PAGE_BYTES, 0);
        }
    }

    #[test]
    fn an_impossible_reservation_is_an_error_with_its_size() {
        for bytes in [1 << 60, usize::MAX] {
            for huge_pages in [false, true] {
                let error = HostBlock::map(bytes, huge_pages).unwrap_err();
                assert!(error.to_string().contains(&bytes.to_string()), "{error}");
            }
        }
    }

    #[test]
    fn a_mapping_with_huge_pages_begins_at_one_and_has_the_exact_size() {
        let bytes = 3 * HUGE_PAGE_BYTES + 5 * PAGE_BYTES;
        let block = HostBlock::map(bytes - 1, true).unwrap();
        assert_eq!(block.bytes(), bytes);
        assert!(block.address().as_ptr().addr().is_multiple_of(HUGE_PAGE_BYTES));
        let flags = vm_flags(block.address());
        assert!(flags.iter().any(|flag| flag == "dc"), "not hidden from forked children: {flags:?}");
        if std::fs::exists("/sys/kernel/mm/transparent_hugepage").unwrap() {
            assert!(flags.iter().any(|flag| flag == "hg"), "no huge pages were asked for: {flags:?}");
        }
        assert!(!has_huge_pages(&HostBlock::map(bytes, false).unwrap(), 0));
    }

    fn has_huge_pages(block: &HostBlock, offset: usize) -> bool {
        // SAFETY: the offset is within the block.
        vm_flags(unsafe { block.address().add(offset) }).contains(&"hg".to_owned())
    }

    #[test]
    fn a_block_without_room_for_a_huge_page_asks_for_none() {
        let block = HostBlock::map(HUGE_PAGE_BYTES - PAGE_BYTES, true).unwrap();
        assert!(!has_huge_pages(&block, 0));
    }

    #[test]
    fn a_reserved_block_asks_for_huge_pages_where_its_memory_stays() {
        if !std::fs::exists("/sys/kernel/mm/transparent_hugepage").unwrap() {
            return;
        }
        for huge_pages in [true, false] {
            let block = PageableAllocator { huge_pages }.reserve(4 * HUGE_PAGE_BYTES).unwrap();
            block.use_huge_pages(HUGE_PAGE_BYTES..2 * HUGE_PAGE_BYTES);
            block.commit(&[0..HUGE_PAGE_BYTES, HUGE_PAGE_BYTES..3 * HUGE_PAGE_BYTES]).unwrap();
            let asked = [0, 1, 2].map(|part| has_huge_pages(&block, part * HUGE_PAGE_BYTES));
            assert_eq!(asked, [false, huge_pages, false]);
        }
    }

    #[test]
    fn parts_cover_a_block_once_on_any_number_of_threads() {
        for bytes in [PAGE_BYTES, HUGE_PAGE_BYTES, 5 * HUGE_PAGE_BYTES + PAGE_BYTES] {
            let block = HostBlock::map(bytes, false).unwrap();
            for threads in [0, 1, 2, 3, 7, 64] {
                let parts = std::sync::Mutex::new(Vec::new());
                block
                    .in_parts(0..bytes, threads, |part| {
                        parts.lock().unwrap().push(part);
                        Ok(())
                    })
                    .unwrap();
                let mut parts = parts.into_inner().unwrap();
                assert!(threads == 0 || parts.len() <= threads);
                parts.sort_by_key(|part| part.start);
                let end = parts.iter().fold(0, |end, part| {
                    assert_eq!(part.start, end);
                    assert!(part.start.is_multiple_of(HUGE_PAGE_BYTES) && !part.is_empty());
                    part.end
                });
                assert_eq!(end, bytes);
            }
        }
    }

    #[test]
    fn an_error_in_any_part_is_the_result() {
        let block = HostBlock::map(4 * HUGE_PAGE_BYTES, false).unwrap();
        for bad in 0..4 {
            let result =
                block.in_parts(0..block.bytes(), 4, |part| match part.start / HUGE_PAGE_BYTES == bad {
                    true => Err(io::Error::from_raw_os_error(libc::EHWPOISON)),
                    false => Ok(()),
                });
            assert_eq!(result.unwrap_err().raw_os_error(), Some(libc::EHWPOISON), "part {bad}");
        }
    }

    #[test]
    fn pages_are_resident_once_populated_or_touched() {
        for huge_pages in [false, true] {
            let bytes = 2 * HUGE_PAGE_BYTES + 3 * PAGE_BYTES;
            let pages = bytes / PAGE_BYTES;
            let block = HostBlock::map(bytes, huge_pages).unwrap();
            assert_eq!(resident_pages(&block), 0);
            block.populate(0..bytes, 3).unwrap();
            assert_eq!(resident_pages(&block), pages);
            let block = HostBlock::map(bytes, huge_pages).unwrap();
            block.touch_part(0..bytes);
            assert_eq!(resident_pages(&block), pages);
        }
    }

    #[test]
    fn locked_memory_is_resident_at_once() {
        for huge_pages in [false, true] {
            let allocator = LockedAllocator { huge_pages, threads: 2 };
            let block = match allocator.allocate(HUGE_PAGE_BYTES + 8 * PAGE_BYTES) {
                Ok(block) => block,
                Err(error) => {
                    assert!(error.to_string().contains("ulimit -l"), "{error}");
                    return;
                }
            };
            assert_eq!(resident_pages(&block), block.bytes() / PAGE_BYTES);
            assert!(vm_flags(block.address()).contains(&"lo".to_owned()));
        }
    }

    #[test]
    fn allocators_are_chosen_by_name() {
        for name in ["locked", "pageable"] {
            assert_eq!(allocator(name, true).unwrap().name(), name);
        }
        let error = allocator("pinned", false).err().unwrap().to_string();
        for name in ["pinned", "auto", "cuda", "registered", "locked", "pageable"] {
            assert!(error.contains(name), "{error}");
        }
    }
}
