//! Size classes that grow and shrink: memory comes behind their reserved addresses, and is given back.
//!
//! Memory is given back buffer by buffer, since a lease, a registration with CUDA and an entry in a ring's
//! table are of one buffer: it is unlocked, unregistered, returned with `MADV_DONTNEED` and closed with
//! `PROT_NONE`, so that a stray access is a fault. Free buffers go at once. Buffers in use go when they
//! return; a thread gives them back, because a lease may be dropped by a thread that must not wait for a
//! ring. Growing succeeds for all new buffers or changes nothing. An arena without a maximum is allocated at
//! once, as `cudaHostAlloc` requires.

use std::ops::Range;
use std::sync::{Arc, Weak};
use std::time::Duration;

use super::Pool;
use super::arena::{Arena, Class, State};
use crate::sync::{LockExt, MutexGuard, WaitExt, spawn};
use crate::{MemError, Result, round_up_to_page};

/// How often the fences of buffers that are to be given back are polled. Nothing waits for them but
/// the memory.
const LEAVING_POLL: Duration = Duration::from_millis(1);

/// Is told which bytes of an arena are memory, by their places in it. It is called by one thread at a
/// time, and must not wait for a buffer.
pub trait ResizeListener: Send + Sync {
    /// These bytes are memory from now on, and hold no value yet.
    fn committed(&self, parts: &[Range<usize>]);

    /// These bytes, all unused, are returned to the system as soon as this returns.
    fn leaving(&self, parts: &[Range<usize>]);
}

/// Resize listeners. This lock is taken before the arena's state lock, by any thread that commits or returns
/// buffers.
pub(super) type ResizeListeners = Vec<Weak<dyn ResizeListener>>;

/// A size class of an arena: `count_max` buffers of `bytes` bytes, one behind the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClassPlace {
    /// Where the first buffer begins in the arena.
    pub start: usize,
    /// Bytes of one buffer.
    pub bytes: usize,
    /// How many buffers there can be.
    pub count_max: usize,
}

impl Pool {
    /// Makes `count` the number of buffers of the size class for `bytes` bytes. New buffers are there
    /// when this returns. Of those that are too many, the free ones have been given back to the
    /// system when this returns; the others are when their leases and fences end, and
    /// [`PoolCounters::leaving_bytes`](super::PoolCounters::leaving_bytes) counts them until then.
    ///
    /// Blocks on the engines' threads: never call it from a completion callback.
    ///
    /// # Errors
    /// [`MemError::NotReserved`] if there is no such class, its number is fixed, or fewer were reserved. An
    /// error of the system: then the number stays, or is lower by the buffers that were returned.
    pub fn resize(&self, bytes: usize, count: usize) -> Result<()> {
        let listeners = self.arena.resizing.locked();
        let state = self.arena.lock();
        let rounded = round_up_to_page(bytes.max(1));
        let index = self.classes.clone().find(|index| state.classes[*index].bytes == rounded);
        let refused = |count_max| Err(MemError::NotReserved { bytes, count, count_max });
        let Some(index) = index else { return refused(0) };
        let class = &state.classes[index];
        if count == class.count {
            return Ok(());
        }
        if !class.elastic || count > class.count_max {
            return refused(if class.elastic { class.count_max } else { class.count });
        }
        if count > class.count {
            self.arena.grow(&listeners, state, index, count)
        } else {
            self.arena.shrink(&listeners, state, index, count)
        }
    }

    /// How many buffers the size class for `bytes` bytes has, without those that are to be given back;
    /// 0 if there is no such class.
    pub fn count(&self, bytes: usize) -> usize {
        let (state, rounded) = (self.arena.lock(), round_up_to_page(bytes.max(1)));
        let classes = &state.classes[self.classes.clone()];
        classes.iter().find(|class| class.bytes == rounded).map_or(0, |class| class.count)
    }

