//! The loop of the ring's thread.

use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use crossbeam_channel::{Receiver, Sender, TryRecvError};
use io_uring::{CompletionQueue, SubmissionQueue, Submitter};
use memascend_mem::LockExt;

use super::mailbox::Message;
use super::refusal::{BUSY, REFUSED};
use super::setup::Built;
use super::wake::Wake;
use crate::engine::registered::Registered;
use crate::engine::schedule::Schedule;
use crate::unforked::Unforked;
use crate::{Counters, VolumeFile};

/// The ring's thread: the state between two turns of its loop.
pub(super) struct Driver {
    pub(super) messages: Receiver<Message>,
    pub(super) wake: Arc<Wake>,
    pub(super) counters: Arc<Counters>,
    pub(super) main_file: Option<Arc<VolumeFile>>,
    pub(super) features: Arc<Mutex<Vec<String>>>,
    pub(super) schedule: Schedule,
    pub(super) depth: usize,
    pub(super) polls: bool,
    pub(super) open: bool,
    pub(super) in_flight: usize,
    pub(super) bytes_in_flight: usize,
    pub(super) wake_word: Box<u64>,
    pub(super) wake_armed: bool,
    pub(super) fixed_file: bool,
    /// Since when the kernel has asked to try again, and has neither taken nor completed anything.
    pub(super) refused_since: Option<Instant>,
    pub(super) arena: Option<Registered>,
}

impl Driver {
    pub(super) fn start(mut self, mut built: Built, ready: &Sender<io::Result<()>>) {
        let Built { ring, features, .. } = &mut built;
        // The ring holds the volume's file.
        let _unforked = Unforked::of(ring);
        // A single-issuer ring belongs to the thread that enables it.
        if let Err(error) = ring.submitter().register_enable_rings() {
            let _ = ready.send(Err(error));
            return;
        }
        let main_file = self.main_file.as_ref();
        self.fixed_file = main_file.is_some_and(|file| ring.submitter().register_files(&[file.fd()]).is_ok());
        if self.fixed_file {
            features.push("registered_file".into());
        }
        let (mut submitter, sq, cq) = ring.split();
        if submitter.register_ring_fd().is_ok() {
            features.push("registered_ring".into());
        }
        self.features.locked().append(features);
        let _ = ready.send(Ok(()));
        self.run(&mut Enabled { submitter, sq, cq });
    }

    fn run(&mut self, ring: &mut Enabled<'_>) {
        loop {
            self.accept(ring);
            self.arm_wake(ring);
            self.fill(ring);
            let idle = self.in_flight == 0;
            // The wake-up read must have ended too, or the kernel could still write to its word.
            // Dropping the engine always rings, so the read does end.
            if !self.open && idle && self.schedule.is_empty() && !self.wake_armed {
                // Unregister now rather than when the kernel frees the ring: another process may
                // open the device at once, and the next ring's buffers count against the same
                // limit.
                if self.fixed_file {
                    let _ = ring.submitter.unregister_files();
                }
                if self.arena.is_some() {
                    let _ = ring.submitter.unregister_buffers();
                }
                return;
            }
            if self.open {
                self.wake.sleeping.store(true, Ordering::SeqCst);
                // A sender that did not see the store above does not ring: check the queue once
                // more.
                if !self.messages.is_empty() {
                    self.wake.sleeping.store(false, Ordering::SeqCst);
                    let _ = ring.submitter.submit();
                    self.take_completions(ring);
                    continue;
                }
                if !self.polls && idle && !self.wake_armed {
                    // No read is armed that could wake the thread.
                    continue;
                }
                if self.polls && idle {
                    self.wake.wait();
                    self.wake.sleeping.store(false, Ordering::SeqCst);
                    continue;
                }
            }
            let refusal = match self.wake.entered(&ring.submitter) {
                Ok(_) => None,
                Err(error) => Some(error.raw_os_error().unwrap_or(libc::EIO)),
            };
            self.wake.sleeping.store(false, Ordering::SeqCst);
            let completed = self.take_completions(ring);
            match refusal {
                Some(errno @ (libc::EINTR | libc::EAGAIN | libc::EBUSY)) if !completed => {
                    if self.is_refused_for_long(ring, errno) {
                        return self.fail(errno, BUSY);
                    }
                }
                None | Some(libc::EINTR | libc::EAGAIN | libc::EBUSY) => self.refused_since = None,
                // The kernel takes no more from this ring, and never should refuse.
                Some(errno) => return self.fail(errno, REFUSED),
            }
        }
    }

    /// Moves new requests into the schedule. Each holds memory, which bounds their number.
    fn accept(&mut self, ring: &Enabled<'_>) {
        while self.open {
            match self.messages.try_recv() {
                Ok(Message::Request(file, request, started)) => {
                    if let Some(ended) = self.schedule.accept(&file, request, started) {
                        ended.tell(&self.counters);
                    }
                }
                Ok(Message::Register(pool, reply)) => {
                    let _ = reply.send(self.register(ring, pool));
                }
                Ok(Message::Memory { parts, committed, reply }) => {
                    self.memory_changed(ring, &parts, committed);
                    let _ = reply.send(());
                }
                Err(TryRecvError::Empty) => return,
                Ok(Message::Close) | Err(TryRecvError::Disconnected) => self.open = false,
            }
        }
    }
}

/// The parts of an enabled ring.
pub(super) struct Enabled<'a> {
    pub(super) submitter: Submitter<'a>,
    pub(super) sq: SubmissionQueue<'a>,
    pub(super) cq: CompletionQueue<'a>,
}

impl Drop for Driver {
    /// After an orderly end nothing is in flight. After a panic the kernel may still use the
    /// submitted buffers: they are leaked. Waiting threads are notified when the callbacks are
    /// dropped.
    fn drop(&mut self) {
        for request in self.schedule.drain() {
            std::mem::forget(request.buffer);
        }
        if self.wake_armed {
            std::mem::forget(std::mem::take(&mut self.wake_word));
        }
    }
}
