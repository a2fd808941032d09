//! The simulated drive: an engine over a disk in memory, with the scheduling of the real engines
//! and seeded faults.

mod disk;
mod faults;
mod notes;
mod power;
#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use memascend_mem::{LockExt, WaitExt};

use self::disk::Die;
pub use self::disk::{Injected, SimDisk};
pub use self::faults::Faults;
pub use self::notes::SimNotePlace;
use self::notes::SimNotes;
pub use self::power::Power;
use crate::engine::schedule::{Ended, Schedule};
use crate::error::flush_error;
use crate::{Counters, CountersSnapshot, Engine, NoteKeeper, Request, Result, VolumeFile};

/// An engine over a [`SimDisk`]: the scheduling of the real ones, seeded faults and reordering, for
/// tests.
pub struct SimEngine {
    shared: Arc<Shared>,
    pump: Option<JoinHandle<()>>,
    notes: Option<SimNotePlace>,
}

struct Shared {
    disk: Arc<SimDisk>,
    file: Arc<VolumeFile>,
    counters: Counters,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    schedule: Schedule,
    /// Parts held back, as (due time, order in which they were taken, part); the earliest on top.
    held: BinaryHeap<Reverse<(u64, u64, usize)>>,
    /// Virtual time: when the last part was due.
    clock: u64,
    /// How many parts were held back so far.
    taken: u64,
    open: bool,
}

impl SimEngine {
    /// An engine without a thread: calls of `submit` and [`SimEngine::drain`] carry requests out.
    /// With one calling thread a run repeats exactly.
    pub fn new(file: &Arc<VolumeFile>, disk: Arc<SimDisk>) -> Self {
        let schedule = Schedule::new(Some(disk.geometry()));
        let state = State { schedule, held: BinaryHeap::new(), clock: 0, taken: 0, open: true };
        let shared = Arc::new(Shared {
            disk,
            file: Arc::clone(file),
            counters: Counters::default(),
            state: Mutex::new(state),
            changed: Condvar::new(),
        });
        Self { shared, pump: None, notes: None }
    }

    /// An engine with a thread that carries requests out and calls back, as real engines have.
    pub fn running(file: &Arc<VolumeFile>, disk: Arc<SimDisk>) -> Self {
        let mut engine = Self::new(file, disk);
        let shared = Arc::clone(&engine.shared);
        engine.pump = Some(std::thread::spawn(move || shared.pump()));
        engine
    }

    /// Keeps the volume's notes on the simulated disk too, where faults and crashes hit them.
    pub fn with_notes(mut self, place: SimNotePlace) -> Self {
        self.notes = Some(place);
        self
    }

    /// Completes every request held back.
    pub fn drain(&self) {
        while self.shared.complete_one(0) {}
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.locked()
    }

    fn pump(&self) {
        loop {
            while self.complete_one(0) {}
            let mut state = self.lock();
            self.hold_back(&mut state);
            if !state.open && state.schedule.is_empty() {
                return;
            }
            if state.held.is_empty() && state.open {
                drop(self.changed.wait_locked(state));
                if self.disk.faults.reorder > 0 {
                    // Let some requests gather, so that there is something to reorder.
                    std::thread::sleep(Duration::from_micros(20));
                }
            }
        }
    }

    /// Carries out the part that is due first, if more than `keep` are held back.
    fn complete_one(&self, keep: usize) -> bool {
        let mut state = self.lock();
        self.hold_back(&mut state);
        if state.held.len() <= keep {
            return false;
        }
        let Reverse((due, _, part)) = state.held.pop().expect("one is held");
        state.clock = state.clock.max(due);
        let transfer = state.schedule.transfer(part);
        // SAFETY: the range lies in the request's buffer, which the request owns until the part is
        // complete.
        let buffer = unsafe { std::slice::from_raw_parts_mut(transfer.address, transfer.bytes) };
        let result = self.disk.carry_out(transfer.operation, transfer.offset, buffer);
        let ended = state.schedule.complete(part, result);
        drop(state);
        self.tell(ended);
        true
    }

    /// Takes as many parts as the disk works on at once; the others wait in the schedule, as they
    /// do before a drive's queue.
    fn hold_back(&self, state: &mut State) {
        while state.held.len() <= self.disk.faults.reorder {
            let Some(part) = state.schedule.next() else { return };
            state.taken += 1;
            let offset = state.schedule.transfer(part).offset;
            let draw = self.disk.random(state.taken, Die::Latency, offset);
            // Some take much longer than the others.
            let latency = 1 + (draw >> 4) % if draw.is_multiple_of(16) { 2000 } else { 100 };
            state.held.push(Reverse((state.clock + latency, state.taken, part)));
        }
    }

    fn tell(&self, ended: Option<Ended>) {
        if let Some(ended) = ended {
            ended.tell(&self.counters);
        }
    }
}

impl Engine for SimEngine {
    fn name(&self) -> &'static str {
        "sim"
    }

    fn submit(&self, request: Request) {
        let shared = &self.shared;
        let now = Instant::now();
        shared.counters.started(now);
        let refused = shared.lock().schedule.accept(&shared.file, request, now);
        shared.tell(refused);
        if self.pump.is_some() {
            shared.changed.notify_one();
        } else {
            while shared.complete_one(shared.disk.faults.reorder) {}
        }
    }

    fn flush(&self) -> Result<()> {
        let Shared { disk, file, .. } = &*self.shared;
        disk.flush().map_err(|source| flush_error(file.path(), source))
    }

    fn counters(&self) -> CountersSnapshot {
        self.shared.counters.snapshot()
    }

    fn needs_room(&self) -> bool {
        false
    }

    fn room_bytes(&self) -> Option<u64> {
        self.shared.disk.lock().room_bytes
    }

    fn notes(&self) -> Option<Arc<dyn NoteKeeper>> {
        let (disk, file) = (Arc::clone(&self.shared.disk), Arc::clone(&self.shared.file));
        self.notes.map(|place| Arc::new(SimNotes::new(disk, place, file)) as Arc<dyn NoteKeeper>)
    }
}

impl Drop for SimEngine {
    fn drop(&mut self) {
        self.shared.lock().open = false;
        self.shared.changed.notify_all();
        match self.pump.take() {
            Some(pump) if pump.thread().id() != std::thread::current().id() => drop(pump.join()),
            _ => self.drain(),
        }
    }
}
