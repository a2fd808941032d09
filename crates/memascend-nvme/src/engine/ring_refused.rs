//! A ring that the kernel takes nothing from any more: errors, and neither a panic nor a hang.

use memascend_mem::{LeaseSlice, PageableAllocator, Pool, SizeClass};

use super::*;
use crate::{BLOCK_BYTES, Completion, Volume};

#[test]
fn all_requests_end_with_the_error_and_their_buffers_are_not_used_again() {
    let root = tempfile::tempdir().unwrap();
    let volume = Volume::create(&root.path().join("volume"), true).unwrap();
    volume.reserve(4 * BLOCK_BYTES as u64).unwrap();
    let Ok(engine) = RingEngine::new(volume.file(), EngineOptions::default()) else { return };
    let pool = Pool::new(&PageableAllocator::default(), &[SizeClass::new("test", BLOCK_BYTES, 8)]).unwrap();
    let (told, heard) = unbounded();
    let submit = |operation| {
        let lease = Arc::new(pool.try_lease(BLOCK_BYTES).unwrap().unwrap());
        let told = told.clone();
        let on_complete = Box::new(move |Completion { buffer, result }| {
            drop(buffer);
            told.send(result.map_err(|error| error.errno())).unwrap();
        });
        let buffer = LeaseSlice::new(lease, 0, BLOCK_BYTES);
        engine.submit(Request { operation, offset: 0, buffer, on_complete });
        heard.recv_timeout(Duration::from_secs(20)).unwrap()
    };
    assert_eq!(submit(Operation::Write), Ok(()));
    engine.ring.mailbox.wake.refusal.store(libc::ENXIO, Ordering::SeqCst);
    for (failures, operation) in [Operation::Read, Operation::Write, Operation::Read].into_iter().enumerate()
    {
        assert_eq!(submit(operation), Err(Some(libc::ENXIO)));
        assert_eq!(pool.free_buffers(BLOCK_BYTES), 7 - failures, "the kernel may still write to it");
    }
    drop(engine);
}
