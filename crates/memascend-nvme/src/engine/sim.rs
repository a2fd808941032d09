use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap};
use std::io;
use std::str::FromStr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use memascend_mem::{LockExt, WaitExt};

use crate::block_device::node::Blocks;
use crate::block_device::notes::{Medium, Notes};
use crate::engine::schedule::{Ended, Schedule};
use crate::{
    BLOCK_BYTES, Counters, CountersSnapshot, Engine, FoundNote, Geometry, IoError, NoteKeeper, Operation,
    Request, Result, Uuid, VolumeFile,
};

/// What the simulated medium writes whole or not at all.
const SECTOR_BYTES: usize = 512;
/// Larger requests are cut. Far smaller than a drive's, so that small tests have requests of many parts.
const PART_BYTES: usize = 32 << 10;

/// Faults of a [`SimDisk`]. Each `…_one_in` is how many operations there are to a fault, 0 for none. Which operations are
/// hit follows from the seed, the place and how often that place was used, not from the time or from other threads.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Faults {
    /// Seed of everything random.
    pub seed: u64,
    /// Reads that fail with EIO, after some of the buffer was filled.
    pub read_error_one_in: u64,
    /// Writes that fail, with ENOSPC or with EIO, after which some of it may have been written.
    pub write_error_one_in: u64,
    /// Transfers of more than a block that move a block at least, but not all: up to any sector or byte.
    pub short_one_in: u64,
    /// Transfers that are refused with EAGAIN or EINTR, to be tried again.
    pub again_one_in: u64,
    /// Writes that go to another place, and say that all is well.
    pub misdirected_one_in: u64,
    /// Flushes that do nothing, and say that all is well.
    pub lost_flush_one_in: u64,
    /// Whether a crash cuts the writes it hits in the middle of a block, at a sector. Without, blocks are written whole or
    /// not at all.
    pub torn: bool,
    /// Up to so many parts of transfers are held back, to end in the order of their random latencies. Latencies are
    /// virtual: nobody waits for them.
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
    fn step(&self) -> io::Result<bool> {
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

fn gone() -> io::Error {
    io::Error::from_raw_os_error(libc::ENODEV)
}

/// The medium behind simulated engines: what was flushed survives [`SimDisk::crash`], what was not may or may not.
/// Blocks never written read as zeros.
pub struct SimDisk {
    faults: Faults,
    power: Arc<Power>,
    state: Mutex<Disk>,
}

#[derive(Default)]
struct Disk {
    durable: HashMap<u64, Block>,
    /// Blocks written since the last flush that did its work.
    cached: BTreeMap<u64, Block>,
    /// How often each die was cast for each place.
    casts: HashMap<(Die, u64), u64>,
    injected: Injected,
    room_bytes: Option<u64>,
    file: NoteFile,
}

/// A file that is replaced by renaming another one.
#[derive(Default)]
struct NoteFile {
    durable: Option<Vec<u8>>,
    /// What a directory says that was not flushed: no file, or one of which the bytes were flushed or not.
    renamed: Option<Option<(Vec<u8>, bool)>>,
}

type Block = Box<[u8]>;

/// What is decided at random, each independently of the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Die {
    ReadError,
    WriteError,
    Again,
    Short,
    Misdirected,
    LostFlush,
    Crash,
    Latency,
}

/// How many faults of each kind a disk has committed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Injected {
    /// Reads failed.
    pub read_errors: u64,
    /// Writes failed.
    pub write_errors: u64,
    /// Transfers that moved only partly.
    pub short: u64,
    /// Transfers to be tried again.
    pub again: u64,
    /// Writes gone elsewhere.
    pub misdirected: u64,
    /// Flushes not done.
    pub lost_flushes: u64,
}

impl SimDisk {
    /// An empty disk.
    pub fn new(faults: Faults) -> Arc<Self> {
        Self::with_power(faults, Power::new())
    }

    /// An empty disk that hangs on the same power as others.
    pub fn with_power(faults: Faults, power: Arc<Power>) -> Arc<Self> {
        Arc::new(Self { faults, power, state: Mutex::default() })
    }

