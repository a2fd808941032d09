//! A disk in memory that fails on purpose.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

use memascend_mem::LockExt;

use crate::engine::sim::power::gone;
use crate::engine::sim::{Faults, Power};
use crate::{BLOCK_BYTES, Geometry, Operation};

/// Bytes that the simulated medium writes atomically.
pub(super) const SECTOR_BYTES: usize = 512;
/// Larger requests are cut. Far smaller than a drive's, so that small tests have requests of many
/// parts.
pub(super) const PART_BYTES: usize = 32 << 10;

/// Where the slots for notes lie on a disk that has them: far behind all data.
pub(super) const NOTE_OFFSET: u64 = 1 << 40;

/// The medium behind simulated engines. Flushed data survives [`SimDisk::crash`]; other data may or
/// may not. Blocks that were never written read as zeros.
pub struct SimDisk {
    pub(super) faults: Faults,
    pub(super) power: Arc<Power>,
    pub(super) state: Mutex<Disk>,
}

#[derive(Default)]
pub(super) struct Disk {
    pub(super) durable: HashMap<u64, Block>,
    /// Blocks written since the last flush that was not lost.
    pub(super) cached: BTreeMap<u64, Block>,
    /// How often each die was cast for each place.
    pub(super) casts: HashMap<(Die, u64), u64>,
    pub(super) injected: Injected,
    pub(super) room_bytes: Option<u64>,
    pub(super) file: NoteFile,
}

/// A file that is replaced by renaming another one.
#[derive(Default)]
pub(super) struct NoteFile {
    pub(super) durable: Option<Vec<u8>>,
    /// A rename that was not flushed: to no file, or to a file with its bytes and whether they were
    /// flushed.
    pub(super) renamed: Option<Option<(Vec<u8>, bool)>>,
}

type Block = Box<[u8]>;

/// The random decisions, each independent of the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Die {
    ReadError,
    WriteError,
    Again,
    Short,
    Misdirected,
    LostFlush,
    Crash,
    Latency,
    FlushError,
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
    /// Flushes failed.
    pub flush_errors: u64,
}

impl SimDisk {
    /// An empty disk.
    pub fn new(faults: Faults) -> Arc<Self> {
        Self::with_power(faults, Power::new())
    }

    /// An empty disk that shares its power with others.
    pub fn with_power(faults: Faults, power: Arc<Power>) -> Arc<Self> {
        Arc::new(Self { faults, power, state: Mutex::default() })
    }

    /// Limits the disk's capacity to `bytes`, or removes the limit.
    pub fn set_room(&self, bytes: Option<u64>) {
        self.lock().room_bytes = bytes;
    }

    /// Changes a flushed byte, as a failing drive may. Returns false where nothing was ever
    /// written.
    pub fn flip(&self, place: u64, change: u8) -> bool {
        let mut disk = self.lock();
        let block = disk.durable.get_mut(&(place / BLOCK_BYTES as u64));
        block.map(|block| block[(place % BLOCK_BYTES as u64) as usize] ^= change).is_some()
    }

    /// Ends a power failure. Each block that was not flushed is on the medium or is not. The disk
    /// may be used again.
    pub fn crash(&self) {
        let mut disk = self.lock();
        self.forget(&mut disk);
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

    /// Settles unflushed blocks: each is on the medium or is lost.
    fn forget(&self, disk: &mut Disk) {
        let cached = std::mem::take(&mut disk.cached);
        for (number, block) in cached {
            let choice = self.cast(disk, Die::Crash, number);
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
    }

    /// The faults so far.
    pub fn injected(&self) -> Injected {
        self.lock().injected
    }

    /// The geometry that the seed chooses. The volume file's own geometry is not used: a run must
    /// not depend on the filesystem.
    pub(super) fn geometry(&self) -> Geometry {
        let block_bytes = if self.faults.seed.is_multiple_of(2) { SECTOR_BYTES } else { BLOCK_BYTES };
        Geometry { block_bytes, memory_bytes: block_bytes, part_bytes: PART_BYTES }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Disk> {
        self.state.locked()
    }

    pub(super) fn flush(&self) -> io::Result<()> {
        // An interrupted flush may have written any of the cached blocks: the crash decides which.
        if self.power.step()? {
            return Err(gone());
        }
        let mut disk = self.lock();
        self.fail_flush(&mut disk)?;
        if !self.loses_flush(&mut disk) {
            let cached = std::mem::take(&mut disk.cached);
            disk.durable.extend(cached);
        }
        Ok(())
    }

    /// Fails a flush if a fault says so, and forgets unflushed writes.
    pub(super) fn fail_flush(&self, disk: &mut Disk) -> io::Result<()> {
        if self.hits(disk, self.faults.flush_error_one_in, Die::FlushError, 0).is_none() {
            return Ok(());
        }
        disk.injected.flush_errors += 1;
        self.forget(disk);
        Err(io::Error::from_raw_os_error(libc::EIO))
    }

    pub(super) fn loses_flush(&self, disk: &mut Disk) -> bool {
        let lost = self.hits(disk, self.faults.lost_flush_one_in, Die::LostFlush, 0).is_some();
        disk.injected.lost_flushes += u64::from(lost);
        lost
    }

    /// Carries out a transfer as a device would: all bytes, some bytes, or none with an error.
    pub(super) fn carry_out(
        &self,
        operation: Operation,
        offset: u64,
        buffer: &mut [u8],
    ) -> io::Result<usize> {
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
        self.refuse(&mut disk, operation, offset, buffer)?;
        let faults = &self.faults;
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
            // So far away that no byte lands where it belongs.
            let distance = bytes.next_multiple_of(BLOCK_BYTES) as u64 * (1 + (draw >> 1) % 4);
            let below = offset.checked_sub(distance).filter(|_| draw.is_multiple_of(2));
            place = below.unwrap_or(offset + distance);
        }
        disk.transfer(operation, place, &mut buffer[..bytes]);
        Ok(bytes)
    }

    /// Fails a transfer if a fault says so. A failed transfer may have moved some sectors.
    fn refuse(
        &self,
        disk: &mut Disk,
        operation: Operation,
        offset: u64,
        buffer: &mut [u8],
    ) -> io::Result<()> {
        let faults = &self.faults;
        if let Some(draw) = self.hits(disk, faults.again_one_in, Die::Again, offset) {
            disk.injected.again += 1;
            let errno = if draw.is_multiple_of(2) { libc::EAGAIN } else { libc::EINTR };
            return Err(io::Error::from_raw_os_error(errno));
        }
        let (one_in, die) = match operation {
            Operation::Read => (faults.read_error_one_in, Die::ReadError),
            Operation::Write => (faults.write_error_one_in, Die::WriteError),
        };
        if let Some(draw) = self.hits(disk, one_in, die, offset) {
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
        Ok(())
    }

    /// A random number if a fault of rate `one_in` hits, else `None`.
    pub(super) fn hits(&self, disk: &mut Disk, one_in: u64, die: Die, place: u64) -> Option<u64> {
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
    pub(super) fn random(&self, count: u64, die: Die, place: u64) -> u64 {
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
                Operation::Write if bytes == BLOCK_BYTES => drop(self.cached.insert(number, (&*part).into())),
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

fn zeros() -> Block {
    vec![0; BLOCK_BYTES].into_boxed_slice()
}
