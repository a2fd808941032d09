//! Completion: what the kernel has done.

use std::io;

use super::driver::{Driver, Enabled};

/// Completions handled before more is submitted. Drives complete in bursts, and would idle while a
/// whole burst is handled.
const COMPLETIONS_AT_ONCE: usize = 2;
/// `user_data` of the wake-up read.
pub(super) const WAKE: u64 = u64::MAX;

impl Driver {
    /// Handles some completions; whether there were any.
    pub(super) fn take_completions(&mut self, ring: &mut Enabled<'_>) -> bool {
        ring.cq.sync();
        let mut completed = false;
        for entry in ring.cq.by_ref().take(COMPLETIONS_AT_ONCE) {
            completed = true;
            if entry.user_data() == WAKE {
                self.wake_armed = false;
                continue;
            }
            let part = entry.user_data() as usize;
            self.in_flight -= 1;
            self.bytes_in_flight -= self.schedule.part_bytes(part);
            let moved = entry.result();
            let result = usize::try_from(moved).map_err(|_| io::Error::from_raw_os_error(-moved));
            if let Some(ended) = self.schedule.complete(part, result) {
                ended.tell(&self.counters);
            }
        }
        ring.cq.sync();
        completed
    }
}