    /// The disk holds that much data from now on, or whatever it is given.
    pub fn set_room(&self, bytes: Option<u64>) {
        self.lock().room_bytes = bytes;
    }

    /// Changes a byte of what was flushed, as a drive may that forgets; false where nothing was ever written.
    pub fn flip(&self, place: u64, change: u8) -> bool {
        let mut disk = self.lock();
        let block = disk.durable.get_mut(&(place / BLOCK_BYTES as u64));
        block.map(|block| block[(place % BLOCK_BYTES as u64) as usize] ^= change).is_some()
    }

    /// The power fails: of what was not flushed, each block is on the medium or is not. The disk may be used again.
    pub fn crash(&self) {
        let mut disk = self.lock();
        let cached = std::mem::take(&mut disk.cached);
        for (number, block) in cached {
            let choice = self.cast(&mut disk, Die::Crash, number);
            let old = disk.durable.entry(number).or_insert_with(zeros);
            match choice % 3 {
                0 => {}
                1 if self.faults.torn => {
                    let sectors = old.chunks_mut(SECTOR_BYTES).zip(block.chunks(SECTOR_BYTES));
                    for (index, (old, new)) in sectors.enumerate() {
                        if choice >> (8 + index) & 1 == 1 {
                            old.copy_from_slice(new);
                        }
                    }
                }
                _ => *old = block,
            }
        }
        let Some(renamed) = disk.file.renamed.take() else { return };
        let choice = self.cast(&mut disk, Die::Crash, NOTE_OFFSET);
        if choice.is_multiple_of(2) {
            return;
        }
        disk.file.durable = renamed.map(|(mut bytes, flushed)| {
            if !flushed {
                for (index, sector) in bytes.chunks_mut(SECTOR_BYTES).enumerate() {
                    if choice >> (1 + index % 60) & 1 == 1 {
                        sector.fill(0);
                    }
                }
            }
            bytes
        });
    }

    /// The faults so far.
    pub fn injected(&self) -> Injected {
        self.lock().injected
    }

    /// What a drive of this seed asks for. Not the volume file's: what happens must not depend on where the file lies.
    fn geometry(&self) -> Geometry {
        let block_bytes = if self.faults.seed.is_multiple_of(2) { SECTOR_BYTES } else { BLOCK_BYTES };
        Geometry { block_bytes, memory_bytes: block_bytes, part_bytes: PART_BYTES }
    }

