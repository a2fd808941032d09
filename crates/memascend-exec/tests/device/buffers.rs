//! Memory of the host is given back when no copy uses it, and not before.

use std::sync::Arc;

use memascend_kernels::Dtype;

use crate::rig::{BLOCK, Rig, Timing, device_failure, fill, until};
use crate::support::within_patience;

#[test]
fn a_lease_that_is_copied_from_returns_after_the_copy() {
    within_patience("upload", || {
        let rig = Rig::new(2, Timing::AT_ONCE);
        let bytes = rig.staging.chunk_bytes();
        let mut target = vec![0; bytes];
        let upload = |lease: &Arc<_>, target: &mut [u8]| {
            let before = rig.computed(target);
            // SAFETY: the target is left alone until the event.
            unsafe { rig.link.upload(lease, 4096, 1000, target.as_mut_ptr().addr(), &[before]) }.unwrap()
        };
        let leases: Vec<_> =
            (0..2).map(|_| Arc::new(rig.chunks.try_lease(bytes).unwrap().unwrap())).collect();
        fill(&leases[0], 7);
        rig.hold();
        let event = upload(&leases[0], &mut target);
        assert!(!event.is_done().unwrap());
        drop(leases);
        assert_eq!(rig.chunks.counters().fenced_bytes, bytes, "one of two is being copied from");
        let other = rig.chunks.try_lease(bytes).unwrap().unwrap();
        assert!(rig.chunks.try_lease(bytes).unwrap().is_none(), "the device still reads it");
        rig.go_on();
        rig.use_after(&event, &target[..1000]);
        assert!(target[..1000].iter().all(|byte| *byte == 7) && target[1000..].iter().all(|byte| *byte == 0));
        // One that is kept and copied from in every step.
        let kept = Arc::new(rig.chunks.try_lease(bytes).unwrap().expect("the copy is done"));
        for _ in 0..100 {
            let event = upload(&kept, &mut target);
            rig.use_after(&event, &target[..1000]);
            event.wait().unwrap();
        }
        let events = rig.fake.get(c"fake_live_events");
        assert!(events <= 8, "{events} events gather");
        let counters = rig.link.counters();
        assert_eq!((counters.h2d_copies, counters.h2d_bytes), (101, 101_000));
        drop((other, kept, event));
        rig.end();
    });
}

#[test]
fn what_was_dropped_is_given_up_when_no_copy_uses_it() {
    for spill in [false, true] {
        within_patience("dropped", move || {
            let rig = Rig::new(20, Timing::AT_ONCE);
            let used = rig.bench.store.used_bytes();
            let source: Vec<u8> = (0..3_000_000).map(|index| index as u8).collect();
            let mut target = vec![0; source.len()];
            rig.hold();
            let stash = rig.stash(&source, spill);
            drop(rig.restore(&stash, &mut target));
            drop(stash);
            let (id, _) = rig.create(Dtype::F32, 5 * BLOCK);
            let gradient = source[..5 * BLOCK * 4].to_vec();
            drop(rig.capture(id, 0, Dtype::F32, &gradient, false, None).unwrap());
            until("the first pieces are on their way", || rig.chunks_live() > 0);
            rig.go_on();
            rig.gradients.clear(id);
            rig.link.close();
            assert!(target == source, "the copy ends all the same, with nothing but what was asked for");
            assert_eq!(rig.bench.store.used_bytes() - used, 5 * BLOCK as u64 * 4, "the gradient's room");
            rig.end();
        });
    }
}

#[test]
fn a_buffer_whose_copy_may_never_be_known_to_end_is_never_used_again() {
    within_patience("no event", || {
        let rig = Rig::new(3, Timing::AT_ONCE);
        let part = vec![1; 1000];
        let ready = rig.computed(&part);
        rig.fake.fail(c"cudaEventRecord", 719);
        // SAFETY: the source lives, unchanged, until the end.
        let stash =
            unsafe { rig.link.stash(&rig.staging, part.as_ptr().addr(), part.len(), &ready, true) }.unwrap();
        assert!(device_failure(stash.wait_copied()).contains("cudaEventRecord"));
        rig.fake.fail(c"cudaEventRecord", 0);
        assert_eq!(rig.chunks.counters().fenced_bytes, rig.staging.chunk_bytes());
        let fake = Arc::clone(&rig.fake);
        drop((stash, ready, rig));
        assert_eq!(fake.get(c"fake_live_allocations"), 1, "the device may be using it still");
    });
}
