//! Messages to the ring's thread.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use crossbeam_channel::{Sender, bounded};
use memascend_mem::{Pool, ResizeListener};

use super::wake::Wake;
use crate::{Request, VolumeFile};

/// What the ring's thread is told.
pub(super) enum Message {
    Request(Arc<VolumeFile>, Request, Instant),
    /// Registers the arena of a pool. The reply says whether the pool's changes are to be told.
    Register(Pool, Sender<bool>),
    /// These parts of the registered arena are memory now if `committed`, or cease to be. The reply comes when
    /// the ring knows.
    Memory {
        parts: Vec<Range<usize>>,
        committed: bool,
        reply: Sender<()>,
    },
    Close,
}

/// The way to the ring's thread.
pub(super) struct Mailbox {
    pub(super) queue: Sender<Message>,
    pub(super) wake: Arc<Wake>,
}

impl Mailbox {
    /// Gives the message back if the thread has ended.
    pub(super) fn send(&self, message: Message) -> std::result::Result<(), Message> {
        self.queue.send(message).map_err(|refused| refused.0)?;
        self.wake.notify();
        Ok(())
    }

    fn memory(&self, parts: &[Range<usize>], committed: bool) {
        let (reply, reply_rx) = bounded(1);
        // A thread that has ended has nothing registered, and answers nothing.
        if self.send(Message::Memory { parts: parts.to_vec(), committed, reply }).is_ok() {
            let _ = reply_rx.recv();
        }
    }
}

impl ResizeListener for Mailbox {
    fn committed(&self, parts: &[Range<usize>]) {
        self.memory(parts, true);
    }

    fn leaving(&self, parts: &[Range<usize>]) {
        self.memory(parts, false);
    }
}