    fn lock(&self) -> MutexGuard<'_, Disk> {
        self.state.locked()
    }

    fn flush(&self) -> io::Result<()> {
        // Cut short, it may have flushed anything: what the crash leaves of the cache is that.
        if self.power.step()? {
            return Err(gone());
        }
        let mut disk = self.lock();
        if !self.loses_flush(&mut disk) {
            let cached = std::mem::take(&mut disk.cached);
            disk.durable.extend(cached);
        }
        Ok(())
    }

    fn loses_flush(&self, disk: &mut Disk) -> bool {
        let lost = self.hits(disk, self.faults.lost_flush_one_in, Die::LostFlush, 0).is_some();
        disk.injected.lost_flushes += u64::from(lost);
        lost
    }

    /// Moves bytes, as a device would: all of them, some of them, or none with an error.
    fn carry_out(&self, operation: Operation, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        if !(offset | buffer.len() as u64).is_multiple_of(self.geometry().block_bytes as u64) {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        let cut = self.power.step()?;
        let mut disk = self.lock();
        if cut {
            if operation == Operation::Write {
                disk.transfer(operation, offset, buffer);
            }
            return Err(gone());
        }
        let faults = &self.faults;
        if let Some(draw) = self.hits(&mut disk, faults.again_one_in, Die::Again, offset) {
            disk.injected.again += 1;
            let errno = if draw.is_multiple_of(2) { libc::EAGAIN } else { libc::EINTR };
            return Err(io::Error::from_raw_os_error(errno));
        }
        let (one_in, die) = match operation {
            Operation::Read => (faults.read_error_one_in, Die::ReadError),
            Operation::Write => (faults.write_error_one_in, Die::WriteError),
        };
        if let Some(draw) = self.hits(&mut disk, one_in, die, offset) {
            let full = operation == Operation::Write && draw.is_multiple_of(2);
            match operation {
                Operation::Read => disk.injected.read_errors += 1,
                Operation::Write => disk.injected.write_errors += 1,
            }
            if !full {
                let sectors = (draw >> 1) as usize % (buffer.len() / SECTOR_BYTES + 1);
                disk.transfer(operation, offset, &mut buffer[..sectors * SECTOR_BYTES]);
            }
            return Err(io::Error::from_raw_os_error(if full { libc::ENOSPC } else { libc::EIO }));
        }
        let mut bytes = buffer.len();
        if bytes > BLOCK_BYTES
            && let Some(draw) = self.hits(&mut disk, faults.short_one_in, Die::Short, offset)
        {
            disk.injected.short += 1;
            bytes = BLOCK_BYTES + (draw >> 1) as usize % (bytes - BLOCK_BYTES);
            if draw.is_multiple_of(2) {
                bytes -= bytes % SECTOR_BYTES;
            }
        }
        let mut place = offset;
        if operation == Operation::Write
            && let Some(draw) = self.hits(&mut disk, faults.misdirected_one_in, Die::Misdirected, offset)
        {
            disk.injected.misdirected += 1;
            // Far enough that nothing of it lands where it belongs.
            let distance = bytes.next_multiple_of(BLOCK_BYTES) as u64 * (1 + (draw >> 1) % 4);
            let below = offset.checked_sub(distance).filter(|_| draw.is_multiple_of(2));
            place = below.unwrap_or(offset + distance);
        }
        disk.transfer(operation, place, &mut buffer[..bytes]);
        Ok(bytes)
    }

    /// Casts a die: some number if a fault of `one_in` hits, else none.
    fn hits(&self, disk: &mut Disk, one_in: u64, die: Die, place: u64) -> Option<u64> {
        if one_in == 0 {
            return None;
        }
        let draw = self.cast(disk, die, place);
        draw.is_multiple_of(one_in).then_some(draw / one_in)
    }

    fn cast(&self, disk: &mut Disk, die: Die, place: u64) -> u64 {
        let count = disk.casts.entry((die, place)).or_default();
        *count += 1;
        self.random(*count, die, place)
    }

    /// A number that follows from the seed and these (splitmix64 over each in turn).
    fn random(&self, count: u64, die: Die, place: u64) -> u64 {
        [self.faults.seed, die as u64, place, count].into_iter().fold(0x5EED, |hash, value| {
            let mut z = (hash ^ value).wrapping_add(0x9E37_79B9_7F4A_7C15);
            z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            z ^ (z >> 31)
        })
    }
}

impl Disk {
    /// Moves bytes between a buffer and wherever in the disk's blocks it lies, without faults.
    fn transfer(&mut self, operation: Operation, mut place: u64, mut buffer: &mut [u8]) {
        while !buffer.is_empty() {
            let (number, inside) = (place / BLOCK_BYTES as u64, (place % BLOCK_BYTES as u64) as usize);
            let bytes = buffer.len().min(BLOCK_BYTES - inside);
            let (part, rest) = buffer.split_at_mut(bytes);
            match operation {
                Operation::Read => match self.cached.get(&number).or_else(|| self.durable.get(&number)) {
                    Some(stored) => part.copy_from_slice(&stored[inside..inside + bytes]),
                    None => part.fill(0),
                },
                Operation::Write => {
                    let old = || self.durable.get(&number).cloned().unwrap_or_else(zeros);
                    self.cached.entry(number).or_insert_with(old)[inside..inside + bytes]
                        .copy_from_slice(part);
                }
            }
            place += bytes as u64;
            buffer = rest;
        }
    }
}

