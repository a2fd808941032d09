//! The code of a device's note over a simulated device that loses power: after every operation, with every sector
//! since the last flush written or lost. A note that was written is found, whole; one that was being written is found
//! whole or not at all; and one that was found once stays.

use std::cell::RefCell;
use std::io;

use super::{Medium, Notes};
use crate::block_device::blocks::Blocks;
use crate::{BLOCK_BYTES, Uuid};

const SECTOR_BYTES: usize = 512;
const AREA_BYTES: usize = 32 * BLOCK_BYTES;

/// A small generator of random numbers (xorshift64*).
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) as usize % limit.max(1)
    }
}

/// A device in memory.
#[derive(Clone)]
struct SimDevice(RefCell<State>);

#[derive(Clone)]
struct State {
    now: Vec<u8>,
    /// Content at the last flush.
    durable: Vec<u8>,
    /// How many operations are left before the power fails.
    left: usize,
}

impl SimDevice {
    fn of(bytes: Vec<u8>, left: usize) -> Self {
        Self(RefCell::new(State { now: bytes.clone(), durable: bytes, left }))
    }

    /// The device as another process finds it, which the killed one has left.
    fn killed(&self) -> Self {
        let state = self.0.borrow().clone();
        Self(RefCell::new(State { left: usize::MAX, ..state }))
    }

    /// Possible contents after the power failed.
    fn crashed(&self, random: &mut Random) -> Self {
        let state = self.0.borrow();
        let mut bytes = state.durable.clone();
        for (sector, now) in bytes.chunks_mut(SECTOR_BYTES).zip(state.now.chunks(SECTOR_BYTES)) {
            if random.below(2) == 0 {
                sector.copy_from_slice(now);
            }
        }
        Self::of(bytes, usize::MAX)
    }

    fn operate(&self) -> io::Result<()> {
        let mut state = self.0.borrow_mut();
        state.left = state.left.checked_sub(1).ok_or_else(|| io::Error::other("the power failed"))?;
        Ok(())
    }
}

impl Medium for SimDevice {
    fn read(&self, offset: u64, bytes: usize) -> io::Result<Blocks> {
        let mut blocks = Blocks::zeroed(bytes)?;
        let (at, length) = (offset as usize, blocks.bytes().len());
        blocks.bytes_mut().copy_from_slice(&self.0.borrow().now[at..at + length]);
        Ok(blocks)
    }

    fn write(&self, offset: u64, blocks: &Blocks) -> io::Result<()> {
        self.operate()?;
        let at = offset as usize;
        self.0.borrow_mut().now[at..at + blocks.bytes().len()].copy_from_slice(blocks.bytes());
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        self.operate()?;
        let mut state = self.0.borrow_mut();
        state.durable = state.now.clone();
        Ok(())
    }
}

/// A device, the note that has to be found on it, and the one that may be.
type Outcome = (SimDevice, Option<Vec<u8>>, Option<Option<Vec<u8>>>);

/// Writes and clears notes until the power fails.
fn run(notes: &Notes, random: &mut Random, operations: usize) -> Outcome {
    let device = SimDevice::of(vec![0; AREA_BYTES], operations);
    let mut last = None;
    for number in 0..8_u8 {
        let next = (random.below(5) > 0).then(|| vec![number + 1; random.below(30_000)]);
        let done = match &next {
            Some(note) => notes.write(&device, note),
            None => notes.clear(&device),
        };
        match done {
            Ok(()) => last = next,
            Err(_) => return (device, last, Some(next)),
        }
    }
    (device, last, None)
}

#[test]
fn a_note_survives_a_power_cut_after_every_operation() {
    let notes = Notes::at(Uuid::from_bytes(*b"a simulated disk"), 0, AREA_BYTES as u64);
    let seeds = std::env::var("MEMASCEND_SEEDS").map_or(12, |seeds| seeds.parse().unwrap());
    let mut cuts = 0;
    for seed in 1..=seeds {
        for operations in 0..17 {
            let mut random = Random(seed * 7919 + 1);
            let (device, last, unfinished) = run(&notes, &mut random, operations);
            let allowed = |found: &Option<Vec<u8>>| *found == last || unfinished.as_ref() == Some(found);
            for _ in 0..6 {
                for left in [device.killed(), device.crashed(&mut random)] {
                    let found = notes.find(&left).unwrap().note;
                    assert!(allowed(&found), "seed {seed}, {operations} operations: another note is found");
                    let again = left.crashed(&mut random);
                    let still = notes.find(&again).unwrap().note;
                    assert!(
                        still == found,
                        "seed {seed}, {operations} operations: a note that was found is lost"
                    );
                    notes.write(&again, b"after").unwrap();
                    assert_eq!(notes.find(&again).unwrap().note.as_deref(), Some(&b"after"[..]));
                    cuts += 1;
                }
            }
        }
    }
    println!("{cuts} crash states of {seeds} seeds");
    assert!(cuts > 1000, "{cuts} crash states are too few to show anything");
}
