//! Threads for a share of some work each, where the system has any to start.

use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, Scope};

/// Runs `share` in a thread of `scope`, or in this one where the system starts no more.
pub(crate) fn spawn_or_run<'scope>(scope: &'scope Scope<'scope, '_>, share: impl FnOnce() + Send + 'scope) {
    // A refused spawn would drop it.
    let share = Arc::new(Mutex::new(Some(share)));
    let take = |share: &Mutex<Option<_>>| share.lock().unwrap_or_else(PoisonError::into_inner).take();
    let theirs = Arc::clone(&share);
    let run = move || {
        if let Some(share) = take(&theirs) {
            share();
        }
    };
    if Builder::new().spawn_scoped(scope, run).is_err()
        && let Some(share) = take(&share)
    {
        share();
    }
}
