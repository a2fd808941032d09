//! The power of simulated disks, which a test cuts.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

use memascend_mem::LockExt;

#[cfg(doc)]
use crate::testing::SimDisk;

/// The power of some simulated disks, which can be made to fail at any of what they are asked to do.
#[derive(Default)]
pub struct Power {
    state: Mutex<PowerState>,
}

#[derive(Default)]
struct PowerState {
    /// Operations of all disks so far: parts of transfers, flushes, and what is done to a note.
    count: u64,
    cut_at: Option<u64>,
    off: bool,
}

impl Power {
    /// Power that stays.
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// The power fails at operation `count` from now, the first being 1: it is on its way then, and fails, as all that follow do.
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

    /// The power is back. Each disk has to be told by [`SimDisk::crash`] what that meant for it.
    pub fn restore(&self) {
        let mut state = self.lock();
        (state.cut_at, state.off) = (None, false);
    }

    /// One more operation; whether it is the one at which the power fails.
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
