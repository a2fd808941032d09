use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

static FORKS: AtomicU32 = AtomicU32::new(0);
static WATCH: Once = Once::new();

/// A number that is another one in a process forked since the first arena was made. Asking for the process's number instead is a system call, which
/// takes longer than all else that a lease does.
pub fn generation() -> u32 {
    FORKS.load(Ordering::Relaxed)
}

/// Has [`generation`] change from the next fork on.
pub(crate) fn watch() {
    unsafe extern "C" fn forked() {
        FORKS.fetch_add(1, Ordering::Relaxed);
    }
    // SAFETY: the handler does nothing but add to an atomic, which a child may do at any time. Handlers of a library
    // that is unloaded are dropped by the system; extension modules never are.
    WATCH.call_once(|| unsafe {
        libc::pthread_atfork(None, None, Some(forked));
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_is_of_another_generation() {
        watch();
        let before = generation();
        // SAFETY: the child only compares two numbers and leaves.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            // SAFETY: leaves without running anything of the parent's.
            unsafe { libc::_exit(i32::from(generation() == before)) };
        }
        let mut status = -1;
        // SAFETY: `status` is a writable int.
        assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
        assert_eq!(status, 0);
        assert_eq!(generation(), before);
    }
}
