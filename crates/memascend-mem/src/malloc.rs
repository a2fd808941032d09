//! Settings of the C library's allocator, and the memory that it keeps after its blocks were freed.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Bytes that the process gains, within a budget, before its free heap is given back. Giving back
/// takes a millisecond, and the kernel takes another to hand the pages out again.
pub const GROWTH_BYTES: usize = 2 << 20;

/// Bytes of anonymous memory that the process held when its free heap was last given back, or at
/// the beginning of a pass if those were fewer.
static HELD_BYTES: AtomicUsize = AtomicUsize::new(0);

/// The most that glibc raises its threshold to by itself.
#[cfg(target_env = "gnu")]
const THRESHOLD_MAX_BYTES: i32 = 32 << 20;
/// Free memory at the end of the heap that stays there.
#[cfg(target_env = "gnu")]
const HEAP_KEPT_BYTES: i32 = 256 << 20;

/// Makes malloc keep freed blocks below 32 MiB for the next ones: the opposite of
/// [`return_large_blocks_to_system`], for runs with memory to spare.
///
/// A block that comes from the system is zeroed, page by page, as it is first written. In a step
/// with everything in memory that took a third of the time (0.5 million pages of gradients and
/// temporaries with 0.51B parameters). The setting affects the whole process; it does nothing with
/// another libc.
pub fn keep_large_blocks() {
    #[cfg(target_env = "gnu")]
    // SAFETY: as in `return_large_blocks_to_system`.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, THRESHOLD_MAX_BYTES);
        libc::mallopt(libc::M_TRIM_THRESHOLD, HEAP_KEPT_BYTES);
    }
}

/// Makes malloc return every block of 128 KiB or more to the system as soon as the block is freed.
///
/// glibc raises this threshold, up to 32 MiB, whenever a larger block is freed. From then on a
/// layer's temporaries come from the heap, between small objects that live for the whole pass. The
/// holes that the temporaries leave grow with the depth of the model: 0.9 MiB a layer at width
/// 1024. Setting the threshold, here to glibc's initial value, stops glibc from raising it. The
/// setting affects the whole process; it does nothing with another libc.
pub fn return_large_blocks_to_system() {
    #[cfg(target_env = "gnu")]
    // SAFETY: mallopt takes two integers and is thread-safe in glibc.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, 128 * 1024);
        libc::mallopt(libc::M_TRIM_THRESHOLD, 128 * 1024);
    }
}

/// Gives the pages of free blocks inside the heap back to the system, where the process has grown
/// by `growth_bytes` since that was last done. Call it between units, and with `pass_begins` at the
/// beginning of a pass.
///
/// Blocks below 128 KiB come from the heap. A layer's temporaries leave holes there, between small
/// objects that live for the whole pass, and the holes of the next layer are elsewhere: 0.9 MiB a
/// layer at width 768 and 64 tokens. The process may have grown for another reason; then one call
/// is in vain, and the next compares with the larger size. It does nothing with another libc.
pub fn trim_heap(pass_begins: bool, growth_bytes: usize) {
    let Some(held) = anonymous_bytes() else { return };
    if held >= HELD_BYTES.load(Relaxed).saturating_add(growth_bytes) {
        trim();
        HELD_BYTES.store(anonymous_bytes().unwrap_or(held), Relaxed);
    } else if pass_begins {
        HELD_BYTES.fetch_min(held, Relaxed);
    }
}

#[cfg(target_env = "gnu")]
fn trim() {
    // SAFETY: malloc_trim takes an integer and is thread-safe in glibc; it touches free blocks only.
    unsafe { libc::malloc_trim(0) };
}

#[cfg(not(target_env = "gnu"))]
fn trim() {}

/// Resident bytes of this process that no file backs.
fn anonymous_bytes() -> Option<usize> {
    if cfg!(not(target_env = "gnu")) {
        return None;
    }
    let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
    let mut pages = statm.split(' ').skip(1).map(str::parse::<usize>);
    let (resident, shared) = (pages.next()?.ok()?, pages.next()?.ok()?);
    // SAFETY: sysconf takes an integer.
    let page_bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    Some(resident.saturating_sub(shared) * usize::try_from(page_bytes).ok()?)
}
