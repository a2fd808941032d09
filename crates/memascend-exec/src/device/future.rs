//! Results of work that a thread of the device does.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use super::copies::Counters;
use crate::{ExecError, Result};
use memascend_mem::{LockExt, WaitExt};

/// The result of work that a thread of the device does.
#[derive(Debug)]
pub(crate) struct DeviceFuture<T> {
    result: Mutex<Option<Result<T>>>,
    ended: Condvar,
    counters: Arc<Counters>,
}

/// The obligation to set a result. Dropping it without one sets an error, so that no waiter is left
/// behind.
#[derive(Debug)]
pub(crate) struct Promise<T>(Arc<DeviceFuture<T>>);

impl<T: Clone> DeviceFuture<T> {
    /// A future without a result yet, and the promise to set one.
    pub(crate) fn new(counters: &Arc<Counters>) -> (Arc<Self>, Promise<T>) {
        let counters = Arc::clone(counters);
        let future = Arc::new(Self { result: Mutex::default(), ended: Condvar::new(), counters });
        (Arc::clone(&future), Promise(future))
    }

    /// Whether the work has ended, with or without an error.
    pub(crate) fn is_done(&self) -> bool {
        self.lock().is_some()
    }

    /// Waits until the work has ended.
    pub(crate) fn wait(&self) -> Result<T> {
        let mut result = self.lock();
        if result.is_none() {
            self.counters.waits_caller.fetch_add(1, Ordering::Relaxed);
        }
        loop {
            match &*result {
                Some(result) => return result.clone(),
                None => result = self.ended.wait_locked(result),
            }
        }
    }
}

impl<T> DeviceFuture<T> {
    fn end(&self, result: Result<T>) {
        self.lock().get_or_insert(result);
        self.ended.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, Option<Result<T>>> {
        self.result.locked()
    }
}

impl<T> Promise<T> {
    /// Sets the result and wakes all waiters.
    pub(crate) fn resolve(self, result: Result<T>) {
        self.0.end(result);
    }
}

impl<T> Drop for Promise<T> {
    fn drop(&mut self) {
        self.0.end(Err(ExecError::Abandoned));
    }
}
