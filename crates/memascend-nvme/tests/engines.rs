//! Every engine moves real bytes on a real file, reports failures and survives being dropped.

use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Barrier};
use std::time::Duration;

use memascend_mem::{Lease, LeaseSlice, PageableAllocator, Pool, SizeClass};
use memascend_nvme::testing::{Faults, SimDisk, SimEngine};
use memascend_nvme::{
    BLOCK_BYTES, Completion, Engine, EngineOptions, Operation, Request, RingEngine, ThreadsEngine, Volume,
};

const MIB: usize = 1 << 20;

type Open = fn(&Volume) -> Arc<dyn Engine>;

fn threads(volume: &Volume) -> Arc<dyn Engine> {
    Arc::new(ThreadsEngine::new(volume.file(), 3).unwrap())
}

fn sim(volume: &Volume) -> Arc<dyn Engine> {
    Arc::new(SimEngine::running(volume.file(), SimDisk::new(Faults::default())))
}

fn ring(volume: &Volume) -> Arc<dyn Engine> {
    Arc::new(RingEngine::new(volume.file(), EngineOptions::default()).unwrap())
}

fn polled_by_a_kernel_thread(volume: &Volume) -> Arc<dyn Engine> {
    let options = EngineOptions { sq_poll: true, ..EngineOptions::default() };
    Arc::new(RingEngine::new(volume.file(), options).unwrap())
}

/// The engines that transfer on the volume's file.
fn real_engines() -> Vec<Open> {
    let directory = tempfile::tempdir().unwrap();
    let volume = Volume::create(directory.path(), true).unwrap();
    match RingEngine::new(volume.file(), EngineOptions::default()) {
        Ok(_) => vec![threads, ring, polled_by_a_kernel_thread],
        Err(error) => {
            eprintln!("ring engine not tested: {error}");
            vec![threads]
        }
    }
}

fn engines() -> Vec<Open> {
    let mut engines = real_engines();
    engines.push(sim);
    engines
}

/// A fresh volume with an engine on it.
struct Setup {
    engine: Option<Arc<dyn Engine>>,
    volume: Volume,
    _directory: tempfile::TempDir,
}

impl Setup {
    fn new(open: Open, bytes: usize) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let volume = Volume::create(directory.path(), true).unwrap();
        volume.reserve(bytes as u64).unwrap();
        Self { engine: Some(open(&volume)), volume, _directory: directory }
    }

    fn engine(&self) -> &dyn Engine {
        &**self.engine.as_ref().unwrap()
    }

    fn start(&self, operation: Operation, offset: usize, buffer: LeaseSlice) -> Receiver<Completion> {
        start(self.engine(), operation, offset, buffer)
    }
}

fn pool(bytes: usize, count: usize) -> Pool {
    Pool::new(&PageableAllocator::default(), &[SizeClass::new("test", bytes, count)]).unwrap()
}

fn lease(pool: &Pool, bytes: usize) -> Arc<Lease> {
    Arc::new(pool.try_lease(bytes).unwrap().expect("the pool has a free buffer"))
}

fn start(
    engine: &dyn Engine,
    operation: Operation,
    offset: usize,
    buffer: LeaseSlice,
) -> Receiver<Completion> {
    let (sender, receiver) = mpsc::channel();
    engine.submit(Request {
        operation,
        offset: offset as u64,
        buffer,
        on_complete: Box::new(move |completion| drop(sender.send(completion))),
    });
    receiver
}

fn wait(receiver: &Receiver<Completion>) -> Completion {
    receiver.recv_timeout(Duration::from_secs(30)).expect("every request completes")
}

