//! The block behind pools that were carved together, and the books kept on it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::pool::counters::PoolCounters;
use crate::sync::{Condvar, LockExt, Mutex, MutexGuard};
use crate::{HostBlock, Origin, Result};

/// How long the memory of a pool that nobody has any more waits for the devices that still use it.
const FENCE_PATIENCE: Duration = Duration::from_secs(60);
/// How often a waiting request looks at the fences of returned buffers: nobody calls when a device is done.
pub(super) const FENCE_POLL: Duration = Duration::from_micros(50);

/// Work on a buffer that goes on after its owner has dropped the lease: a copy that a device carries out. The
/// buffer returns to its pool when the fence is done.
pub trait Fence: Send + Sync {
    /// Whether the work has ended. Must not block.
    ///
    /// # Errors
    /// When that cannot be told. The buffer then never returns, because the device may still be using it.
    fn is_done(&self) -> Result<bool>;
}

/// The one block behind all the pools of a carve. They share a lock: what they do under it is short, and only so
/// is it known how much they hold together.
pub(super) struct Arena {
    pub(super) block: HostBlock,
    pub(super) allocator: &'static str,
    pub(super) origin: Origin,
    pub(super) state: Mutex<State>,
    pub(super) returned: Condvar,
}

pub(super) struct State {
    /// Every pool's classes, one pool after another, by ascending size within each.
    pub(super) classes: Vec<Class>,
    pub(super) counters: Vec<PoolCounters>,
    pub(super) live_bytes: usize,
    pub(super) live_bytes_max: usize,
    /// Requests waiting for a return; without any, a return calls nobody.
    pub(super) waiting: usize,
}

pub(super) struct Class {
    pub(super) bytes: usize,
    pub(super) count: usize,
    /// Which pool it belongs to.
    pub(super) pool: usize,
    pub(super) live_bytes: usize,
    /// Its live bytes when those of all classes together were highest.
    pub(super) live_bytes_at_peak: usize,
    /// Offsets into the arena of the buffers not leased, used as a stack so that warm memory is reused.
    pub(super) free: Vec<usize>,
    /// Buffers dropped before their fences were done, oldest first.
    pub(super) fenced: VecDeque<(usize, Fences)>,
}

pub(super) type Fences = Vec<Arc<dyn Fence>>;

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
    /// What a fence says that cannot tell, unless another buffer came free.
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
                class.free.push(offset);
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
                        // Better lost than freed under a device that writes to it.
                        self.block.keep_forever();
                        return;
                    }
                }
            }
        }
    }
}
