//! Locks whose poison flag is ignored, and the primitives behind the pool: std's, or loom's models of them in
//! a test that explores every interleaving.

use std::sync::PoisonError;
use std::time::Duration;

#[cfg(feature = "loom")]
pub(crate) use loom::sync::{Condvar, Mutex, MutexGuard};
#[cfg(not(feature = "loom"))]
pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};

/// Runs `run` on a thread of its own, which nothing waits for.
pub(crate) fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
    #[cfg(feature = "loom")]
    drop((name, loom::thread::spawn(run)));
    #[cfg(not(feature = "loom"))]
    drop(std::thread::Builder::new().name(name.to_owned()).spawn(run)?);
    Ok(())
}

/// Takes a mutex whether or not a thread panicked while it held the mutex.
///
/// No critical section of these crates panics between two changes that belong together, so a
/// poisoned lock still guards a sound state.
pub trait LockExt {
    /// The guarded value.
    type Value;
    /// The guard of a locked mutex.
    type Guard<'a>
    where
        Self: 'a;

    /// Waits for the lock and takes it.
    fn locked(&self) -> Self::Guard<'_>;

    /// The guarded value, through the only reference to the mutex: nothing is locked.
    fn exclusive(&mut self) -> &mut Self::Value;
}

/// Waits on a condition variable whether or not a thread panicked while it held the mutex; see
/// [`LockExt`].
pub trait WaitExt {
    /// The guard of the mutex that the condition variable belongs to.
    type Guard<'a, T: 'a>;

    /// Releases the lock, waits for a notification and takes the lock again. May wake without a
    /// notification.
    fn wait_locked<'a, T>(&self, guard: Self::Guard<'a, T>) -> Self::Guard<'a, T>;

    /// As [`WaitExt::wait_locked`], for at most `patience`.
    fn wait_locked_for<'a, T>(&self, guard: Self::Guard<'a, T>, patience: Duration) -> Self::Guard<'a, T>;
}

macro_rules! ignore_poison_of {
    ($($sync:ident)::+) => {
        impl<T> LockExt for $($sync)::+::Mutex<T> {
            type Value = T;
            type Guard<'a>
                = $($sync)::+::MutexGuard<'a, T>
            where
                Self: 'a;

            fn locked(&self) -> Self::Guard<'_> {
                self.lock().unwrap_or_else(PoisonError::into_inner)
            }

            fn exclusive(&mut self) -> &mut T {
                self.get_mut().unwrap_or_else(PoisonError::into_inner)
            }
        }

        impl WaitExt for $($sync)::+::Condvar {
            type Guard<'a, T: 'a> = $($sync)::+::MutexGuard<'a, T>;

            fn wait_locked<'a, T>(&self, guard: Self::Guard<'a, T>) -> Self::Guard<'a, T> {
                self.wait(guard).unwrap_or_else(PoisonError::into_inner)
            }

            fn wait_locked_for<'a, T>(
                &self,
                guard: Self::Guard<'a, T>,
                patience: Duration,
            ) -> Self::Guard<'a, T> {
                self.wait_timeout(guard, patience).unwrap_or_else(PoisonError::into_inner).0
            }
        }
    };
}

ignore_poison_of!(std::sync);
#[cfg(feature = "loom")]
ignore_poison_of!(loom::sync);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_under_the_lock_locks_no_other_thread_out() {
        let mut mutex = std::sync::Mutex::new(1);
        let panicked = std::thread::scope(|scope| {
            scope
                .spawn(|| {
                    let _guard = mutex.locked();
                    panic!("with the lock held");
                })
                .join()
        });
        assert!(panicked.is_err() && mutex.is_poisoned());
        *mutex.locked() += 1;
        let condition = std::sync::Condvar::new();
        let guard = condition.wait_locked_for(mutex.locked(), Duration::from_millis(1));
        assert_eq!(*guard, 2);
        drop(guard);
        assert_eq!(*mutex.exclusive(), 2);
    }
}