    /// Whether a size class of the arena can grow or shrink.
    pub fn is_elastic(&self) -> bool {
        self.arena.block.is_reserved()
    }

    /// Where the size classes of the whole arena lie, one behind the other.
    pub fn arena_classes(&self) -> Vec<ClassPlace> {
        let place =
            |class: &Class| ClassPlace { start: class.start, bytes: class.bytes, count_max: class.count_max };
        self.arena.lock().classes.iter().map(place).collect()
    }

    /// Calls `listener` with the resident parts of the arena, now and whenever they change, until it is
    /// dropped.
    pub fn add_resize_listener(&self, listener: Weak<dyn ResizeListener>) {
        let mut listeners = self.arena.resizing.locked();
        let memory: Vec<_> = self.arena.lock().classes.iter().flat_map(Class::memory).collect();
        if let Some(listener) = listener.upgrade() {
            listener.committed(&memory);
        }
        listeners.retain(|listener| listener.strong_count() > 0);
        listeners.push(listener);
    }
}

impl Class {
    /// The buffers that are memory, by ascending address.
    pub(super) fn memory(&self) -> Vec<Range<usize>> {
        let mut absent = self.absent.clone();
        absent.sort_unstable();
        let places = (0..self.count_max).map(|index| self.start + index * self.bytes);
        let there = places.filter(|offset| absent.binary_search(offset).is_err());
        there.map(|offset| offset..offset + self.bytes).collect()
    }

    /// Buffers that are to be given back.
    fn returning(&self) -> usize {
        self.surplus + self.leaving.len()
    }
}

impl Arena {
    fn grow(
        self: &Arc<Self>,
        listeners: &ResizeListeners,
        mut state: MutexGuard<'_, State>,
        index: usize,
        count: usize,
    ) -> Result<()> {
        let class = &mut state.classes[index];
        let (bytes, more) = (class.bytes, count - class.count);
        // Those that were to go stay.
        let fresh = more.saturating_sub(class.returning());
        let mut offsets = class.absent.split_off(class.absent.len() - fresh);
        drop(state);
        if fresh > 0 {
            offsets.sort_unstable();
            let parts: Vec<_> = offsets.iter().map(|offset| *offset..offset + bytes).collect();
            if let Err(error) = self.block.commit(&parts) {
                self.lock().classes[index].absent.extend(offsets);
                return Err(error);
            }
            notify(listeners, |listener| listener.committed(&parts));
        }
        let mut state = self.lock();
        let class = &mut state.classes[index];
        // None of them went in the meantime: this thread holds the lock of those who resize.
        let stay = more - fresh;
        let in_use = stay.min(class.surplus);
        class.surplus -= in_use;
        class.free.extend(class.leaving.drain(..stay - in_use));
        class.free.extend(offsets.into_iter().rev());
        class.count = count;
        let pool = class.pool;
        state.counters[pool].reserved_bytes += fresh * bytes;
        state.counters[pool].leaving_bytes -= stay * bytes;
        drop(state);
        self.returned.notify_all();
        // The thread that waits for the others ends if there are none any more.
        self.leaving.notify_all();
        Ok(())
    }

    fn shrink(
        self: &Arc<Self>,
        listeners: &ResizeListeners,
        mut state: MutexGuard<'_, State>,
        index: usize,
        count: usize,
    ) -> Result<()> {
        // The error of a fence keeps its buffer in use.
        let _ = state.settle(index);
        let class = &mut state.classes[index];
        let less = class.count - count;
        let now = less.min(class.free.len());
        // Those that go lie side by side, at the end, as far as they are free: huge pages go with them.
        class.free.sort_unstable_by(|one, other| other.cmp(one));
        let going: Vec<usize> = class.free.drain(..now).collect();
        class.surplus += less - now;
        class.count = count;
        let (bytes, pool, waits) = (class.bytes, class.pool, class.returning() > 0);
        state.counters[pool].leaving_bytes += less * bytes;
        drop(state);
        let outcome = self.give_back(listeners, index, going);
        if waits {
            self.start_draining();
        }
        outcome
    }

