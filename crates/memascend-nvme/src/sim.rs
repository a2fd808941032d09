use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap};
use std::io;
use std::str::FromStr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::schedule::{Ended, Schedule};
use crate::{BLOCK_BYTES, Counters, CountersSnapshot, Engine, Operation, Request, Result, VolumeFile};

/// Faults of a [`SimDisk`]. Each `…_one_in` is how many operations there are to a fault, 0 for none. Which operations are
/// hit follows from the seed, the place, the length and how often that place was used, not from the time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Faults {
    /// Seed of everything random.
    pub seed: u64,
    /// Reads that fail with EIO.
    pub read_error_one_in: u64,
    /// Writes that fail, with ENOSPC or EIO.
    pub write_error_one_in: u64,
    /// Transfers that move only some of their blocks.
    pub short_one_in: u64,
    /// Transfers that are refused with EAGAIN or EINTR, to be tried again.
    pub again_one_in: u64,
    /// Writes that go to another place, and say that all is well.
    pub misdirected_one_in: u64,
    /// Flushes that do nothing, and say that all is well.
    pub lost_flush_one_in: u64,
    /// Whether a crash cuts the writes it hits in the middle of a block. Without, blocks are written whole or not at all.
    pub torn: bool,
    /// Up to so many transfers are held back, to complete in the order of their random latencies.
    pub reorder: usize,
}

impl FromStr for Faults {
    type Err = String;

    /// Fields by name, as in `seed=7,read_error_one_in=100,torn=1`.
    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let mut faults = Self::default();
        for pair in text.split(',').filter(|pair| !pair.trim().is_empty()) {
            let (name, value) = pair.split_once('=').ok_or_else(|| format!("{pair:?} is not name=number"))?;
            let number: u64 = value.trim().parse().map_err(|_| format!("{value:?} is not a number"))?;
            match name.trim() {
                "seed" => faults.seed = number,
                "read_error_one_in" => faults.read_error_one_in = number,
                "write_error_one_in" => faults.write_error_one_in = number,
                "short_one_in" => faults.short_one_in = number,
                "again_one_in" => faults.again_one_in = number,
                "misdirected_one_in" => faults.misdirected_one_in = number,
                "lost_flush_one_in" => faults.lost_flush_one_in = number,
                "torn" => faults.torn = number != 0,
                "reorder" => faults.reorder = number as usize,
                other => return Err(format!("unknown fault {other:?}")),
            }
        }
        Ok(faults)
    }
}

/// The medium behind simulated engines: what was flushed survives [`SimDisk::crash`], what was not may or may not.
/// Blocks never written read as zeros.
pub struct SimDisk {
    faults: Faults,
    state: Mutex<Disk>,
}

#[derive(Default)]
struct Disk {
    durable: HashMap<u64, Block>,
    /// Blocks written since the last flush that did its work.
    cached: BTreeMap<u64, Block>,
    /// How often each kind of operation was asked of each place.
    uses: HashMap<(u64, u64), u64>,
    injected: Injected,
}

type Block = Box<[u8]>;

/// How many faults of a kind that nobody was told of a disk has committed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Injected {
    /// Writes gone elsewhere.
    pub misdirected: u64,
    /// Flushes not done.
    pub lost_flushes: u64,
}

impl SimDisk {
    /// An empty disk.
    pub fn new(faults: Faults) -> Arc<Self> {
        Arc::new(Self { faults, state: Mutex::default() })
    }

    /// The power fails: of what was not flushed, each block is on the medium or is not. The disk may be used again.
    pub fn crash(&self) {
        let mut disk = self.lock();
        let cached = std::mem::take(&mut disk.cached);
        for (number, block) in cached {
            let choice = self.random(disk.use_of(5, number), 5, number);
            let old = disk.durable.entry(number).or_insert_with(zeros);
            match choice % 3 {
                0 => {}
                1 if self.faults.torn => {
                    let cut = (choice >> 8) as usize % BLOCK_BYTES / 512 * 512;
                    old[..cut].copy_from_slice(&block[..cut]);
                }
                _ => *old = block,
            }
        }
    }

    /// The faults that nobody was told of so far.
    pub fn injected(&self) -> Injected {
        self.lock().injected
    }

