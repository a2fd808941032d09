//! A ring that the kernel takes nothing from any more: errors, and neither a panic nor a hang.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crossbeam_channel::{Receiver, unbounded};
use memascend_mem::{LeaseSlice, PageableAllocator, Pool, SizeClass};

use super::REFUSED_AT_MOST;
use crate::engine::ring::RingEngine;
use crate::{BLOCK_BYTES, Completion, Engine, EngineOptions, Operation, Request, Result, Volume};

/// A ring over a small volume, and buffers for its requests.
struct Bench {
    engine: RingEngine,
    pool: Pool,
    _root: tempfile::TempDir,
}

impl Bench {
    /// None where the system refuses io_uring.
    fn new() -> Option<Self> {
        let root = tempfile::tempdir().unwrap();
        let volume = Volume::create(&root.path().join("volume"), true).unwrap();
        volume.reserve(4 * BLOCK_BYTES as u64).unwrap();
        let engine = RingEngine::new(volume.file(), EngineOptions::default()).ok()?;
        let class = SizeClass::new("test", BLOCK_BYTES, 8);
        let pool = Pool::new(&PageableAllocator::default(), &[class]).unwrap();
        Some(Self { engine, pool, _root: root })
    }

    /// Has the kernel refuse to go on; 0: no more.
    fn refuse(&self, errno: i32) {
        self.engine.ring.mailbox.wake.refusal.store(errno, Ordering::SeqCst);
    }

    /// Submits a request, whose end is told.
    fn submit(&self, operation: Operation) -> Receiver<Result<()>> {
        let lease = Arc::new(self.pool.try_lease(BLOCK_BYTES).unwrap().unwrap());
        let (told, heard) = unbounded();
        let on_complete = Box::new(move |Completion { buffer, result }| {
            drop(buffer);
            told.send(result).unwrap();
        });
        let buffer = LeaseSlice::new(lease, 0, BLOCK_BYTES);
        self.engine.submit(Request { operation, offset: 0, buffer, on_complete });
        heard
    }

    fn run(&self, operation: Operation) -> Result<()> {
        self.submit(operation).recv_timeout(Duration::from_secs(20)).unwrap()
    }
}

#[test]
fn all_requests_end_with_the_error_and_their_buffers_are_not_used_again() {
    let Some(bench) = Bench::new() else { return };
    bench.run(Operation::Write).unwrap();
    bench.refuse(libc::ENXIO);
    for (failures, operation) in [Operation::Read, Operation::Write, Operation::Read].into_iter().enumerate()
    {
        assert_eq!(bench.run(operation).unwrap_err().errno(), Some(libc::ENXIO));
        assert_eq!(bench.pool.free_buffers(BLOCK_BYTES), 7 - failures, "the kernel may still write to it");
    }
}

#[test]
fn a_kernel_that_is_busy_for_ever_is_an_error_and_not_a_hang() {
    for errno in [libc::EBUSY, libc::EAGAIN, libc::EINTR] {
        let Some(bench) = Bench::new() else { return };
        bench.run(Operation::Write).unwrap();
        bench.refuse(errno);
        let error = bench.run(Operation::Read).unwrap_err();
        assert_eq!(error.errno(), Some(errno));
        assert!(error.to_string().contains("has neither taken nor completed anything: resume"), "{error}");
        assert_eq!(bench.run(Operation::Write).unwrap_err().errno(), Some(errno), "it is not tried again");
    }
}

#[test]
fn a_kernel_that_is_busy_for_a_moment_is_waited_for() {
    let Some(bench) = Bench::new() else { return };
    for errno in [libc::EBUSY, libc::EAGAIN, libc::EINTR] {
        bench.refuse(errno);
        let ends = bench.submit(Operation::Write);
        std::thread::sleep(REFUSED_AT_MOST / 3);
        bench.refuse(0);
        ends.recv_timeout(Duration::from_secs(20)).unwrap().unwrap();
    }
}

#[test]
fn a_ring_closes_while_the_kernel_is_busy() {
    let Some(bench) = Bench::new() else { return };
    bench.run(Operation::Write).unwrap();
    bench.refuse(libc::EBUSY);
    let (told, closed) = unbounded();
    std::thread::spawn(move || {
        drop(bench);
        told.send(()).unwrap();
    });
    closed.recv_timeout(Duration::from_secs(20)).unwrap();
}
