//! Tells a process from the children that it forks.

use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

static FORKS: AtomicU32 = AtomicU32::new(0);
static WATCH: Once = Once::new();

/// The process that made a handle. A forked child has copies of its parent's handles without the
/// threads and the memory behind them, and must not use or release them.
///
/// A fork handler counts forks, because `getpid` takes longer than everything else that a lease
/// does.
#[derive(Debug, Clone, Copy)]
pub struct Origin(u32);

impl Origin {
    /// The calling process.
    pub fn here() -> Self {
        unsafe extern "C" fn forked() {
            FORKS.fetch_add(1, Ordering::Relaxed);
        }
        // SAFETY: the handler does nothing but add to an atomic, which a child may do at any time.
        // Handlers of a library that is unloaded are dropped by the system; extension modules never
        // are.
        WATCH.call_once(|| unsafe {
            libc::pthread_atfork(None, None, Some(forked));
        });
        Self(FORKS.load(Ordering::Relaxed))
    }

    /// Whether the calling process made the handle, rather than a process that the calling one was
    /// forked from.
    pub fn is_here(self) -> bool {
        self.0 == FORKS.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_is_not_where_its_parents_handles_come_from() {
        let origin = Origin::here();
        // SAFETY: the child only compares two numbers and leaves.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            // SAFETY: leaves without running anything of the parent's.
            unsafe { libc::_exit(i32::from(origin.is_here())) };
        }
        let mut status = -1;
        // SAFETY: `status` is a writable int.
        assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
        assert_eq!(status, 0);
        assert!(origin.is_here());
    }
}
