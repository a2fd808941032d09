use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

static FORKS: AtomicU32 = AtomicU32::new(0);
static WATCH: Once = Once::new();

/// The process that made something. A forked child has copies of its parent's handles, but neither the threads nor the
/// memory behind them, and must leave them alone.
///
/// A handler counts forks: asking the system for the process's number takes longer than all else that a lease does.
#[derive(Debug, Clone, Copy)]
pub struct Origin(u32);

impl Origin {
    /// This process.
    pub fn here() -> Self {
        unsafe extern "C" fn forked() {
            FORKS.fetch_add(1, Ordering::Relaxed);
        }
        // SAFETY: the handler does nothing but add to an atomic, which a child may do at any time. Handlers of a
        // library that is unloaded are dropped by the system; extension modules never are.
        WATCH.call_once(|| unsafe {
            libc::pthread_atfork(None, None, Some(forked));
        });
        Self(FORKS.load(Ordering::Relaxed))
    }

    /// Whether it is this process and not one that this one was forked from.
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
