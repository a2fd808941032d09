//! Counters of operations under way, on which later work waits.
//!
//! Updates and write-back are ordered per unit and nothing else is: a fetch begins when the unit's count is
//! zero, and an update waits for reads of parts that have started. `InFlightCounter::begin` returns a guard that ends
//! its operation exactly once; a guard that a panicking thread or a closed engine drops ends it with an
//! error. An error of an update sticks to its unit: half of the update may be on the SSD, so the unit is
//! neither trained on nor committed again.

use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use crate::{ExecError, Result};
use memascend_mem::{LockExt, WaitExt};

/// Counts operations under way and remembers the first that failed. Reads of parts are counted
/// apart: they wait for no other read, and one that fails does no harm.
#[derive(Debug, Default)]
pub struct InFlightCounter {
    state: Mutex<State>,
    idle: Condvar,
}

#[derive(Debug, Default)]
struct State {
    count: usize,
    /// Reads that were asked for and have not started.
    asked_reads: usize,
    started_reads: usize,
    error: Option<ExecError>,
}

/// One operation that an [`InFlightCounter`] counts. It ends exactly once. If a thread panics or an engine
/// closes, dropping this value ends the operation with an error, so that no waiter is left behind.
#[derive(Debug)]
pub struct InFlight {
    counter: Option<Arc<InFlightCounter>>,
}

/// A read that an [`InFlightCounter`] counts until this value is dropped.
#[derive(Debug)]
pub struct InFlightRead {
    counter: Arc<InFlightCounter>,
    started: bool,
}

impl InFlightCounter {
    /// Begins an operation.
    pub fn begin(self: &Arc<Self>) -> InFlight {
        self.lock().count += 1;
        InFlight { counter: Some(Arc::clone(self)) }
    }

    /// Asks for a read.
    pub fn ask_read(self: &Arc<Self>) -> InFlightRead {
        self.lock().asked_reads += 1;
        InFlightRead { counter: Arc::clone(self), started: false }
    }

    /// Waits until nothing is under way but reads. A failure stays: the bytes of the failed operation on the
    /// SSD cannot be trusted.
    pub fn wait(&self) -> Result<()> {
        self.wait_while(|_| false)
    }

    /// As [`InFlightCounter::wait`], also for reads that have started.
    pub fn wait_started_reads(&self) -> Result<()> {
        self.wait_while(|state| state.started_reads > 0)
    }

    /// As [`InFlightCounter::wait`], also for every read that was asked for.
    pub fn wait_all(&self) -> Result<()> {
        self.wait_while(|state| state.started_reads + state.asked_reads > 0)
    }

    /// The first failure so far.
    pub fn check(&self) -> Result<()> {
        self.lock().error.clone().map_or(Ok(()), Err)
    }

    fn wait_while(&self, reads: impl Fn(&State) -> bool) -> Result<()> {
        let mut state = self.lock();
        while state.count > 0 || reads(&state) {
            state = self.idle.wait_locked(state);
        }
        state.error.clone().map_or(Ok(()), Err)
    }

    /// Whether nothing is under way but reads.
    pub fn is_idle(&self) -> bool {
        self.lock().count == 0
    }

    fn end(&self, result: Result<()>) {
        let mut state = self.lock();
        if let Err(error) = result {
            state.error.get_or_insert(error);
        }
        state.count -= 1;
        if state.count == 0 {
            self.idle.notify_all();
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.locked()
    }
}

impl InFlight {
    /// Ends the operation.
    pub fn end(mut self, result: Result<()>) {
        if let Some(counter) = self.counter.take() {
            counter.end(result);
        }
    }
}

impl InFlightRead {
    /// Starts the read.
    pub fn start(&mut self) {
        let mut state = self.counter.lock();
        state.asked_reads -= 1;
        state.started_reads += 1;
        self.started = true;
    }
}

impl Drop for InFlightRead {
    fn drop(&mut self) {
        let mut state = self.counter.lock();
        let count = if self.started { &mut state.started_reads } else { &mut state.asked_reads };
        *count -= 1;
        if *count == 0 {
            self.counter.idle.notify_all();
        }
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        if let Some(counter) = self.counter.take() {
            counter.end(Err(ExecError::Abandoned));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_operation_that_nobody_ended_fails_and_leaves_nobody_waiting() {
        let counter = Arc::new(InFlightCounter::default());
        let underway = counter.begin();
        let thread = std::thread::spawn(move || {
            let _held = underway;
            panic!("this panic is part of the test");
        });
        assert!(thread.join().is_err());
        assert!(matches!(counter.wait(), Err(ExecError::Abandoned)));
    }

    #[test]
    fn a_read_is_waited_for_by_those_it_may_harm() {
        let counter = Arc::new(InFlightCounter::default());
        let waits = |wait: fn(&InFlightCounter) -> Result<()>| {
            let (sender, told) = std::sync::mpsc::channel();
            let counter = Arc::clone(&counter);
            let thread = std::thread::spawn(move || sender.send(wait(&counter).is_ok()).unwrap());
            (thread, told)
        };
        let mut reading = counter.ask_read();
        // A read that waits behind an update in the queue must not hold it up.
        counter.wait().unwrap();
        counter.wait_started_reads().unwrap();
        let (all, all_told) = waits(InFlightCounter::wait_all);
        reading.start();
        counter.wait().unwrap();
        let (started, started_told) = waits(InFlightCounter::wait_started_reads);
        assert!(all_told.try_recv().is_err() && started_told.try_recv().is_err());
        drop(reading);
        assert!(all_told.recv().unwrap() && started_told.recv().unwrap());
        all.join().unwrap();
        started.join().unwrap();
        drop(counter.ask_read());
        counter.wait_all().unwrap();
    }

    #[test]
    fn the_first_failure_stays() {
        let counter = Arc::new(InFlightCounter::default());
        let (first, second, third) = (counter.begin(), counter.begin(), counter.begin());
        first.end(Ok(()));
        second.end(Err(ExecError::Closed));
        assert!(!counter.is_idle());
        third.end(Err(ExecError::Stalled { seconds: 1 }));
        assert!(matches!(counter.wait(), Err(ExecError::Closed)));
        counter.begin().end(Ok(()));
        assert!(matches!(counter.wait(), Err(ExecError::Closed)));
    }
}
