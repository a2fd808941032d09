//! The pool under every interleaving of a few threads: `make test-rust`.
#![cfg(feature = "loom")]

use std::ops::Range;
use std::sync::{Arc, Weak};
use std::time::Duration;

use loom::sync::atomic::{AtomicBool, Ordering};
use memascend_mem::{Fence, PageableAllocator, Pool, ResizeListener, Result, SizeClass};

const PATIENCE: Duration = Duration::from_secs(3600); // loom's waits never time out: a lost call is a deadlock

fn pool(count: usize) -> Pool {
    Pool::new(&PageableAllocator::default(), &[SizeClass::new("test", 1, count)]).unwrap()
}

/// Says whether two threads were ever between the entry and the exit together.
#[derive(Default)]
struct Alone(AtomicBool);

impl Alone {
    fn run(&self) {
        assert!(!self.0.swap(true, Ordering::SeqCst), "two threads hold the one buffer");
        loom::thread::yield_now();
        self.0.store(false, Ordering::SeqCst);
    }
}

#[test]
fn one_buffer_is_held_by_one_thread_and_no_call_is_lost() {
    loom::model(|| {
        let (pool, alone) = (pool(1), Arc::new(Alone::default()));
        let workers: Vec<_> = (0..2)
            .map(|_| {
                let (pool, alone) = (pool.clone(), Arc::clone(&alone));
                loom::thread::spawn(move || {
                    let lease = pool.lease(1, PATIENCE).unwrap().unwrap();
                    alone.run();
                    drop(lease);
                })
            })
            .collect();
        workers.into_iter().for_each(|worker| worker.join().unwrap());
        let counters = pool.counters();
        assert_eq!((counters.hits + counters.waits, counters.live_bytes, counters.leased_bytes), (2, 0, 0));
        assert_eq!(pool.joint_peak().0, 1);
    });
}

#[test]
fn a_request_that_does_not_wait_is_served_or_refused() {
    loom::model(|| {
        let pool = pool(1);
        let held = pool.try_lease(1).unwrap().unwrap();
        let other = loom::thread::spawn({
            let pool = pool.clone();
            move || pool.try_lease(1).unwrap().is_some()
        });
        drop(held);
        let served = other.join().unwrap();
        let counters = pool.counters();
        assert_eq!((counters.hits, counters.refusals), (1 + u64::from(served), u64::from(!served)));
        assert!(pool.try_lease(1).unwrap().is_some());
    });
}

/// Says that memory is none any more, as the system would.
struct Memory(AtomicBool);

impl ResizeListener for Memory {
    fn committed(&self, _parts: &[Range<usize>]) {
        assert!(!self.0.swap(true, Ordering::SeqCst), "committed twice");
    }

    fn leaving(&self, _parts: &[Range<usize>]) {
        assert!(self.0.swap(false, Ordering::SeqCst), "given back twice");
    }
}

fn elastic() -> (Pool, Arc<Memory>) {
    let class = SizeClass::new("test", 1, 1).up_to(1);
    let pool = Pool::new(&PageableAllocator::default(), &[class]).unwrap();
    let memory = Arc::new(Memory(AtomicBool::new(false)));
    pool.add_resize_listener(Arc::downgrade(&memory) as Weak<dyn ResizeListener>);
    (pool, memory)
}

#[test]
fn what_is_leased_is_memory_while_the_class_shrinks_and_grows() {
    loom::model(|| {
        let (pool, memory) = elastic();
        let owner = loom::thread::spawn({
            let (pool, memory) = (pool.clone(), Arc::clone(&memory));
            move || {
                if let Some(lease) = pool.try_lease(1).unwrap() {
                    assert!(memory.0.load(Ordering::SeqCst), "leased, and no memory");
                    drop(lease);
                }
            }
        });
        pool.resize(1, 0).unwrap();
        pool.resize(1, 1).unwrap();
        owner.join().unwrap();
        assert!(pool.try_lease(1).unwrap().is_some() && memory.0.load(Ordering::SeqCst));
        assert_eq!((pool.counters().leaving_bytes, pool.counters().reserved_bytes), (0, 4096));
    });
}

#[test]
fn a_buffer_that_returns_while_its_class_shrinks_is_given_back() {
    loom::model(|| {
        let (pool, memory) = elastic();
        let lease = pool.try_lease(1).unwrap().unwrap();
        let owner = loom::thread::spawn(move || drop(lease));
        pool.resize(1, 0).unwrap();
        owner.join().unwrap();
        while pool.counters().leaving_bytes > 0 {
            loom::thread::yield_now();
        }
        assert!(!memory.0.load(Ordering::SeqCst));
        assert!(pool.try_lease(1).unwrap().is_none());
    });
}

struct Gate(AtomicBool);

impl Fence for Gate {
    fn is_done(&self) -> Result<bool> {
        Ok(self.0.load(Ordering::Acquire))
    }
}

#[test]
fn a_fenced_buffer_is_not_served_before_its_fence_is_done() {
    loom::model(|| {
        let pool = pool(1);
        let gate = Arc::new(Gate(AtomicBool::new(false)));
        let lease = pool.try_lease(1).unwrap().unwrap();
        lease.return_after(Arc::clone(&gate) as Arc<dyn Fence>);
        let owner = loom::thread::spawn(move || drop(lease));
        let device = loom::thread::spawn({
            let gate = Arc::clone(&gate);
            move || gate.0.store(true, Ordering::Release)
        });
        if pool.try_lease(1).unwrap().is_some() {
            assert!(gate.0.load(Ordering::Acquire), "served while the device was at work");
        }
        owner.join().unwrap();
        device.join().unwrap();
        assert!(pool.try_lease(1).unwrap().is_some());
    });
}
