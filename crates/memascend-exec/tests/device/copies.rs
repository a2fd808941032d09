//! Stored bytes come back, in order, and a failed copy is reported.

use std::ptr::NonNull;
use std::sync::Arc;

use memascend_exec::{DeviceEvent, ExecError, HostCopy, Stash};
use memascend_kernels::Dtype;

use crate::rig::{BLOCK, RESERVE, Rig, Timing, assert_same, device_failure, until};
use crate::support::gradients::stats;
use crate::support::{Random, within_patience};

#[test]
fn what_is_put_aside_comes_back_as_often_as_wanted() {
    for (staging_chunks, timing) in [3, RESERVE + 3, 30].into_iter().zip(Timing::all()) {
        for spill in [false, true] {
            let what = format!("{staging_chunks} chunks, {timing:?}, spill {spill}");
            within_patience(&what.clone(), move || {
                let rig = Rig::new(staging_chunks, timing);
                let used = rig.bench.store.used_bytes();
                let chunk_bytes = rig.staging.chunk_bytes();
                for bytes in [1, chunk_bytes, 6 * chunk_bytes + 77] {
                    let mut random = Random(bytes as u64);
                    let mut source: Vec<u8> = (0..bytes).map(|_| random.next() as u8).collect();
                    let expected = source.clone();
                    let from_device = rig.stash(&source, spill);
                    from_device.wait_copied().unwrap();
                    assert!(from_device.is_copied());
                    rig.computed(&source);
                    source.fill(0);
                    let from_host = Stash::new(&rig.staging, &expected, spill).unwrap();
                    for stash in [&from_device, &from_host] {
                        for _ in 0..2 {
                            let mut target = vec![0xEE; bytes];
                            let arrived = rig.restore(stash, &mut target).enqueued().unwrap();
                            rig.use_after(&arrived, &target);
                            assert!(target == expected, "{what}: {bytes} bytes on the device");
                        }
                        let mut target = vec![0xEE; bytes];
                        stash.restore(&mut target).unwrap();
                        assert!(target == expected, "{what}: {bytes} bytes in host memory");
                    }
                    let at_most = if spill { 0 } else { staging_chunks.saturating_sub(RESERVE) };
                    // Chunks that were copied from are free once they are asked for.
                    assert!(rig.chunks_live() <= at_most, "{what}: {} chunks kept", rig.chunks_live());
                }
                assert_eq!(rig.bench.store.used_bytes(), used, "{what}: the room on the SSD is given back");
                rig.end();
            });
        }
    }
}

#[test]
fn a_copy_that_fails_is_told_to_what_waits_for_it_and_harms_no_other() {
    for late in [false, true] {
        within_patience("failing copies", move || {
            let rig = Rig::new(20, Timing::AT_ONCE);
            let (dtype, numel) = (Dtype::F32, 9 * BLOCK);
            let part = Random(5).values(dtype, numel);
            let (id, pending) = rig.create(dtype, numel);
            rig.capture(id, 0, dtype, &part, false, None).unwrap().wait().unwrap();
            let whole = rig.stash(&part, false);
            whole.wait_copied().unwrap();
            until("what spilled is written", || rig.chunks_live() == 20 - RESERVE);
            let (mut target, before) = (vec![0; part.len()], rig.fake.calls(c"cudaMemcpyAsync"));
            if late {
                rig.hold();
            } else {
                rig.fake.fail(c"cudaMemcpyAsync", 719);
            }
            let capture = rig.capture(id, 0, dtype, &part, true, None).unwrap();
            if late {
                until("pieces are on their way", || rig.fake.calls(c"cudaMemcpyAsync") == before + 4);
                rig.fake.fail(c"cudaMemcpyAsync", 719);
                rig.go_on();
            }
            let told = device_failure(capture.wait());
            assert!(told.contains("cudaMemcpyAsync") && told.contains("719"), "{told}");
            assert!(device_failure(capture.wait()) == told && capture.is_done());
            let stash = rig.stash(&part, true);
            assert!(device_failure(stash.wait_copied()).contains("cudaMemcpyAsync"));
            assert!(stash.is_copied(), "the source is read no more");
            assert!(device_failure(stash.restore(&mut target)).contains("cudaMemcpyAsync"));
            let restore = rig.restore(&whole, &mut target);
            assert!(device_failure(restore.enqueued()).contains("cudaMemcpyAsync"));
            rig.fake.fail(c"cudaMemcpyAsync", 0);
            assert!(device_failure(rig.restore(&stash, &mut target).enqueued()).contains("cudaMemcpyAsync"));
            // A failed gradient is gone, so that it is not taken for one; all else goes on.
            pending.wait().unwrap();
            assert!(rig.read(id, part.len()).iter().all(|byte| *byte == 0));
            let found = rig.capture(id, 0, dtype, &part, true, None).unwrap().wait().unwrap();
            assert_same(found, stats(dtype, &part), "after the failure");
            assert!(rig.read(id, part.len()) == part);
            let arrived = rig.restore(&whole, &mut target).enqueued().unwrap();
            rig.use_after(&arrived, &target);
            assert!(target == part);
            rig.gradients.clear(id);
            drop((stash, whole, arrived));
            rig.end();
        });
    }
}