    /// Gives buffers of a class back to the system. Those that it does not take stay buffers.
    fn give_back(&self, listeners: &ResizeListeners, index: usize, going: Vec<usize>) -> Result<()> {
        if going.is_empty() {
            return Ok(());
        }
        let bytes = self.lock().classes[index].bytes;
        let part = |offset: &usize| *offset..offset + bytes;
        let mut sorted = going;
        sorted.sort_unstable();
        let parts: Vec<_> = sorted.iter().map(part).collect();
        notify(listeners, |listener| listener.leaving(&parts));
        let (mut gone, mut stay, mut outcome) = (Vec::new(), Vec::new(), Ok(()));
        for offset in sorted {
            match self.block.give_back(part(&offset)) {
                Ok(()) => gone.push(offset),
                Err(error) => {
                    stay.push(offset);
                    outcome = outcome.and(Err(error));
                }
            }
        }
        if !stay.is_empty() {
            let parts: Vec<_> = stay.iter().map(part).collect();
            notify(listeners, |listener| listener.committed(&parts));
        }
        let mut state = self.lock();
        let class = &mut state.classes[index];
        let pool = class.pool;
        let (gone_bytes, all_bytes) = (gone.len() * bytes, (gone.len() + stay.len()) * bytes);
        class.count += stay.len();
        class.absent.extend(gone);
        class.free.extend(stay);
        state.counters[pool].reserved_bytes -= gone_bytes;
        state.counters[pool].leaving_bytes -= all_bytes;
        drop(state);
        if outcome.is_err() {
            self.returned.notify_all();
        }
        outcome
    }

    /// Starts the thread that gives buffers back as they return, unless it runs.
    fn start_draining(self: &Arc<Self>) {
        if std::mem::replace(&mut self.lock().draining, true) {
            // It may have to poll fences from now on.
            self.leaving.notify_all();
            return;
        }
        let arena = Arc::clone(self);
        if spawn("memascend-shrink", move || arena.drain()).is_err() {
            // The next call that shrinks tries again.
            self.lock().draining = false;
        }
    }

    /// Gives buffers back as they return, until none is to go any more.
    fn drain(self: Arc<Self>) {
        let mut state = self.lock();
        loop {
            for index in 0..state.classes.len() {
                if state.classes[index].surplus > 0 {
                    // A fence whose state is unknown keeps its buffer for ever.
                    let _ = state.settle(index);
                }
            }
            if state.classes.iter().any(|class| !class.leaving.is_empty()) {
                drop(state);
                let listeners = self.resizing.locked();
                let leaving: Vec<_> =
                    self.lock().classes.iter_mut().map(|class| std::mem::take(&mut class.leaving)).collect();
                for (index, going) in leaving.into_iter().enumerate() {
                    // Buffers that the system does not take back stay, and are counted.
                    let _ = self.give_back(&listeners, index, going);
                }
                drop(listeners);
                state = self.lock();
                continue;
            }
            let waiting = |class: &&Class| class.surplus > 0;
            let fenced = state.classes.iter().filter(waiting).any(|class| !class.fenced.is_empty());
            // Without another owner there is no lease: the arena's end waits for the fences.
            let alone = Arc::strong_count(&self) == 1;
            if alone || !state.classes.iter().any(|class| class.surplus > 0) {
                state.draining = false;
                return;
            }
            state = if fenced {
                self.leaving.wait_locked_for(state, LEAVING_POLL)
            } else {
                self.leaving.wait_locked(state)
            };
        }
    }
}

fn notify(listeners: &ResizeListeners, what: impl Fn(&dyn ResizeListener)) {
    listeners.iter().filter_map(Weak::upgrade).for_each(|listener| what(&*listener));
}
