//! The block behind pools that were carved together, and which of its buffers are free.
//!
//! The hot path of a pool makes no system call: one lock serves all pools of an arena, and a handler counts
//! forks (`fork.rs`), because asking for the process's number took most of the time of a lease.
//!
//! A device does not call when it is done with a buffer, so requests poll the fences of returned buffers. A
//! buffer whose fence cannot tell is never used again, and an arena is not freed while a fence holds a part
//! of it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::pool::counters::PoolCounters;
use crate::pool::outside::Counted;
use crate::pool::resize::ResizeListeners;
use crate::sync::{Condvar, LockExt, Mutex, MutexGuard};
use crate::{HostBlock, Origin, Result};

/// How long the last owner of an arena waits for devices that still use its buffers, before the
/// memory is leaked.
const FENCE_PATIENCE: Duration = Duration::from_secs(60);
/// How often a waiting request polls the fences of returned buffers: a device that is done sends no
/// notification.
pub(super) const FENCE_POLL: Duration = Duration::from_micros(50);

/// Work that uses a buffer after the lease was dropped, for example a copy by a device. The buffer
/// returns to its pool when the work is done.
pub trait Fence: Send + Sync {
    /// Whether the work has ended. Must not block.
    ///
    /// # Errors
    /// If the state of the work is unknown. The buffer then never returns, because a device may
    /// still be using it.
    fn is_done(&self) -> Result<bool>;
}

/// The block behind all pools that were carved together, and their state behind one lock. Critical
/// sections are short, and one lock makes the joint peak of all pools exact.
pub(super) struct Arena {
    pub(super) block: HostBlock,
    pub(super) allocator: &'static str,
    pub(super) origin: Origin,
    pub(super) state: Mutex<State>,
    pub(super) returned: Condvar,
    /// Taken, before `state`, by whatever changes which buffers are memory.
    pub(super) resizing: Mutex<ResizeListeners>,
    /// Notified when a buffer that is to be given back was returned.
    pub(super) leaving: Condvar,
    /// Counts the memory where no plan does.
    pub(super) _counted: Option<Counted>,
}

#[derive(Default)]
pub(super) struct State {
    /// Every pool's classes, one pool after another, by ascending size within each.
    pub(super) classes: Vec<Class>,
    pub(super) counters: Vec<PoolCounters>,
    pub(super) live_bytes: usize,
    pub(super) live_bytes_max: usize,
    /// Requests waiting for a return. While there are none, a return notifies no thread.
    pub(super) waiting: usize,
    /// Whether a thread is giving returned buffers back to the system.
    pub(super) draining: bool,
}

#[derive(Default)]
pub(super) struct Class {
    /// Where the first buffer begins in the arena; the others lie behind it.
    pub(super) start: usize,
    pub(super) bytes: usize,
    /// How many buffers there are to be; `surplus` more are in use.
    pub(super) count: usize,
    pub(super) count_max: usize,
    /// Whether the number may change.
    pub(super) elastic: bool,
    /// Index of the pool that the class belongs to.
    pub(super) pool: usize,
    pub(super) live_bytes: usize,
    /// The class's live bytes when the sum over all classes was highest.
    pub(super) live_bytes_at_peak: usize,
    /// Offsets into the arena of the buffers not leased, used as a stack so that warm memory is
    /// reused.
    pub(super) free: Vec<usize>,
    /// Buffers dropped before their fences were done, oldest first.
    pub(super) fenced: VecDeque<(usize, Fences)>,
    /// Buffers in use that are too many: so many of those that return next are given back.
    pub(super) surplus: usize,
    /// Buffers that have returned and are to be given back.
    pub(super) leaving: Vec<usize>,
    /// Buffers that are only addresses.
    pub(super) absent: Vec<usize>,
}

pub(super) type Fences = Vec<Arc<dyn Fence>>;

impl Class {
    /// Takes back a buffer that nothing uses any more.
    pub(super) fn put_back(&mut self, offset: usize) {
        if self.surplus == 0 {
            self.free.push(offset);
        } else {
            self.surplus -= 1;
            self.leaving.push(offset);
        }
    }
}

impl State {
    pub(super) fn note_lease(&mut self, class: usize, bytes: usize) {
        let class = &mut self.classes[class];
        class.live_bytes += bytes;
        let counters = &mut self.counters[class.pool];
        counters.leased_bytes += class.bytes;
        counters.live_bytes += bytes;
        counters.live_bytes_max = counters.live_bytes_max.max(counters.live_bytes);
        self.live_bytes += bytes;
        if self.live_bytes > self.live_bytes_max {
            self.live_bytes_max = self.live_bytes;
            for class in &mut self.classes {
                class.live_bytes_at_peak = class.live_bytes;
            }
        }
    }

    pub(super) fn note_return(&mut self, class: usize, bytes: usize) {
        let class = &mut self.classes[class];
        class.live_bytes -= bytes;
        let counters = &mut self.counters[class.pool];
        counters.leased_bytes -= class.bytes;
        counters.live_bytes -= bytes;
        self.live_bytes -= bytes;
    }

    /// Frees the dropped buffers of a class whose fences are done.
    ///
    /// # Errors
    /// The error of a fence whose state is unknown, unless another buffer became free.
    pub(super) fn settle(&mut self, class: usize) -> Result<()> {
        let class = &mut self.classes[class];
        let (mut settled, mut outcome) = (0, Ok(()));
        for _ in 0..class.fenced.len() {
            let Some((offset, mut fences)) = class.fenced.pop_front() else { break };
            fences.retain(|fence| match fence.is_done() {
                Ok(done) => !done,
                Err(error) => {
                    outcome = Err(error);
                    true
                }
            });
            if fences.is_empty() {
                class.put_back(offset);
                settled += 1;
            } else {
                class.fenced.push_back((offset, fences));
            }
        }
        self.counters[class.pool].fenced_bytes -= settled * class.bytes;
        if settled > 0 { Ok(()) } else { outcome }
    }
}

impl Arena {
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.locked()
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        if !self.origin.is_here() {
            return;
        }
        let mut state = self.lock();
        let fenced: Vec<_> = state.classes.iter_mut().flat_map(|class| class.fenced.drain(..)).collect();
        drop(state);
        let deadline = Instant::now() + FENCE_PATIENCE;
        for fence in fenced.into_iter().flat_map(|(_, fences)| fences) {
            loop {
                match fence.is_done() {
                    Ok(true) => break,
                    Ok(false) if Instant::now() < deadline => std::thread::sleep(FENCE_POLL),
                    _ => {
                        // Leak the memory: a device may still write to it.
                        self.block.keep_forever();
                        return;
                    }
                }
            }
        }
    }
}
