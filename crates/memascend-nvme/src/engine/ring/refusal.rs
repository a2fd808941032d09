//! Errors of the ring itself: a kernel that refuses to go on.

use std::time::{Duration, Instant};

use super::driver::{Driver, Enabled};
use super::mailbox::Message;
use crate::Counters;
use crate::engine::schedule::Ended;

/// The hint of a ring that the kernel takes nothing from any more.
pub(super) const REFUSED: &str =
    "io_uring failed: resume from the last durable step, with engine=\"threads\" if it fails again";
/// The hint of a ring that the kernel has asked to try again for [`REFUSED_AT_MOST`].
pub(super) const BUSY: &str = "for 10 seconds io_uring has neither taken nor completed anything: resume from the last durable step, \
     with engine=\"threads\" if it happens again";
/// How long the kernel may ask to try again, while it takes and completes nothing, before the ring counts as
/// failed.
const REFUSED_AT_MOST: Duration =
    if cfg!(test) { Duration::from_millis(300) } else { Duration::from_secs(10) };
/// How long the thread sleeps before it tries again.
const REFUSED_POLL: Duration = Duration::from_millis(1);

impl Driver {
    /// Whether the kernel has asked to try again for too long, while there is something to take or to complete.
    /// Sleeps for a moment where the kernel is busy.
    pub(super) fn is_refused_for_long(&mut self, ring: &mut Enabled<'_>, errno: i32) -> bool {
        ring.sq.sync();
        let is_busy = errno != libc::EINTR;
        if is_busy {
            std::thread::sleep(REFUSED_POLL);
        }
        // A wait for a slow drive may be interrupted any number of times.
        let is_waited_for = if self.in_flight > 0 { is_busy } else { !self.open };
        if ring.sq.is_empty() && !is_waited_for {
            self.refused_since = None;
            return false;
        }
        self.refused_since.get_or_insert_with(Instant::now).elapsed() > REFUSED_AT_MOST
    }

    /// Ends all requests, and every one that comes, with an error.
    pub(super) fn fail(&mut self, errno: i32, hint: &'static str) {
        let fail = |ended: Vec<Ended>, counters: &Counters| {
            for ended in ended {
                // The kernel may still have parts of it: its buffer is never used again.
                std::mem::forget(ended.buffer().clone());
                ended.tell(counters);
            }
        };
        fail(self.schedule.fail_all(errno, hint), &self.counters);
        // What closes the ring waits for the end of its thread.
        while self.open
            && let Ok(message) = self.messages.recv()
        {
            match message {
                Message::Request(file, request, started) => {
                    let at_once = self.schedule.accept(&file, request, started);
                    at_once.into_iter().for_each(|ended| ended.tell(&self.counters));
                    fail(self.schedule.fail_all(errno, hint), &self.counters);
                }
                Message::Register(_, reply) => drop(reply.send(false)),
                Message::Memory { reply, .. } => drop(reply.send(())),
                Message::Close => return,
            }
        }
    }
}

#[cfg(test)]
mod tests;
