//! Panics as exceptions.
//!
//! A panic is a defect of ours. The call in which it happens raises DefectError, an ordinary exception; and whatever
//! was open in the process then can only be closed, since nothing says how much of it is left: no lock that was held,
//! and no value that was about to be committed, is used again.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, Once};

use memascend_mem::LockExt;
use pyo3::prelude::*;

use crate::errors::defect_error;

/// Panics of this process so far, in any thread of ours.
static PANICS: AtomicU64 = AtomicU64::new(0);
/// The message of the last one, and its place.
static LAST: Mutex<String> = Mutex::new(String::new());

/// Has panics be counted and remembered from now on. Standard error tells of them as before.
pub(crate) fn count_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let tell = take_hook();
        set_hook(Box::new(move |panic| {
            let place = panic.location().map_or_else(|| "an unknown place".to_owned(), ToString::to_string);
            let thread = std::thread::current();
            let name = thread.name().filter(|name| name.starts_with("memascend-"));
            let thread = name.map_or_else(String::new, |name| format!(", in the thread {name}"));
            *LAST.locked() = format!("{} ({place}{thread})", message(panic.payload()));
            PANICS.fetch_add(1, Ordering::SeqCst);
            tell(panic);
        }));
    });
}

fn message(payload: &(dyn Any + Send)) -> &str {
    let text = payload.downcast_ref::<&str>().copied();
    text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("a panic")
}

/// The message of the last panic, and its place; None if there was none.
pub(crate) fn last() -> Option<String> {
    (PANICS.load(Ordering::SeqCst) > 0).then(|| LAST.locked().clone())
}

/// Runs a function for Python. `#[guarded]` has every such call go through here.
pub(crate) fn guard<T>(call: impl FnOnce() -> PyResult<T>) -> PyResult<T> {
    // Values that the panic has left half done are not used: see `Intact`.
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|payload| {
        let said = last().unwrap_or_else(|| message(&*payload).to_owned());
        Err(defect_error(&said))
    })
}

/// As [`guard`], for a call that does not fail otherwise.
pub(crate) fn guard_value<T>(call: impl FnOnce() -> T) -> PyResult<T> {
    guard(|| Ok(call()))
}

/// How many panics there were when something was opened: after another one it is not used any more.
#[derive(Clone, Copy)]
pub(crate) struct Intact(u64);

impl Intact {
    pub(crate) fn here() -> Self {
        Self(PANICS.load(Ordering::SeqCst))
    }

    /// Whether there was no panic since.
    pub(crate) fn still(self) -> bool {
        self.0 == PANICS.load(Ordering::SeqCst)
    }

    /// # Errors
    /// DefectError if there was a panic since.
    pub(crate) fn check(self) -> PyResult<()> {
        if self.still() { Ok(()) } else { Err(defect_error(&last().unwrap_or_default())) }
    }
}
