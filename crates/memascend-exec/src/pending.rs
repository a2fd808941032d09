//! Counters of operations under way, on which later work waits.

use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use crate::{ExecError, Result};
use memascend_mem::{LockExt, WaitExt};

/// Counts operations under way and remembers the first that failed.
#[derive(Debug, Default)]
pub struct Pending {
    state: Mutex<State>,
    idle: Condvar,
}

#[derive(Debug, Default)]
struct State {
    count: usize,
    error: Option<ExecError>,
}

/// One operation that a [`Pending`] counts. It ends exactly once. If a thread panics or an engine
/// closes, dropping this value ends the operation with an error, so that no waiter is left behind.
#[derive(Debug)]
pub struct Underway {
    pending: Option<Arc<Pending>>,
}

impl Pending {
    /// Begins an operation.
    pub fn begin(self: &Arc<Self>) -> Underway {
        self.lock().count += 1;
        Underway { pending: Some(Arc::clone(self)) }
    }

    /// Waits until nothing is under way. A failure stays: what the failed operation left on the SSD
    /// cannot be trusted.
    pub fn wait(&self) -> Result<()> {
        let mut state = self.lock();
        while state.count > 0 {
            state = self.idle.wait_locked(state);
        }
        state.error.clone().map_or(Ok(()), Err)
    }

    /// Whether nothing is under way.
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

impl Underway {
    /// Ends the operation.
    pub fn end(mut self, result: Result<()>) {
        if let Some(pending) = self.pending.take() {
            pending.end(result);
        }
    }
}

impl Drop for Underway {
    fn drop(&mut self) {
        if let Some(pending) = self.pending.take() {
            pending.end(Err(ExecError::Abandoned));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_operation_that_nobody_ended_fails_and_leaves_nobody_waiting() {
        let pending = Arc::new(Pending::default());
        let underway = pending.begin();
        let thread = std::thread::spawn(move || {
            let _held = underway;
            panic!("this panic is part of the test");
        });
        assert!(thread.join().is_err());
        assert!(matches!(pending.wait(), Err(ExecError::Abandoned)));
    }

    #[test]
    fn the_first_failure_stays() {
        let pending = Arc::new(Pending::default());
        let (first, second, third) = (pending.begin(), pending.begin(), pending.begin());
        first.end(Ok(()));
        second.end(Err(ExecError::Closed));
        assert!(!pending.is_idle());
        third.end(Err(ExecError::Stalled { seconds: 1 }));
        assert!(matches!(pending.wait(), Err(ExecError::Closed)));
        pending.begin().end(Ok(()));
        assert!(matches!(pending.wait(), Err(ExecError::Closed)));
    }
}
