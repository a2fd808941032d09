//! The power of simulated disks, which a test cuts.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

use memascend_mem::LockExt;

#[cfg(doc)]
use crate::testing::SimDisk;

/// The power that some simulated disks share, which can be cut at any of their operations.
#[derive(Default)]
pub struct Power {
    state: Mutex<PowerState>,
}

#[derive(Default)]
struct PowerState {
    /// Operations of all disks so far: parts of transfers, flushes, and operations on notes.
    count: u64,
    cut_at: Option<u64>,
    off: bool,
}

impl Power {
    /// Power that does not fail.
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Cuts the power at operation `count` from now; 1 is the next. That operation is interrupted,
    /// and all later ones fail.
    pub fn cut_at(&self, count: u64) {
        let mut state = self.lock();
        state.cut_at = Some(state.count + count);
    }

    /// Operations so far.
    pub fn count(&self) -> u64 {
        self.lock().count
    }

    /// Whether it has failed.
    pub fn is_off(&self) -> bool {
        self.lock().off
    }

    /// Restores the power. The caller must call [`SimDisk::crash`] on each disk.
    pub fn restore(&self) {
        let mut state = self.lock();
        (state.cut_at, state.off) = (None, false);
    }

    /// Counts an operation. Returns whether the power fails at this one.
    pub(super) fn step(&self) -> io::Result<bool> {
        let mut state = self.lock();
        if state.off {
            return Err(gone());
        }
        state.count += 1;
        state.off = state.cut_at == Some(state.count);
        Ok(state.off)
    }

    fn lock(&self) -> MutexGuard<'_, PowerState> {
        self.state.locked()
    }
}

pub(super) fn gone() -> io::Error {
    io::Error::from_raw_os_error(libc::ENODEV)
}
