use std::collections::HashMap;
use std::io;
use std::os::fd::RawFd;
use std::sync::{Mutex, PoisonError};

use crate::{Completion, Counters, CountersSnapshot, Engine, IoError, Operation, Request};

/// Faults that [`SimEngine`] injects, from a seed.
#[derive(Debug, Clone, Copy, Default)]
pub struct Faults {
    /// Seed of everything random.
    pub seed: u64,
    /// One read in so many fails with EIO; 0 for none.
    pub read_error_one_in: u64,
    /// One write in so many fails with ENOSPC; 0 for none.
    pub write_error_one_in: u64,
    /// Up to so many requests are held back and completed in a random order.
    pub reorder: usize,
}

/// An engine over memory with seeded faults and reordering, for tests. Requests held back are completed as
/// later ones arrive or by [`SimEngine::drain`].
pub struct SimEngine {
    faults: Faults,
    state: Mutex<State>,
    counters: Counters,
}

struct State {
    random: u64,
    blocks: HashMap<(RawFd, u64), Vec<u8>>,
    held: Vec<Request>,
}

impl SimEngine {
    /// An engine with `faults`.
    pub fn new(faults: Faults) -> Self {
        let state =
            State { random: faults.seed ^ 0x9E37_79B9_7F4A_7C15, blocks: HashMap::new(), held: Vec::new() };
        Self { faults, state: Mutex::new(state), counters: Counters::default() }
    }

    /// Completes every request held back.
    pub fn drain(&self) {
        while self.complete_one() {}
    }

    fn complete_one(&self) -> bool {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.held.is_empty() {
            return false;
        }
        let pick = state.next_random() as usize % state.held.len();
        let Request { operation, file, offset, buffer, on_complete } = state.held.swap_remove(pick);
        let (one_in, errno) = match operation {
            Operation::Read => (self.faults.read_error_one_in, libc::EIO),
            Operation::Write => (self.faults.write_error_one_in, libc::ENOSPC),
        };
        let result = if one_in > 0 && state.next_random().is_multiple_of(one_in) {
            let source = io::Error::from_raw_os_error(errno);
            Err(IoError::Transfer {
                operation,
                path: file.path().to_owned(),
                offset,
                bytes: buffer.bytes(),
                source,
            })
        } else {
            // SAFETY: the request owns its buffer while it is in flight.
            let bytes = unsafe { buffer.as_mut_slice() };
            for (index, block) in bytes.chunks_mut(crate::BLOCK_BYTES).enumerate() {
                let key = (file.fd(), offset / crate::BLOCK_BYTES as u64 + index as u64);
                match operation {
                    Operation::Read => match state.blocks.get(&key) {
                        Some(stored) => block.copy_from_slice(stored),
                        None => block.fill(0),
                    },
                    Operation::Write => {
                        state.blocks.insert(key, block.to_vec());
                    }
                }
            }
            self.counters.add(operation, buffer.bytes());
            Ok(())
        };
        drop(state);
        on_complete(Completion { buffer, result });
        true
    }
}

impl State {
    /// xorshift64*.
    fn next_random(&mut self) -> u64 {
        self.random ^= self.random >> 12;
        self.random ^= self.random << 25;
        self.random ^= self.random >> 27;
        self.random.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 16
    }
}

impl Engine for SimEngine {
    fn name(&self) -> &'static str {
        "sim"
    }

    fn submit(&self, request: Request) {
        let held = {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            state.held.push(request);
            state.held.len()
        };
        if held > self.faults.reorder {
            self.complete_one();
        }
    }

    fn counters(&self) -> CountersSnapshot {
        self.counters.snapshot()
    }
}