/// Where the slots for notes lie on a disk that has them: far behind all data.
const NOTE_OFFSET: u64 = 1 << 40;
const NOTE_BYTES: u64 = 1 << 20;

/// The disk as a note sees it: transfers that are whole or fail.
impl Medium for SimDisk {
    fn read(&self, offset: u64, bytes: usize) -> io::Result<Blocks> {
        let mut blocks = Blocks::zeroed(bytes);
        self.carry_out_whole(Operation::Read, offset, blocks.bytes_mut())?;
        Ok(blocks)
    }

    fn write(&self, offset: u64, blocks: &Blocks) -> io::Result<()> {
        self.carry_out_whole(Operation::Write, offset, &mut blocks.bytes().to_vec())
    }

    fn sync(&self) -> io::Result<()> {
        self.flush()
    }
}

impl SimDisk {
    fn carry_out_whole(&self, operation: Operation, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let mut done = 0;
        while done < buffer.len() {
            let end = buffer.len().min(done + PART_BYTES);
            match self.carry_out(operation, offset + done as u64, &mut buffer[done..end]) {
                // As the schedule does: what ends inside a block is done again from there.
                Ok(bytes) => done += bytes / self.geometry().block_bytes * self.geometry().block_bytes,
                Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EINTR)) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Puts a file in the place of the note's: it is written and flushed, then renamed, then the directory is flushed.
    fn replace_file(&self, note: Option<&[u8]>) -> io::Result<()> {
        let mut flushed = false;
        if note.is_some() {
            let cut = self.power.step()?;
            let mut disk = self.lock();
            let draw = self.hits(&mut disk, self.faults.write_error_one_in, Die::WriteError, NOTE_OFFSET);
            if draw.is_some() && !cut {
                disk.injected.write_errors += 1;
                return Err(io::Error::from_raw_os_error(libc::ENOSPC));
            }
            flushed = !self.loses_flush(&mut disk);
            drop(disk);
            // Nobody has seen the file yet.
            if cut || self.power.step()? {
                return Err(gone());
            }
        }
        let cut = self.power.step()?;
        self.lock().file.renamed = Some(note.map(|note| (note.to_vec(), flushed)));
        if cut { Err(gone()) } else { self.flush_directory() }
    }

    fn flush_directory(&self) -> io::Result<()> {
        if self.power.step()? {
            return Err(gone());
        }
        let mut disk = self.lock();
        // A name that is on the medium before the bytes are: a crash shows it.
        let unflushed = matches!(disk.file.renamed, Some(Some((_, false))));
        if !self.loses_flush(&mut disk)
            && !unflushed
            && let Some(renamed) = disk.file.renamed.take()
        {
            disk.file.durable = renamed.map(|(bytes, _)| bytes);
        }
        Ok(())
    }
}

/// A note on a simulated disk: in two slots, as that of a device, or in a file that is replaced.
struct SimNotes {
    disk: Arc<SimDisk>,
    slots: Option<Notes>,
    file: Arc<VolumeFile>,
}

impl SimNotes {
    fn failed<T>(&self, action: &'static str, result: io::Result<T>) -> Result<T> {
        result.map_err(|source| IoError::File { action, path: self.file.path().to_owned(), source })
    }
}

impl NoteKeeper for SimNotes {
    fn find_note(&self) -> Result<FoundNote> {
        let found = match &self.slots {
            Some(notes) => notes.find(&*self.disk).and_then(|found| self.disk.flush().map(|()| found)),
            None => self.disk.flush_directory().map(|()| {
                let disk = self.disk.lock();
                let note = match &disk.file.renamed {
                    Some(renamed) => renamed.as_ref().map(|(bytes, _)| bytes.clone()),
                    None => disk.file.durable.clone(),
                };
                FoundNote { note, damaged: false }
            }),
        };
        self.failed("read the note of", found)
    }

    fn write_note(&self, note: &[u8]) -> Result<()> {
        let written = match &self.slots {
            Some(notes) => notes.write(&*self.disk, note),
            None => self.disk.replace_file(Some(note)),
        };
        self.failed("write the note of", written)
    }