/// Copies both halves of `source` to the other half of `target`, which are left alone until the event.
fn swap_halves(rig: &Rig, source: &[u8], target: &mut [u8]) -> DeviceEvent {
    let (half, ready) = (source.len() / 2, rig.computed(source));
    let parts: Vec<_> = target
        .chunks_mut(half)
        .rev()
        .zip(source.chunks(half))
        .map(|(to, from)| HostCopy {
            source: from.as_ptr().addr(),
            bytes: half,
            target: NonNull::from(to).cast(),
        })
        .collect();
    // SAFETY: the caller's promise.
    unsafe { rig.link.download(&parts, &ready) }.unwrap()
}

#[test]
fn parts_are_there_when_the_event_is_done() {
    for timing in Timing::all() {
        within_patience("download", move || {
            let rig = Rig::new(20, timing);
            let (source, mut target) = ([vec![1_u8; 500], vec![2; 500]].concat(), vec![0_u8; 1000]);
            let there = swap_halves(&rig, &source, &mut target);
            there.wait().unwrap();
            assert!(target == [vec![2_u8; 500], vec![1; 500]].concat());
            assert_eq!((rig.link.counters().d2h_copies, rig.link.counters().d2h_bytes), (2, 1000));
            assert_eq!(rig.fake.get(c"fake_races"), 0);
            drop(there);
            rig.end();
        });
    }
}

#[test]
fn a_copy_that_cannot_be_enqueued_is_an_error_of_the_device() {
    within_patience("a download that fails", || {
        let rig = Rig::new(20, Timing::all()[1]);
        let (source, mut target) = (vec![1_u8; 1000], vec![0_u8; 1000]);
        let ready = rig.computed(&source);
        let target_start = NonNull::from(&mut target[..]).cast();
        let copy = HostCopy { source: source.as_ptr().addr(), bytes: 1000, target: target_start };
        rig.fake.fail(c"cudaMemcpyAsync", 719);
        // SAFETY: both are left alone until the end.
        let failed = unsafe { rig.link.download(&[copy], &ready) };
        rig.fake.fail(c"cudaMemcpyAsync", 0);
        assert!(device_failure(failed).contains("cudaMemcpyAsync"));
        assert!(target == vec![0; 1000]);
        rig.link.close();
        // SAFETY: as above.
        assert!(matches!(unsafe { rig.link.download(&[copy], &ready) }, Err(ExecError::Closed)));
        drop(ready);
        rig.end();
    });
}

/// The race detector of the fake sees each order that this module makes: left out, it is missed.
#[test]
fn every_wait_is_needed() {
    for skipped in 1..=5 {
        within_patience("a wait left out", move || {
            // Dropped after the rig, which ends the copies: they are late where a wait is left out.
            let (part, mut target, mut back) = (vec![1_u8; 1000], vec![0_u8; 1000], vec![0_u8; 1000]);
            let rig = Rig::new(20, Timing { lazy: true, seed: 5, lateness: 3 });
            rig.fake.set(c"fake_set_skip_wait", skipped);
            let lease = Arc::new(rig.packs.try_lease(1000).unwrap().unwrap());
            let before = rig.computed(&target);
            // SAFETY: the target is left alone until the event.
            let uploaded =
                unsafe { rig.link.upload(&lease, 0, 1000, target.as_mut_ptr().addr(), &[before]) }.unwrap();
            rig.use_after(&uploaded, &target);
            let stash = rig.stash(&part, false);
            stash.wait_copied().unwrap();
            rig.restore(&stash, &mut back).enqueued().unwrap().wait().unwrap();
            let there = swap_halves(&rig, &part, &mut back);
            there.wait().unwrap();
            assert!(rig.fake.get(c"fake_waits") == 5, "upload, its use, stash, restore, download");
            assert!(rig.fake.get(c"fake_races") > 0, "wait {skipped} orders nothing");
        });
    }
}
