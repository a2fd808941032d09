use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::{OptimError, Result};

/// Counts operations under way and remembers the first that failed.
#[derive(Debug, Default)]
pub struct Pending {
    state: Mutex<State>,
    idle: Condvar,
}

#[derive(Debug, Default)]
struct State {
    count: usize,
    error: Option<OptimError>,
}

impl Pending {
    /// Notes that `count` operations have begun.
    pub fn begin(&self, count: usize) {
        self.lock().count += count;
    }

    /// Notes that an operation has ended.
    pub fn end(&self, result: Result<()>) {
        let mut state = self.lock();
        if let Err(error) = result {
            state.error.get_or_insert(error);
        }
        state.count -= 1;
        if state.count == 0 {
            self.idle.notify_all();
        }
    }

    /// Waits until nothing is under way. A failure stays: what it left on the SSD cannot be trusted.
    pub fn wait(&self) -> Result<()> {
        let mut state = self.lock();
        while state.count > 0 {
            state = self.idle.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.error.clone().map_or(Ok(()), Err)
    }

    /// Whether nothing is under way.
    pub fn is_idle(&self) -> bool {
        self.lock().count == 0
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