    fn clear_note(&self) -> Result<()> {
        let cleared = match &self.slots {
            Some(notes) => notes.clear(&*self.disk),
            None => self.disk.replace_file(None),
        };
        self.failed("clear the note of", cleared)
    }
}

/// Where the notes of a simulated volume lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SimNotePlace {
    /// In two slots on the simulated disk.
    Slots,
    /// In a file on the simulated disk, which is replaced by renaming.
    File,
}

fn zeros() -> Block {
    vec![0; BLOCK_BYTES].into_boxed_slice()
}

/// An engine over a [`SimDisk`]: the scheduling of the real ones, seeded faults and reordering, for tests.
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
    /// Parts held back, by when they are due and in the order in which they were taken; the first on top.
    held: BinaryHeap<Reverse<(u64, u64, usize)>>,
    /// Virtual time: when the last part was due.
    clock: u64,
    /// How many parts were ever held back.
    taken: u64,
    open: bool,
}

impl SimEngine {
    /// An engine whose requests are carried out by whoever submits more or calls [`SimEngine::drain`]: with one such
    /// thread a run repeats exactly.
    pub fn new(file: &Arc<VolumeFile>, disk: Arc<SimDisk>) -> Self {
        let schedule = Schedule::with(disk.geometry());
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

    /// An engine with a thread that carries everything out and calls back, as those of real engines do.
    pub fn running(file: &Arc<VolumeFile>, disk: Arc<SimDisk>) -> Self {
        let mut engine = Self::new(file, disk);
        let shared = Arc::clone(&engine.shared);
        engine.pump = Some(std::thread::spawn(move || shared.pump()));
        engine
    }

    /// The notes of its volume are on the simulated disk too, and share its fate.
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
        // SAFETY: the range lies in the request's buffer, which the request owns until the part is complete.
        let buffer = unsafe { std::slice::from_raw_parts_mut(transfer.address, transfer.bytes) };
        let result = self.disk.carry_out(transfer.operation, transfer.offset, buffer);
        let ended = state.schedule.complete(part, result);
        drop(state);
        self.tell(ended);
        true
    }

