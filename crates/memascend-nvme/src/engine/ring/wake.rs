//! Wakes the ring's thread.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};

use io_uring::Submitter;

/// Wakes the ring's thread when it sleeps in the kernel.
pub(super) struct Wake {
    event: OwnedFd,
    pub(super) sleeping: AtomicBool,
    /// The errno that a test has the kernel refuse to go on with.
    #[cfg(test)]
    pub(super) refusal: std::sync::atomic::AtomicI32,
}

impl Wake {
    pub(super) fn new() -> io::Result<Self> {
        // SAFETY: eventfd takes no pointers.
        let event = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) };
        if event < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was just made and has no other owner.
        let event = unsafe { OwnedFd::from_raw_fd(event) };
        let sleeping = AtomicBool::new(false);
        Ok(Self {
            event,
            sleeping,
            #[cfg(test)]
            refusal: std::sync::atomic::AtomicI32::new(0),
        })
    }

    /// Submits what is queued and waits for a completion, unless a test has the kernel refuse that.
    #[cfg(test)]
    pub(super) fn entered(&self, submitter: &Submitter<'_>) -> io::Result<usize> {
        match self.refusal.load(Ordering::SeqCst) {
            0 => submitter.submit_and_wait(1),
            errno => Err(io::Error::from_raw_os_error(errno)),
        }
    }

    #[cfg(not(test))]
    #[allow(clippy::unused_self)]
    pub(super) fn entered(&self, submitter: &Submitter<'_>) -> io::Result<usize> {
        submitter.submit_and_wait(1)
    }

    /// The descriptor that the ring's wake-up read is of.
    pub(super) fn descriptor(&self) -> RawFd {
        self.event.as_raw_fd()
    }

    /// Wakes the thread if it sleeps.
    pub(super) fn notify(&self) {
        // SeqCst pairs with the ring thread's store-then-check: either the ring thread sees the new
        // request, or this thread sees that the ring thread sleeps.
        if self.sleeping.swap(false, Ordering::SeqCst) {
            self.ring();
        }
    }

    /// Wakes the thread.
    pub(super) fn ring(&self) {
        let one = 1_u64;
        // SAFETY: eight bytes are read from a live u64.
        unsafe { libc::write(self.event.as_raw_fd(), (&raw const one).cast(), 8) };
    }

    /// Sleeps until another thread calls [`Wake::ring`].
    pub(super) fn wait(&self) {
        let mut word = 0_u64;
        // SAFETY: eight bytes are written to a live u64.
        unsafe { libc::read(self.event.as_raw_fd(), (&raw mut word).cast(), 8) };
    }
}
