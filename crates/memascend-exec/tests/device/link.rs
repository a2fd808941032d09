//! The link as a whole: its end, and the device that it is of.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use memascend_exec::{DeviceLink, ExecError};
use memascend_kernels::Dtype;

use crate::fake::Fake;
use crate::rig::{BLOCK, COMPUTE, Rig, Timing, assert_same, fill};
use crate::support::gradients::stats;
use crate::support::{Random, within_patience};

#[test]
fn closing_does_what_was_asked_for_and_waits_for_the_device() {
    for timing in Timing::all() {
        within_patience("close", move || {
            let rig = Rig::new(20, timing);
            let (dtype, numel) = (Dtype::Bf16, 4 * BLOCK + 3);
            let part = Random(6).values(dtype, numel);
            let (id, _) = rig.create(dtype, numel);
            let (aside, mut target) = (part.clone(), vec![0; part.len()]);
            let mut weights = vec![0_u8; 4096];
            rig.hold();
            let capture = rig.capture(id, 0, dtype, &part, false, None).unwrap();
            let stash = rig.stash(&aside, false);
            let restore = rig.restore(&stash, &mut target);
            let lease = Arc::new(rig.packs.try_lease(4096).unwrap().unwrap());
            fill(&lease, 9);
            // SAFETY: the target is left alone until the link is closed.
            let upload =
                unsafe { rig.link.upload(&lease, 0, 4096, weights.as_mut_ptr().addr(), &[]) }.unwrap();
            drop(lease);
            thread::scope(|scope| {
                let closer = scope.spawn(|| rig.link.close());
                thread::sleep(Duration::from_millis(30));
                assert!(!closer.is_finished(), "the device is not done");
                rig.go_on();
                closer.join().unwrap();
            });
            assert_eq!(rig.fake.get(c"fake_pending"), 0, "the device has done its part");
            restore.enqueued().unwrap();
            assert!(weights.iter().all(|byte| *byte == 9), "what was on its way to the device is there");
            assert!(target == part, "what was on its way back is there");
            assert_same(capture.wait().unwrap(), stats(dtype, &part), "queued");
            assert!(rig.read(id, part.len()) == part);
            let arrived = restore.enqueued().unwrap();
            assert!(arrived.is_done().unwrap() && upload.is_done().unwrap());
            rig.link.close();
            // SAFETY: nothing is put into the stream.
            assert!(matches!(unsafe { rig.link.record(COMPUTE) }, Err(ExecError::Closed)));
            // SAFETY: the target is left alone.
            let late = unsafe { rig.link.restore(&stash, target.as_mut_ptr().addr(), &arrived) };
            assert!(matches!(late, Err(ExecError::Closed)));
            rig.gradients.clear(id);
            drop((stash, capture, restore, arrived, upload));
            rig.end();
        });
    }
}

#[test]
fn every_copy_is_of_the_device_asked_for_and_the_callers_stays_as_it_is() {
    within_patience("second device", || {
        let fake = Arc::new(Fake::new(&["FAKE_DEVICES=2"]));
        assert!(matches!(DeviceLink::open(fake.open().unwrap(), 2), Err(ExecError::Device(_))));
        let rig = Rig::on(Arc::clone(&fake), 1, 20, Timing::all()[1]);
        assert_eq!((rig.link.index(), fake.device()), (1, 0));
        rig.link.memory().unwrap();
        let part = Random(9).values(Dtype::F32, BLOCK + 1);
        let (id, _) = rig.create(Dtype::F32, BLOCK + 1);
        let capture = rig.capture(id, 0, Dtype::F32, &part, false, None).unwrap();
        let aside = part.clone();
        let stash = rig.stash(&aside, true);
        let mut target = vec![0; part.len()];
        let arrived = rig.restore(&stash, &mut target).enqueued().unwrap();
        rig.use_after(&arrived, &target);
        capture.wait().unwrap();
        assert!(target == part);
        rig.gradients.clear(id);
        drop((arrived, stash));
        assert_eq!((fake.device(), fake.get(c"fake_contexts")), (0, 0b10), "device 0 is not used");
        rig.end();
    });
}