    /// Takes as many parts as the disk works on at once; the others wait in the schedule, as they do before a drive's queue.
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
        let refused = shared.lock().schedule.accept(&shared.file, request, now);
        shared.tell(refused);
        if self.pump.is_some() {
            shared.changed.notify_one();
        } else {
            while shared.complete_one(shared.disk.faults.reorder) {}
        }
    }

    fn flush(&self) -> Result<()> {
        let path = || self.shared.file.path().to_owned();
        self.shared.disk.flush().map_err(|source| IoError::File { action: "sync", path: path(), source })
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
        let place = self.notes?;
        let id = Uuid::from_bytes(*b"a simulated disk");
        let slots = (place == SimNotePlace::Slots).then(|| Notes::at(id, NOTE_OFFSET, NOTE_BYTES));
        Some(Arc::new(SimNotes {
            disk: Arc::clone(&self.shared.disk),
            slots,
            file: Arc::clone(&self.shared.file),
        }))
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

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::Volume;
    use memascend_mem::{LeaseSlice, PageableAllocator, Pool, SizeClass};

    const BLOCKS: usize = 4;

    fn disk(faults: &str) -> Arc<SimDisk> {
        SimDisk::new(faults.parse().unwrap())
    }

    fn write(disk: &SimDisk, place: usize, byte: u8, bytes: usize) -> io::Result<usize> {
        disk.carry_out(Operation::Write, place as u64, &mut vec![byte; bytes])
    }

    fn read(disk: &SimDisk, place: usize, bytes: usize) -> Vec<u8> {
        let mut buffer = vec![0xEE; bytes];
        assert_eq!(disk.carry_out(Operation::Read, place as u64, &mut buffer).unwrap(), bytes);
        buffer
    }

    /// The number of a request, its errno and what its buffer held afterwards.
    type End = (usize, Option<i32>, Vec<u8>);

    /// Everything that a caller sees of a run, in order.
    fn trace(faults: Faults) -> (Vec<End>, Injected) {
        let directory = tempfile::tempdir().unwrap();
        let volume = Volume::create(directory.path(), true).unwrap();
        let disk = SimDisk::new(faults);
        let engine = SimEngine::new(volume.file(), Arc::clone(&disk));
        let bytes = 3 * PART_BYTES;
        let class = SizeClass { consumer: "test".into(), bytes, count: 40 };
        let pool = Pool::new(&PageableAllocator, &[class]).unwrap();
        let (sender, receiver) = mpsc::channel();
        for index in 0..120 {
            let length = [BLOCK_BYTES, bytes, 5 * BLOCK_BYTES][index % 3];
            let buffer = LeaseSlice::new(Arc::new(pool.try_lease(bytes).unwrap().unwrap()), 0, length);
            // SAFETY: the only handle to the buffer.
            unsafe { buffer.as_mut_slice() }.fill(index as u8);
            let sender = sender.clone();
            engine.submit(Request {
                operation: if index % 2 == 0 { Operation::Write } else { Operation::Read },
                offset: (index / 2 * 7 % 40 * bytes) as u64,
                buffer,
                on_complete: Box::new(move |completion| {
                    let errno = completion.result.err().map(|error| error.errno().unwrap());
                    // SAFETY: the transfer has ended.
                    let bytes = unsafe { completion.buffer.as_slice() }.to_vec();
                    sender.send((index, errno, bytes)).unwrap();
                }),
            });
            if index % 30 == 29 {
                engine.drain();
                engine.flush().unwrap();
                disk.crash();
            }
        }
        drop(engine);
        drop(sender);
        assert_eq!(pool.counters().live_bytes, 0);
        (receiver.iter().collect(), disk.injected())
    }

    #[test]
    fn a_seed_repeats_and_another_differs() {
        let faults = Faults {
            seed: 4,
            read_error_one_in: 20,
            write_error_one_in: 20,
            short_one_in: 3,
            again_one_in: 4,
            misdirected_one_in: 9,
            lost_flush_one_in: 2,
            torn: true,
            reorder: 6,
        };
        let first = trace(faults);
        assert_eq!(first.0.len(), 120);
        let Injected { read_errors, write_errors, short, again, misdirected, lost_flushes } = first.1;
        assert!([read_errors, write_errors, short, again, misdirected, lost_flushes].iter().all(|n| *n > 0));
        assert!(first == trace(faults), "seed 4 repeats");
        assert!(first != trace(Faults { seed: 5, ..faults }), "seed 5 is another");
    }

    #[test]
    fn requests_overtake_one_another_only_where_that_was_asked_for() {
        for reorder in [0, 1, 8] {
            let (ended, _) = trace(Faults { seed: 3, reorder, ..Faults::default() });
            let order: Vec<usize> = ended.iter().map(|(index, ..)| *index).collect();
            let overtaken = order.windows(2).filter(|pair| pair[0] > pair[1]).count();
            match reorder {
                0 => assert_eq!(overtaken, 0),
                1 => assert!(overtaken > 5, "{overtaken}"),
                _ => assert!(overtaken > 30, "{overtaken}"),
            }
            // Held back, not lost: nothing is overtaken by more than there may be, with what waits behind them.
            assert!(order.iter().enumerate().all(|(at, index)| at.abs_diff(*index) <= 30), "{order:?}");
        }
    }

    #[test]
    fn each_fault_hits_at_its_rate_and_only_when_asked_for() {
        let counts = |faults: Faults| {
            let disk = SimDisk::new(faults);
            let mut told = [0_u64; 4];
            for index in 0..4000 {
                let (place, bytes) = (index * BLOCKS * BLOCK_BYTES, BLOCKS * BLOCK_BYTES);
                let operations = [Operation::Write, Operation::Read];
                for (operation, errors) in operations.into_iter().zip(0..) {
                    match disk.carry_out(operation, place as u64, &mut vec![1; bytes]) {
                        Ok(moved) if moved == bytes => {}
                        Ok(moved) => {
                            assert!((BLOCK_BYTES..bytes).contains(&moved), "{moved}");
                            told[2] += 1;
                        }
                        Err(error) => match error.raw_os_error().unwrap() {
                            libc::EAGAIN | libc::EINTR => told[3] += 1,
                            libc::EIO => told[errors] += 1,
                            libc::ENOSPC if operation == Operation::Write => told[errors] += 1,
                            other => panic!("{operation} gave {other}"),
                        },
                    }
                }
                disk.flush().unwrap();
            }
            let found = disk.injected();
            assert_eq!(told, [found.write_errors, found.read_errors, found.short, found.again]);
            [
                found.read_errors,
                found.write_errors,
                found.short,
                found.again,
                found.misdirected,
                found.lost_flushes,
            ]
        };
        assert_eq!(counts(Faults { seed: 1, torn: true, reorder: 9, ..Faults::default() }), [0; 6]);
        let names = [
            "read_error_one_in",
            "write_error_one_in",
            "short_one_in",
            "again_one_in",
            "misdirected_one_in",
            "lost_flush_one_in",
        ];
        for (kind, name) in names.iter().enumerate() {
            for seed in [1, 2] {
                let found = counts(format!("seed={seed}, {name}=10").parse().unwrap());
                // Reads and writes may both be short, or have to be tried again.
                let expected = if kind == 2 || kind == 3 { 800 } else { 400 };
                assert!(found[kind].abs_diff(expected) < 120, "{name}: {found:?}");
                assert!(
                    found.iter().enumerate().all(|(other, n)| other == kind || *n == 0),
                    "{name}: {found:?}"
                );
            }
            let found = counts(format!("{name}=1").parse().unwrap());
            assert_eq!(found[kind], if kind == 2 || kind == 3 { 8000 } else { 4000 }, "{name}");
        }
    }

    #[test]
    fn a_failed_write_leaves_some_of_it_and_a_failed_read_fills_some_of_the_buffer() {
        let disk = disk("seed=3,write_error_one_in=2,read_error_one_in=2");
        let bytes = BLOCKS * BLOCK_BYTES;
        let (mut partly, mut none, mut filled) = (0, 0, 0);
        for index in 0..200 {
            if write(&disk, index * bytes, 7, bytes).is_ok() {
                continue;
            }
            let mut buffer = vec![0xEE; bytes];
            let failed = disk.carry_out(Operation::Read, (index * bytes) as u64, &mut buffer).is_err();
            let count = buffer.iter().filter(|byte| **byte == 7).count();
            match (failed, count) {
                (true, _) => filled += usize::from(buffer[0] != 0xEE && buffer[bytes - 1] == 0xEE),
                (false, 0) => none += 1,
                (false, _) => partly += usize::from(count < bytes),
            }
        }
        assert!(partly > 10 && none > 10 && filled > 10, "{partly}, {none}, {filled}");
    }

    #[test]
    fn a_crash_keeps_what_was_flushed_and_of_the_rest_each_block_old_or_new() {
        for torn in [0, 1] {
            let disk = disk(&format!("seed=5,torn={torn}"));
            let blocks = 300;
            write(&disk, 0, 1, blocks * BLOCK_BYTES).unwrap();
            disk.flush().unwrap();
            write(&disk, 100 * BLOCK_BYTES, 2, 200 * BLOCK_BYTES).unwrap();
            assert!(read(&disk, 100 * BLOCK_BYTES, BLOCK_BYTES) == [2; BLOCK_BYTES], "seen before the crash");
            disk.crash();
            let after = read(&disk, 0, blocks * BLOCK_BYTES);
            assert!(after[..100 * BLOCK_BYTES].iter().all(|byte| *byte == 1), "flushed is flushed");
            let (mut old, mut new, mut mixed) = (0, 0, 0);
            for block in after[100 * BLOCK_BYTES..].chunks(BLOCK_BYTES) {
                for sector in block.chunks(SECTOR_BYTES) {
                    assert!(sector == [1; SECTOR_BYTES] || sector == [2; SECTOR_BYTES]);
                }
                match block.iter().filter(|byte| **byte == 2).count() {
                    0 => old += 1,
                    BLOCK_BYTES => new += 1,
                    _ => mixed += 1,
                }
            }
            assert!(old > 40 && new > 40, "{old} old, {new} new");
            assert_eq!(mixed > 40, torn == 1, "{mixed} torn");
            disk.crash();
            assert!(after == read(&disk, 0, blocks * BLOCK_BYTES), "what survived a crash stays");
        }
    }

    #[test]
    fn a_lost_flush_says_all_is_well_and_a_crash_then_takes_data() {
        let disk = disk("seed=5,lost_flush_one_in=1");
        write(&disk, 0, 1, 100 * BLOCK_BYTES).unwrap();
        disk.flush().unwrap();
        assert_eq!(disk.injected(), Injected { lost_flushes: 1, ..Injected::default() });
        disk.crash();
        let after = read(&disk, 0, 100 * BLOCK_BYTES);
        let lost = after.iter().filter(|byte| **byte == 0).count();
        assert!(lost > 10 * BLOCK_BYTES && lost < 90 * BLOCK_BYTES, "{lost} bytes lost");
    }

    #[test]
    fn a_misdirected_write_changes_another_place_and_not_its_own() {
        let disk = disk("seed=5,misdirected_one_in=1");
        let (place, bytes) = (1000 * BLOCK_BYTES, BLOCKS * BLOCK_BYTES);
        let (mut above, mut below) = (0, 0);
        for round in 0..50 {
            assert_eq!(write(&disk, place, 1 + round, bytes).unwrap(), bytes);
            assert!(read(&disk, place, bytes).iter().all(|byte| *byte == 0));
            let around = read(&disk, place - 8 * bytes, 16 * bytes);
            let at = around.iter().position(|byte| *byte == 1 + round).expect("it went somewhere");
            assert_eq!(around.iter().filter(|byte| **byte == 1 + round).count(), bytes);
            if at < 8 * bytes {
                below += 1
            } else {
                above += 1
            }
            assert_eq!(
                disk.injected(),
                Injected { misdirected: u64::from(round) + 1, ..Injected::default() }
            );
        }
        assert!(above > 10 && below > 10, "{above} above, {below} below");
    }

    #[test]
    fn what_is_not_in_whole_blocks_of_the_drive_is_refused() {
        for (seed, block) in [(2, SECTOR_BYTES), (3, BLOCK_BYTES)] {
            let disk = disk(&format!("seed={seed}"));
            assert_eq!(write(&disk, block, 1, block).unwrap(), block);
            for (place, bytes) in [(block / 2, block), (block, block / 2)] {
                assert_eq!(write(&disk, place, 2, bytes).unwrap_err().raw_os_error(), Some(libc::EINVAL));
            }
            assert!(read(&disk, block, block).iter().all(|byte| *byte == 1));
        }
    }

    #[test]
    fn faults_are_read_from_text() {
        let text = "seed=7, read_error_one_in=1,write_error_one_in=2,short_one_in=3,again_one_in=4,\
                    misdirected_one_in=5,lost_flush_one_in=6,torn=1,reorder=9";
        let expected = Faults {
            seed: 7,
            read_error_one_in: 1,
            write_error_one_in: 2,
            short_one_in: 3,
            again_one_in: 4,
            misdirected_one_in: 5,
            lost_flush_one_in: 6,
            torn: true,
            reorder: 9,
        };
        assert_eq!(text.parse(), Ok(expected));
        assert_eq!(" ".parse(), Ok(Faults::default()));
        assert_eq!("torn=0,".parse(), Ok(Faults::default()));
        for (text, complaint) in [
            ("torn", "name=number"),
            ("seed=x", "not a number"),
            ("seed=-1", "not a number"),
            ("a=1", "unknown"),
        ] {
            let error = text.parse::<Faults>().unwrap_err();
            assert!(error.contains(complaint), "{error}");
        }
    }
}