#[test]
fn what_was_written_is_read_back_at_every_size() {
    for open in engines() {
        for registered in [false, true] {
            let setup = Setup::new(open, 64 * MIB);
            let pool = pool(9 * MIB, 2);
            if registered {
                setup.engine().register(&pool);
            }
            let mut offset = 0;
            for bytes in [BLOCK_BYTES, 3 * BLOCK_BYTES, MIB, MIB + BLOCK_BYTES, 9 * MIB] {
                let source = LeaseSlice::new(lease(&pool, bytes), 0, bytes);
                // SAFETY: the only handle to the range.
                for (index, byte) in unsafe { source.as_mut_slice() }.iter_mut().enumerate() {
                    *byte = (index / 7 + offset) as u8;
                }
                let written = wait(&setup.start(Operation::Write, offset, source));
                written.result.unwrap();
                setup.engine().flush().unwrap();
                let target = LeaseSlice::new(lease(&pool, bytes), 0, bytes);
                let read = wait(&setup.start(Operation::Read, offset, target));
                read.result.unwrap();
                // SAFETY: both transfers have completed, so that nothing writes.
                let same = unsafe { read.buffer.as_slice() == written.buffer.as_slice() };
                assert!(same, "{} {bytes}", setup.engine().name());
                offset += bytes;
            }
            let counters = setup.engine().counters();
            assert_eq!((counters.reads.bytes, counters.writes.bytes), (offset as u64, offset as u64));
            assert_eq!((counters.reads.requests, counters.writes.requests), (5, 5));
            assert!(counters.busy > Duration::ZERO && counters.bytes_per_busy_second() > 0.0);
            assert!(counters.reads.latency_p50 <= counters.reads.latency_max);
            let features = setup.engine().features();
            if registered && setup.engine().name() == "ring" {
                assert!(features.iter().any(|name| name == "registered_buffers"), "{features:?}");
            }
        }
    }
}

#[test]
fn a_read_past_the_end_is_an_error_that_names_the_place() {
    for open in real_engines() {
        let setup = Setup::new(open, MIB);
        let pool = pool(2 * MIB, 1);
        let buffer = LeaseSlice::new(lease(&pool, 2 * MIB), 0, 2 * MIB);
        let completion = wait(&setup.start(Operation::Read, 0, buffer));
        let error = completion.result.unwrap_err();
        let message = error.to_string();
        assert!(message.contains("read of 2097152 bytes at offset 0"), "{message}");
        assert!(message.contains("memascend.volume"), "{message}");
        assert!(message.contains("made shorter"), "{message}");
        assert_eq!(error.errno(), Some(5));
        drop(completion.buffer);
        assert_eq!(pool.counters().live_bytes, 0, "an error hands the buffer back too");
        assert_eq!(setup.engine().counters().reads.failures, 1);
    }
}

#[test]
fn a_transfer_that_no_drive_can_carry_out_is_refused_by_name() {
    for open in real_engines() {
        let setup = Setup::new(open, MIB);
        if setup.volume.file().geometry().block_bytes == 1 {
            eprintln!("not tested: the filesystem refuses O_DIRECT");
            return;
        }
        let pool = pool(BLOCK_BYTES, 1);
        for (offset, start, bytes) in [(100, 0, BLOCK_BYTES), (0, 0, 100), (0, 1, 512), (0, 0, 0)] {
            let buffer = LeaseSlice::new(lease(&pool, BLOCK_BYTES), start, bytes);
            let error = wait(&setup.start(Operation::Write, offset, buffer)).result.unwrap_err();
            assert_eq!(error.errno(), Some(22), "{error}");
            assert!(!error.hint().is_empty(), "{error}");
        }
    }
}

