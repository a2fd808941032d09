//! Which faults a simulated disk commits, and how often.

use std::str::FromStr;

#[cfg(doc)]
use crate::testing::SimDisk;

/// Faults of a [`SimDisk`]. Each `…_one_in` is how many operations there are to a fault, 0 for
/// none. Which operations are hit follows from the seed, the place and how often that place was
/// used, not from the time or from other threads.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Faults {
    /// Seed of everything random.
    pub seed: u64,
    /// Reads that fail with EIO, after some of the buffer was filled.
    pub read_error_one_in: u64,
    /// Writes that fail, with ENOSPC or with EIO, after which some of it may have been written.
    pub write_error_one_in: u64,
    /// Transfers of more than a block that move a block at least, but not all: up to any sector or
    /// byte.
    pub short_one_in: u64,
    /// Transfers that are refused with EAGAIN or EINTR, to be tried again.
    pub again_one_in: u64,
    /// Writes that go to another place and report success.
    pub misdirected_one_in: u64,
    /// Flushes that do nothing and report success.
    pub lost_flush_one_in: u64,
    /// Flushes that fail with EIO and forget unflushed writes, as Linux drops pages that it could not write:
    /// some are on the medium, others are not, and the next flush succeeds.
    pub flush_error_one_in: u64,
    /// Whether a crash may write only some sectors of a block. If not, blocks are written whole or
    /// not at all.
    pub torn: bool,
    /// How many parts of transfers are held back at most, to end in the order of their random
    /// latencies. Latencies are virtual: no thread waits for them.
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
                "flush_error_one_in" => faults.flush_error_one_in = number,
                "torn" => faults.torn = number != 0,
                "reorder" => faults.reorder = number as usize,
                other => return Err(format!("unknown fault {other:?}")),
            }
        }
        Ok(faults)
    }
}
