//! Every engine moves real bytes on a real file, reports failures and survives being dropped.

use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Barrier};
use std::time::Duration;

use memascend_mem::{Lease, LeaseSlice, PageableAllocator, Pool, SizeClass};
use memascend_nvme::{
    BLOCK_BYTES, Completion, Engine, Faults, IoError, Operation, Request, RingEngine, SimEngine,
    ThreadsEngine, Volume,
};

const MIB: usize = 1 << 20;

fn engines() -> Vec<Arc<dyn Engine>> {
    let mut engines: Vec<Arc<dyn Engine>> =
        vec![Arc::new(ThreadsEngine::new(3)), Arc::new(SimEngine::new(Faults::default()))];
    match RingEngine::new() {
        Ok(ring) => engines.push(Arc::new(ring)),
        Err(error) => eprintln!("ring engine not tested: {error}"),
    }
    engines
}

fn pool(bytes: usize, count: usize) -> Pool {
    Pool::new(&PageableAllocator, &[SizeClass { consumer: "test".into(), bytes, count }]).unwrap()
}

fn lease(pool: &Pool, bytes: usize) -> Arc<Lease> {
    Arc::new(pool.try_lease(bytes).unwrap().expect("the pool has a free buffer"))
}

fn start(
    engine: &dyn Engine,
    volume: &Volume,
    operation: Operation,
    offset: usize,
    buffer: LeaseSlice,
) -> Receiver<Completion> {
    let (sender, receiver) = mpsc::channel();
    engine.submit(Request {
        operation,
        file: Arc::clone(volume.file()),
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
    let directory = tempfile::tempdir().unwrap();
    for engine in engines() {
        let volume = Volume::create(directory.path(), true).unwrap();
        volume.reserve(64 << 20).unwrap();
        let pool = pool(9 * MIB, 2);
        let mut offset = 0;
        for bytes in [BLOCK_BYTES, 3 * BLOCK_BYTES, MIB, MIB + BLOCK_BYTES, 9 * MIB] {
            let source = LeaseSlice::new(lease(&pool, bytes), 0, bytes);
            // SAFETY: the only handle to the range.
            for (index, byte) in unsafe { source.as_mut_slice() }.iter_mut().enumerate() {
                *byte = (index / 7 + offset) as u8;
            }
            let written = wait(&start(&*engine, &volume, Operation::Write, offset, source));
            written.result.unwrap();
            let target = LeaseSlice::new(lease(&pool, bytes), 0, bytes);
            let read = wait(&start(&*engine, &volume, Operation::Read, offset, target));
            read.result.unwrap();
            // SAFETY: both transfers have completed; nobody writes.
            let same = unsafe { read.buffer.as_slice() == written.buffer.as_slice() };
            assert!(same, "{} {bytes}", engine.name());
            offset += bytes;
        }
        assert_eq!(engine.counters().bytes_read, offset as u64);
        assert_eq!(engine.counters().bytes_written, offset as u64);
    }
}

#[test]
fn a_read_past_the_end_is_an_error_that_names_the_place() {
    let directory = tempfile::tempdir().unwrap();
    for engine in engines().into_iter().filter(|engine| engine.name() != "sim") {
        let volume = Volume::create(directory.path(), true).unwrap();
        volume.reserve(MIB as u64).unwrap();
        let pool = pool(2 * MIB, 1);
        let buffer = LeaseSlice::new(lease(&pool, 2 * MIB), 0, 2 * MIB);
        let completion = wait(&start(&*engine, &volume, Operation::Read, 0, buffer));
        let message = completion.result.unwrap_err().to_string();
        assert!(message.contains("read of 2097152 bytes at offset 0"), "{message}");
        assert!(message.contains("memascend.volume"), "{message}");
        drop(completion.buffer);
        assert_eq!(pool.counters().live_bytes, 0, "an error hands the buffer back too");
    }
}

#[test]
fn many_requests_from_many_threads_all_complete() {
    let directory = tempfile::tempdir().unwrap();
    for engine in engines() {
        let volume = Volume::create(directory.path(), true).unwrap();
        volume.reserve(64 << 20).unwrap();
        let barrier = Barrier::new(4);
        std::thread::scope(|scope| {
            for thread in 0..4_usize {
                let (engine, volume, barrier) = (&engine, &volume, &barrier);
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
                                start(&**engine, volume, operation, offset, buffer)
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
    }
}

#[test]
fn dropping_an_engine_with_transfers_in_flight_completes_them_first() {
    let directory = tempfile::tempdir().unwrap();
    for engine in engines().into_iter().filter(|engine| engine.name() != "sim") {
        let volume = Volume::create(directory.path(), true).unwrap();
        volume.reserve(64 << 20).unwrap();
        let pool = pool(4 * MIB, 8);
        let receivers: Vec<_> = (0..8)
            .map(|index| {
                let buffer = LeaseSlice::new(lease(&pool, 4 * MIB), 0, 4 * MIB);
                start(&*engine, &volume, Operation::Write, index * 4 * MIB, buffer)
            })
            .collect();
        drop(engine);
        for receiver in &receivers {
            receiver.try_recv().expect("completed before the engine was gone").result.unwrap();
        }
        assert_eq!(pool.counters().live_bytes, 0);
    }
}

#[test]
fn an_engine_may_come_and_go_at_any_moment() {
    for _ in 0..100 {
        drop(engines());
    }
}

#[test]
fn a_callback_that_panics_leaves_the_engine_serving() {
    let directory = tempfile::tempdir().unwrap();
    for engine in engines().into_iter().filter(|engine| engine.name() != "sim") {
        let volume = Volume::create(directory.path(), true).unwrap();
        volume.reserve(MIB as u64).unwrap();
        let pool = pool(BLOCK_BYTES, 1);
        for _ in 0..8 {
            let (sender, receiver) = mpsc::channel::<()>();
            engine.submit(Request {
                operation: Operation::Write,
                file: Arc::clone(volume.file()),
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
        wait(&start(&*engine, &volume, Operation::Read, 0, buffer)).result.unwrap();
    }
}

#[test]
fn simulated_faults_follow_their_seed_and_reach_the_caller() {
    let directory = tempfile::tempdir().unwrap();
    let volume = Volume::create(directory.path(), true).unwrap();
    let run = |seed: u64| -> Vec<bool> {
        let engine = SimEngine::new(Faults { seed, write_error_one_in: 3, reorder: 4, ..Faults::default() });
        let pool = pool(BLOCK_BYTES, 64);
        let receivers: Vec<_> = (0..64)
            .map(|index| {
                let buffer = LeaseSlice::new(lease(&pool, BLOCK_BYTES), 0, BLOCK_BYTES);
                start(&engine, &volume, Operation::Write, index * BLOCK_BYTES, buffer)
            })
            .collect();
        engine.drain();
        receivers
            .iter()
            .map(|receiver| match wait(receiver).result {
                Ok(()) => true,
                Err(error @ IoError::Transfer { .. }) => {
                    assert_eq!(error.errno(), Some(28));
                    false
                }
                Err(other) => panic!("{other}"),
            })
            .collect()
    };
    let outcome = run(7);
    assert_eq!(outcome, run(7), "seed 7 repeats");
    assert!(outcome.contains(&true) && outcome.contains(&false));
    assert_ne!(outcome, run(8), "another seed gives other faults");
}
