//! Submission: which transfers the kernel gets, and how.

use std::sync::Arc;
use std::time::Duration;

use io_uring::{opcode, squeue, types};

use super::completion::WAKE;
use super::driver::{Driver, Enabled};
use crate::Operation;
use crate::engine::schedule::Transfer;

/// The most bytes in flight. More would not be faster, and small requests would wait longer in the
/// drive.
const BYTES_IN_FLIGHT: usize = 32 << 20;

impl Driver {
    /// Submits the read that ends when the thread is to wake.
    pub(super) fn arm_wake(&mut self, ring: &mut Enabled<'_>) {
        if self.wake_armed || !self.open || self.polls {
            return;
        }
        let event = types::Fd(self.wake.descriptor());
        let read = opcode::Read::new(event, (&raw mut *self.wake_word).cast(), 8).build().user_data(WAKE);
        // Submitting has made room in the queue.
        ring.sq.sync();
        // SAFETY: the word is boxed and lives until the ring is dropped at the end of `Driver::start`.
        if unsafe { ring.sq.push(&read) }.is_ok() {
            self.wake_armed = true;
        }
        ring.sq.sync();
    }

    /// Submits transfers until the drive's queue is full.
    pub(super) fn fill(&mut self, ring: &mut Enabled<'_>) {
        ring.sq.sync();
        while self.in_flight < self.depth
            && (self.bytes_in_flight < BYTES_IN_FLIGHT || self.in_flight == 0)
            && !ring.sq.is_full()
        {
            let Some(part) = self.schedule.next() else { break };
            let transfer = self.schedule.transfer(part);
            if transfer.operation == Operation::Write
                && let Err(error) = transfer.file.check_writable()
            {
                if let Some(ended) = self.schedule.complete(part, Err(error)) {
                    ended.tell(&self.counters);
                }
                continue;
            }
            if transfer.retries > 1 && self.in_flight == 0 {
                std::thread::sleep(Duration::from_micros(50) * transfer.retries.min(100));
            }
            let entry = self.entry(&transfer).user_data(part as u64);
            // SAFETY: the part's job owns its buffer until the part's completion is taken.
            unsafe { ring.sq.push(&entry) }.expect("there is room");
            self.in_flight += 1;
            self.bytes_in_flight += transfer.bytes;
        }
        ring.sq.sync();
    }

    fn entry(&self, transfer: &Transfer) -> squeue::Entry {
        let length = u32::try_from(transfer.bytes).expect("a part is small");
        let offset = transfer.file.position(transfer.offset);
        let buffer =
            self.arena.as_ref().and_then(|arena| arena.index_of(transfer.address as usize, transfer.bytes));
        let address = transfer.address;
        macro_rules! on {
            ($target:expr) => {
                match (transfer.operation, buffer) {
                    (Operation::Read, Some(index)) => {
                        opcode::ReadFixed::new($target, address, length, index).offset(offset).build()
                    }
                    (Operation::Write, Some(index)) => {
                        opcode::WriteFixed::new($target, address, length, index).offset(offset).build()
                    }
                    (Operation::Read, None) => {
                        opcode::Read::new($target, address, length).offset(offset).build()
                    }
                    (Operation::Write, None) => {
                        opcode::Write::new($target, address, length).offset(offset).build()
                    }
                }
            };
        }
        let is_main = self.main_file.as_ref().is_some_and(|main| Arc::ptr_eq(main, &transfer.file));
        if self.fixed_file && is_main { on!(types::Fixed(0)) } else { on!(types::Fd(transfer.file.fd())) }
    }
}
