//! A system that starts no thread: errors, or the work is done by the thread that is there. A process of
//! its own, whose addresses are all taken.

use std::sync::Arc;

use memascend_exec::{ExecError, Executor};
use memascend_kernels::GRADIENT_BLOCK;
use memascend_mem::{PageableAllocator, Pool, SizeClass};
use memascend_store::{Store, StoreOptions};

#[test]
fn where_no_thread_starts_there_is_an_error_and_flushes_go_on() {
    let root = tempfile::tempdir().unwrap();
    let paths = [root.path().join("a"), root.path().join("b")];
    let store = Arc::new(Store::create(&paths, &StoreOptions::default()).unwrap());
    let slot_bytes = 12 * GRADIENT_BLOCK;
    let slots = Pool::new(&PageableAllocator::default(), &[SizeClass::new("slots", slot_bytes, 2)]).unwrap();
    let new =
        || Executor::new(Arc::clone(&store), slots.clone(), slot_bytes, GRADIENT_BLOCK, 2, None).map(drop);
    // The first ones: a stack that another thread has left would serve.
    without_addresses(|| {
        assert!(matches!(new(), Err(ExecError::NoThread(_))));
        // One volume after the other.
        store.sync().unwrap();
    });
    new().unwrap();
}

/// Runs `work` while there is no room for a thread's stack.
fn without_addresses(work: impl FnOnce()) {
    let mut before = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the limit is writable.
    assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_AS, &raw mut before) }, 0);
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    let used: u64 = pages.split(' ').next().unwrap().parse::<u64>().unwrap() * 4096;
    let limit = libc::rlimit { rlim_cur: used + (1 << 20), ..before };
    // SAFETY: the limit is a live one.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_AS, &raw const limit) }, 0);
    work();
    // SAFETY: as above.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_AS, &raw const before) }, 0);
}
