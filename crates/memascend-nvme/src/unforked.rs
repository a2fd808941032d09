//! Descriptors that forked children do not keep.
//!
//! A lock on a file (flock) and the exclusive use of a device (O_EXCL) belong to the open file,
//! which a forked child shares: they last until every process has closed it. A DataLoader's worker
//! that outlives a killed trainer would keep the trainer's store in use. So a handler in every child
//! puts another descriptor in the place of each of these. It does not close them: the child's copies
//! of their owners would close whatever got the same number later.

use std::os::fd::AsRawFd;
use std::ptr;
use std::sync::Once;
use std::sync::atomic::{AtomicI32, AtomicPtr, Ordering};

const NONE: i32 = -1;

/// A descriptor of this process alone. Declared before the descriptor's owner, so that it is dropped
/// first.
#[derive(Debug)]
pub(crate) struct Unforked(&'static Slot);

/// An entry of the list of descriptors. Entries are reused and never freed: a child reads the list
/// while another thread of its parent may have been changing it.
#[derive(Debug)]
struct Slot {
    descriptor: AtomicI32,
    next: *const Slot,
}

// SAFETY: `next` is set before the slot is shared, and points to a slot that is never freed.
unsafe impl Sync for Slot {}

static FIRST: AtomicPtr<Slot> = AtomicPtr::new(ptr::null_mut());
/// The replacement of a descriptor: an eventfd, to which no store can be written.
static SUBSTITUTE: AtomicI32 = AtomicI32::new(NONE);
static WATCH: Once = Once::new();

impl Unforked {
    /// Takes the descriptor away from every child that is forked while the value lives.
    pub(crate) fn of(owner: &impl AsRawFd) -> Self {
        WATCH.call_once(|| {
            // SAFETY: eventfd takes no pointers; the handler makes only calls that a child of a
            // process with threads may make.
            unsafe {
                SUBSTITUTE.store(libc::eventfd(0, libc::EFD_CLOEXEC), Ordering::Release);
                libc::pthread_atfork(None, None, Some(replace_all));
            }
        });
        let descriptor = owner.as_raw_fd();
        let unused = slots().find(|slot| {
            let taken =
                slot.descriptor.compare_exchange(NONE, descriptor, Ordering::AcqRel, Ordering::Relaxed);
            taken.is_ok()
        });
        Self(unused.unwrap_or_else(|| add(descriptor)))
    }
}

impl Drop for Unforked {
    fn drop(&mut self) {
        self.0.descriptor.store(NONE, Ordering::Release);
    }
}

fn slots() -> impl Iterator<Item = &'static Slot> {
    let mut next = FIRST.load(Ordering::Acquire).cast_const();
    std::iter::from_fn(move || {
        // SAFETY: null, or a slot that is never freed.
        let slot = unsafe { next.as_ref() }?;
        next = slot.next;
        Some(slot)
    })
}

fn add(descriptor: i32) -> &'static Slot {
    let mut first = FIRST.load(Ordering::Acquire);
    let slot = Box::leak(Box::new(Slot { descriptor: AtomicI32::new(descriptor), next: first }));
    while let Err(newer) = FIRST.compare_exchange(first, slot, Ordering::AcqRel, Ordering::Acquire) {
        slot.next = newer;
        first = newer;
    }
    slot
}

/// Runs in the child.
unsafe extern "C" fn replace_all() {
    let substitute = SUBSTITUTE.load(Ordering::Acquire);
    if substitute == NONE {
        return;
    }
    for slot in slots() {
        let descriptor = slot.descriptor.load(Ordering::Acquire);
        if descriptor != NONE {
            // SAFETY: a plain system call; the child's copies of the descriptor's owner stay its
            // owners.
            unsafe { libc::dup3(substitute, descriptor, libc::O_CLOEXEC) };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsRawFd;

    use super::*;

    fn try_lock(path: &std::path::Path) -> bool {
        let file = File::open(path).unwrap();
        // SAFETY: a plain system call on a descriptor that lives.
        unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) == 0 }
    }

    #[test]
    fn a_child_keeps_no_lock_of_its_parent() {
        let files: Vec<_> = (0..3).map(|_| tempfile::NamedTempFile::new().unwrap()).collect();
        let open = |index: usize| {
            let file = File::open(files[index].path()).unwrap();
            // SAFETY: a plain system call on a descriptor that lives.
            assert_eq!(unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX) }, 0);
            (Unforked::of(&file), file)
        };
        let mut held: Vec<_> = (0..3).map(open).collect();
        // A slot is used again.
        drop(held.pop());
        held.push(open(2));
        let mut pipe = [0; 2];
        // SAFETY: two ints are written to a live array.
        assert_eq!(unsafe { libc::pipe(pipe.as_mut_ptr()) }, 0);
        // SAFETY: the child only waits for the end of its parent's pipe, and leaves.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let mut byte = 0_u8;
            // SAFETY: as above; one byte is read into a live one.
            unsafe {
                libc::close(pipe[1]);
                libc::read(pipe[0], (&raw mut byte).cast(), 1);
                libc::_exit(0);
            }
        }
        assert!(files.iter().all(|file| !try_lock(file.path())), "the parent's locks stay");
        drop(held);
        // The handler may not have run yet.
        let end = std::time::Instant::now() + std::time::Duration::from_secs(20);
        while !files.iter().all(|file| try_lock(file.path())) {
            assert!(std::time::Instant::now() < end, "the child keeps a lock");
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        let mut status = -1;
        // SAFETY: plain system calls; `status` is a writable int.
        unsafe {
            assert_eq!(libc::waitpid(child, &mut status, libc::WNOHANG), 0, "the child lives");
            libc::close(pipe[1]);
            libc::close(pipe[0]);
            assert_eq!(libc::waitpid(child, &mut status, 0), child);
        }
        assert_eq!(status, 0);
    }
}