    fn lock(&self) -> MutexGuard<'_, Disk> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn flush(&self) {
        let mut disk = self.lock();
        if self.hits(&mut disk, self.faults.lost_flush_one_in, 4, 0) {
            disk.injected.lost_flushes += 1;
            return;
        }
        let cached = std::mem::take(&mut disk.cached);
        disk.durable.extend(cached);
    }

    /// Moves blocks, as a device would: all of them, some of them, or none with an error.
    fn carry_out(&self, operation: Operation, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        let mut disk = self.lock();
        let faults = &self.faults;
        let kind = if operation == Operation::Read { 0 } else { 1 };
        if self.hits(&mut disk, faults.again_one_in, 2, offset) {
            let errno = if self.random(0, 6, offset).is_multiple_of(2) { libc::EAGAIN } else { libc::EINTR };
            return Err(io::Error::from_raw_os_error(errno));
        }
        let one_in = if kind == 0 { faults.read_error_one_in } else { faults.write_error_one_in };
        if self.hits(&mut disk, one_in, kind, offset) {
            let full = kind == 1 && self.random(0, 7, offset).is_multiple_of(2);
            return Err(io::Error::from_raw_os_error(if full { libc::ENOSPC } else { libc::EIO }));
        }
        let mut bytes = buffer.len();
        if bytes > BLOCK_BYTES && self.hits(&mut disk, faults.short_one_in, 3, offset) {
            bytes = (1 + self.random(1, 3, offset) as usize % (bytes / BLOCK_BYTES - 1)) * BLOCK_BYTES;
        }
        let mut first = offset / BLOCK_BYTES as u64;
        if kind == 1 && self.hits(&mut disk, faults.misdirected_one_in, 8, offset) {
            disk.injected.misdirected += 1;
            first ^= 1 << (self.random(2, 8, offset) % 6);
        }
        for (number, block) in (first..).zip(buffer[..bytes].chunks_mut(BLOCK_BYTES)) {
            match operation {
                Operation::Read => match disk.cached.get(&number).or_else(|| disk.durable.get(&number)) {
                    Some(stored) => block.copy_from_slice(stored),
                    None => block.fill(0),
                },
                Operation::Write => {
                    disk.cached.insert(number, Box::from(&*block));
                }
            }
        }
        Ok(bytes)
    }

    fn hits(&self, disk: &mut Disk, one_in: u64, kind: u64, offset: u64) -> bool {
        one_in > 0 && self.random(disk.use_of(kind, offset), kind, offset).is_multiple_of(one_in)
    }

    /// A number that follows from the seed and these (splitmix64 over each in turn).
    fn random(&self, count: u64, kind: u64, offset: u64) -> u64 {
        [self.faults.seed, kind, offset, count].into_iter().fold(0x5EED, |hash, value| {
            let mut z = (hash ^ value).wrapping_add(0x9E37_79B9_7F4A_7C15);
            z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            z ^ (z >> 31)
        })
    }
}

impl Disk {
    fn use_of(&mut self, kind: u64, offset: u64) -> u64 {
        let count = self.uses.entry((kind, offset)).or_default();
        *count += 1;
        *count
    }
}

fn zeros() -> Block {
    vec![0; BLOCK_BYTES].into_boxed_slice()
}

/// An engine over a [`SimDisk`]: the scheduling of the real ones, seeded faults and reordering, for tests.
pub struct SimEngine {
    shared: Arc<Shared>,
    pump: Option<JoinHandle<()>>,
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
    /// Parts held back, the one that is due first on top.
    held: BinaryHeap<Reverse<(u64, u64, usize)>>,
    clock: u64,
    open: bool,
}

impl SimEngine {
    /// An engine whose requests are carried out by whoever submits more or calls [`SimEngine::drain`]: with one such
    /// thread a run repeats exactly.
    pub fn new(file: &Arc<VolumeFile>, disk: Arc<SimDisk>) -> Self {
        let state = State { schedule: Schedule::new(file), held: BinaryHeap::new(), clock: 0, open: true };
        let shared = Arc::new(Shared {
            disk,
            file: Arc::clone(file),
            counters: Counters::default(),
            state: Mutex::new(state),
            changed: Condvar::new(),
        });
        Self { shared, pump: None }
    }

    /// An engine with a thread that carries out what is held back.
    pub fn running(file: &Arc<VolumeFile>, disk: Arc<SimDisk>) -> Self {
        let mut engine = Self::new(file, disk);
        let shared = Arc::clone(&engine.shared);
        engine.pump = Some(std::thread::spawn(move || shared.pump()));
        engine
    }

    /// Completes every request held back.
    pub fn drain(&self) {
        while self.shared.complete_one(0) {}
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pump(&self) {
        loop {
            while self.complete_one(0) {}
            let state = self.lock();
            if !state.open && state.schedule.is_empty() {
                return;
            }
            if state.held.is_empty() && state.open {
                // Let some requests gather, so that there is something to reorder.
                drop(self.changed.wait(state).unwrap_or_else(PoisonError::into_inner));
                std::thread::sleep(Duration::from_micros(20));
            }
        }
    }

    /// Carries out the part that is due first, if more than `keep` are held back.
    fn complete_one(&self, keep: usize) -> bool {
        let mut state = self.lock();
        if state.held.len() <= keep {
            return false;
        }
        let Reverse((due, _, part)) = state.held.pop().expect("one is held");
        state.clock = state.clock.max(due);
        let transfer = state.schedule.transfer(part);
        // SAFETY: the range lies in the request's buffer, which the request owns until the part is complete.
        let buffer = unsafe { std::slice::from_raw_parts_mut(transfer.address, transfer.bytes) };
        let result = self.disk.carry_out(transfer.operation, transfer.offset, buffer);
        let ended = state.schedule.complete(part, result);
        self.hold_back(&mut state);
        drop(state);
        self.tell(ended);
        true
    }

    fn hold_back(&self, state: &mut State) {
        while let Some(part) = state.schedule.next() {
            let offset = state.schedule.transfer(part).offset;
            let order = state.held.len() as u64;
            let latency = self.disk.random(state.clock, 9, offset) % 1000;
            state.held.push(Reverse((state.clock + latency, order, part)));
            state.clock += 1;
        }
    }

    fn tell(&self, ended: Option<Ended>) {
        if let Some(ended) = ended {
            ended.tell(&self.file, &self.counters);
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
        let refused = {
            let mut state = shared.lock();
            let refused = state.schedule.accept(&shared.file, request, now);
            shared.hold_back(&mut state);
            refused
        };
        shared.tell(refused);
        shared.changed.notify_one();
        while shared.complete_one(shared.disk.faults.reorder) {}
    }

    fn flush(&self) -> Result<()> {
        self.shared.disk.flush();
        Ok(())
    }

    fn counters(&self) -> CountersSnapshot {
        self.shared.counters.snapshot()
    }

    fn needs_room(&self) -> bool {
        false
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