#[test]
fn many_requests_from_many_threads_all_complete() {
    for open in engines() {
        let setup = Setup::new(open, 64 * MIB);
        let barrier = Barrier::new(4);
        std::thread::scope(|scope| {
            for thread in 0..4_usize {
                let (engine, barrier) = (setup.engine(), &barrier);
                scope.spawn(move || {
                    let pool = pool(3 * BLOCK_BYTES, 64);
                    barrier.wait();
                    for operation in [Operation::Write, Operation::Read] {
                        let receivers: Vec<_> = (0..64_usize)
                            .map(|index| {
                                let buffer =
                                    LeaseSlice::new(lease(&pool, 3 * BLOCK_BYTES), 0, 3 * BLOCK_BYTES);
                                if operation == Operation::Write {
                                    // SAFETY: the only handle to the range.
                                    unsafe { buffer.as_mut_slice() }.fill((thread * 64 + index) as u8);
                                }
                                let offset = (thread * 64 + index) * 3 * BLOCK_BYTES;
                                start(engine, operation, offset, buffer)
                            })
                            .collect();
                        for (index, receiver) in receivers.iter().enumerate() {
                            let completion = wait(receiver);
                            completion.result.unwrap();
                            // SAFETY: the transfer has completed.
                            let bytes = unsafe { completion.buffer.as_slice() };
                            assert!(bytes.iter().all(|byte| *byte == (thread * 64 + index) as u8));
                        }
                    }
                });
            }
        });
        let counters = setup.engine().counters();
        assert_eq!((counters.in_flight, counters.reads.requests), (0, 256));
        assert!(counters.in_flight_max > 1 || setup.engine().name() == "sim");
    }
}

#[test]
fn a_small_request_does_not_wait_behind_a_large_one() {
    for open in real_engines() {
        // Far more than is ever in flight at once.
        let setup = Setup::new(open, 256 * MIB);
        let pools = (pool(256 * MIB, 1), pool(BLOCK_BYTES, 1));
        let large =
            setup.start(Operation::Write, 0, LeaseSlice::new(lease(&pools.0, 256 * MIB), 0, 256 * MIB));
        let small =
            setup.start(Operation::Read, 0, LeaseSlice::new(lease(&pools.1, BLOCK_BYTES), 0, BLOCK_BYTES));
        wait(&small).result.unwrap();
        assert!(large.try_recv().is_err(), "{}: the large one was first", setup.engine().name());
        wait(&large).result.unwrap();
    }
}

#[test]
fn dropping_an_engine_with_transfers_in_flight_completes_them_first() {
    for open in engines() {
        let mut setup = Setup::new(open, 64 * MIB);
        let pool = pool(4 * MIB, 8);
        let receivers: Vec<_> = (0..8)
            .map(|index| {
                let buffer = LeaseSlice::new(lease(&pool, 4 * MIB), 0, 4 * MIB);
                setup.start(Operation::Write, index * 4 * MIB, buffer)
            })
            .collect();
        drop(setup.engine.take());
        for receiver in &receivers {
            receiver.try_recv().expect("completed before the engine was gone").result.unwrap();
        }
        assert_eq!(pool.counters().live_bytes, 0);
    }
}

#[test]
fn an_engine_may_come_and_go_at_any_moment() {
    let directory = tempfile::tempdir().unwrap();
    let volume = Volume::create(directory.path(), true).unwrap();
    for open in engines() {
        for _ in 0..100 {
            drop(open(&volume));
        }
    }
}

#[test]
fn a_callback_that_panics_leaves_the_engine_serving() {
    for open in engines() {
        let setup = Setup::new(open, MIB);
        let pool = pool(BLOCK_BYTES, 1);
        for _ in 0..8 {
            let (sender, receiver) = mpsc::channel::<()>();
            setup.engine().submit(Request {
                operation: Operation::Write,
                offset: 0,
                buffer: LeaseSlice::new(lease(&pool, BLOCK_BYTES), 0, BLOCK_BYTES),
                on_complete: Box::new(move |completion| {
                    drop(completion);
                    let _sender = sender;
                    panic!("this panic is part of the test");
                }),
            });
            receiver.recv().unwrap_err();
        }
        let buffer = LeaseSlice::new(lease(&pool, BLOCK_BYTES), 0, BLOCK_BYTES);
        wait(&setup.start(Operation::Read, 0, buffer)).result.unwrap();
    }
}
