//! Gradients come down one behind the other: pieces share events, and nothing waits in between.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use memascend_exec::{Capture, GradientId, InFlightCounter};
use memascend_kernels::Dtype;
use memascend_mem::{LeaseSlice, round_up_to_page};

use crate::rig::{BLOCK, Rig, Sums, Timing, assert_same, device_failure, until};
use crate::support::gradients::stats;
use crate::support::{Random, within_patience};

/// Gradients with the sums of their blocks, and where each is kept.
struct Made {
    values: Vec<Vec<u8>>,
    sums: Vec<Sums>,
    ids: Vec<GradientId>,
    pendings: Vec<Arc<InFlightCounter>>,
}

impl Made {
    fn new(rig: &Rig, sizes: &[usize]) -> Self {
        let mut random = Random(sizes.len() as u64);
        let values: Vec<_> = sizes.iter().map(|numel| random.values(Dtype::Bf16, *numel)).collect();
        let sums = values.iter().map(|values| Sums::of(Dtype::Bf16, values)).collect();
        let (ids, pendings) = sizes.iter().map(|numel| rig.create(Dtype::Bf16, *numel)).unzip();
        Self { values, sums, ids, pendings }
    }

    /// Captures all. The thread begins with the first when it knows of the last.
    fn capture(&self, rig: &Rig) -> Vec<Capture> {
        let underway = self.pendings[0].begin();
        let made = self.values.iter().zip(&self.sums).zip(&self.ids);
        let captures = made
            .map(|((values, sums), id)| rig.capture(*id, 0, Dtype::Bf16, values, false, Some(sums)).unwrap())
            .collect();
        underway.end(Ok(()));
        captures
    }

    fn assert_kept(&self, rig: &Rig, captures: &[Capture]) {
        for ((values, id), capture) in self.values.iter().zip(&self.ids).zip(captures) {
            assert_same(capture.wait().unwrap(), stats(Dtype::Bf16, values), "statistics");
            assert!(rig.read(*id, values.len()) == *values);
        }
    }
}

#[test]
fn pieces_share_events_that_are_used_again() {
    within_patience("events", || {
        let rig = Rig::new(80, Timing::AT_ONCE);
        let made = Made::new(&rig, &[32 * BLOCK, 20 * BLOCK, 4 * BLOCK, 700]);
        let pieces = 32 + 20 + 4 + 1;
        for round in 0..5 {
            let before = |call| rig.fake.calls(call);
            let (records, created) = (before(c"cudaEventRecord"), before(c"cudaEventCreateWithFlags"));
            let waits = rig.link.counters().waits_worker;
            rig.hold();
            let captures = made.capture(&rig);
            until("32 pieces are on their way", || {
                rig.fake.get(c"fake_d2h_copies") >= round * (pieces + 4) + 32
            });
            rig.go_on();
            made.assert_kept(&rig, &captures);
            let (records, created) =
                (before(c"cudaEventRecord") - records, before(c"cudaEventCreateWithFlags") - created);
            let waits = rig.link.counters().waits_worker - waits;
            // An event for each of 4 gradients says that it is computed. 57 pieces and 4 times sums share the others;
            // events of the last gradients may have to be divided, where a thread finds nothing else to do.
            assert!(records <= 4 + pieces / 8 + 4, "{records} events for {pieces} pieces");
            assert!(waits as usize <= pieces / 8 + 4, "{waits} waits for {pieces} pieces");
            assert!(round == 0 || created <= 1, "{created} events were created in round {round}");
            assert_eq!(rig.fake.get(c"fake_d2h_copies"), (round + 1) * (pieces + 4));
        }
        made.ids.iter().for_each(|id| rig.gradients.clear(*id));
        rig.end();
    });
}

#[test]
fn the_next_gradient_is_enqueued_before_one_has_arrived() {
    within_patience("ahead", || {
        let rig = Rig::new(30, Timing::AT_ONCE);
        let made = Made::new(&rig, &[3 * BLOCK, 2 * BLOCK, 5]);
        rig.hold();
        let captures = made.capture(&rig);
        until("all are enqueued, with their sums", || rig.fake.get(c"fake_d2h_copies") == 6 + 3);
        assert!(captures.iter().all(|capture| !capture.is_done()));
        rig.go_on();
        made.assert_kept(&rig, &captures);
        made.ids.iter().for_each(|id| rig.gradients.clear(*id));
        rig.end();
    });
}

/// Gradients that come to the same record, or with a chunk on the SSD, in any schedule and with any number of
/// chunks and threads.
#[test]
fn captures_that_follow_each_other_are_those_of_one_after_the_other() {
    for (staging_chunks, threads, timing) in [
        (2, 1, Timing::all()[2]),
        (3, 4, Timing::all()[1]),
        (11, 3, Timing::all()[0]),
        (60, 2, Timing::all()[2]),
    ] {
        let what = format!("{staging_chunks} chunks, {threads} threads, {timing:?}");
        within_patience(&what.clone(), move || {
            let rig = Rig::adding_in(staging_chunks, threads, timing);
            let (dtype, numel) = (Dtype::F32, 7 * BLOCK + 99);
            let mut random = Random(3);
            let ids: Vec<_> = (0..2).map(|_| rig.create(dtype, numel).0).collect();
            let lease = Arc::new(rig.packs.try_lease(200_000 * 4).unwrap().unwrap());
            let pack = rig.gradients.create_packed(
                dtype,
                200_000,
                LeaseSlice::new(lease, 0, round_up_to_page(200_000 * 4)),
            );
            let (mut captures, mut parts) = (Vec::new(), Vec::new());
            for _ in 0..3 {
                parts.push([numel, numel, 150_000].map(|numel| random.values(dtype, numel)));
            }
            for (micro_batch, parts) in parts.iter().enumerate() {
                let accumulate = micro_batch > 0;
                for (part, (id, start)) in parts.iter().zip([(ids[0], 0), (ids[1], 0), (pack, 50)]) {
                    captures.push(rig.capture(id, start, dtype, part, accumulate, None).unwrap());
                }
            }
            let sum = |which: usize, count: usize| {
                let mut sum: Vec<u8> = parts[0][which].clone();
                for addends in &parts[1..count] {
                    for (sum, addend) in sum.as_chunks_mut().0.iter_mut().zip(addends[which].as_chunks().0) {
                        *sum = (f32::from_ne_bytes(*sum) + f32::from_ne_bytes(*addend)).to_ne_bytes();
                    }
                }
                sum
            };
            for (index, capture) in captures.iter().enumerate() {
                let expected = stats(dtype, &sum(index % 3, index / 3 + 1));
                assert_same(capture.wait().unwrap(), expected, &format!("{what}: {index}"));
            }
            for (which, id) in ids.into_iter().enumerate() {
                assert!(rig.read(id, numel * 4) == sum(which, 3), "{what}");
                rig.gradients.clear(id);
            }
            assert!(rig.read(pack, 150_050 * 4)[50 * 4..] == sum(2, 3), "{what}: pack");
            rig.end();
        });
    }
}

/// An addition to a chunk on its way to the SSD must not take its place.
#[test]
fn a_sum_waits_for_the_gradient_that_it_is_added_to() {
    within_patience("one gradient", || {
        for blocks in 3..9 {
            let rig = Rig::new(12, Timing::AT_ONCE);
            let (dtype, numel) = (Dtype::F32, blocks * BLOCK);
            let (id, pending) = rig.create(dtype, numel);
            let mut random = Random(blocks as u64);
            let parts: Vec<_> = (0..2).map(|_| random.values(dtype, numel)).collect();
            let underway = pending.begin();
            let captures = [0, 1].map(|at| rig.capture(id, 0, dtype, &parts[at], at > 0, None).unwrap());
            underway.end(Ok(()));
            let mut sum = parts[0].clone();
            for (sum, addend) in sum.as_chunks_mut().0.iter_mut().zip(parts[1].as_chunks().0) {
                *sum = (f32::from_ne_bytes(*sum) + f32::from_ne_bytes(*addend)).to_ne_bytes();
            }
            for (capture, values) in captures.iter().zip([&parts[0], &sum]) {
                assert_same(capture.wait().unwrap(), stats(dtype, values), &format!("{blocks} blocks"));
            }
            assert!(rig.read(id, numel * 4) == sum, "{blocks} blocks");
            rig.gradients.clear(id);
            rig.end();
        }
    });
}

/// A capture takes its pieces over one group after the other, and a reader may come between any two.
#[test]
fn a_reader_finds_a_gradient_whole() {
    for staging_chunks in [12, 60] {
        within_patience("a reader beside captures", move || {
            let rig = Rig::new(staging_chunks, Timing { lazy: true, seed: 9, lateness: 3 });
            let bytes = 30 * BLOCK * 2;
            let made: Vec<_> = (1..=40_u8).map(|value| vec![value; bytes]).collect();
            let (id, _) = rig.create(Dtype::Bf16, 30 * BLOCK);
            let ended = AtomicBool::new(false);
            std::thread::scope(|scope| {
                let (rig, ended) = (&rig, &ended);
                let reader = scope.spawn(move || {
                    while !ended.load(Ordering::Relaxed) {
                        let found = rig.read(id, bytes);
                        assert!(found.iter().all(|byte| *byte == found[0]), "parts of two gradients");
                    }
                });
                let captures: Vec<_> = made
                    .iter()
                    .map(|values| rig.capture(id, 0, Dtype::Bf16, values, false, None).unwrap())
                    // The reader begins between two captures.
                    .inspect(|capture| assert!(capture.wait().is_ok()))
                    .collect();
                assert!(captures.iter().all(|capture| capture.wait().is_ok()));
                ended.store(true, Ordering::Relaxed);
                reader.join().unwrap();
            });
            rig.gradients.clear(id);
            rig.end();
        });
    }
}

/// Whichever call of CUDA fails, and when: each gradient is whole or told to be lost, later ones are whole, and every
/// chunk comes back that no copy may be using.
#[test]
fn a_failure_harms_no_gradient_beside_it() {
    for call in [c"cudaMemcpyAsync", c"cudaEventRecord", c"cudaStreamWaitEvent", c"cudaEventSynchronize"] {
        for spared in [0, 1, 3, 9, 13, 20, 22] {
            within_patience("failing calls", move || {
                let rig = Rig::new(60, Timing::all()[spared % 3]);
                let made = Made::new(&rig, &[12 * BLOCK, 9 * BLOCK]);
                let after = Made::new(&rig, &[5 * BLOCK]);
                let computed = [0, 1].map(|index| rig.computed(&made.values[index]));
                let underway = made.pendings[0].begin();
                rig.fake.set(c"fake_set_spared_calls", spared);
                rig.fake.fail(call, 719);
                let captures: Vec<_> = computed
                    .into_iter()
                    .enumerate()
                    .map(|(at, ready)| {
                        rig.capture_after(made.ids[at], &made.values[at], &made.sums[at], ready)
                    })
                    .collect();
                underway.end(Ok(()));
                let results: Vec<_> = captures.iter().map(Capture::wait).collect();
                rig.fake.fail(call, 0);
                for (at, result) in results.into_iter().enumerate() {
                    let (id, values) = (made.ids[at], &made.values[at]);
                    match result {
                        Ok(found) => {
                            assert_same(found, stats(Dtype::Bf16, values), "beside a failure");
                            assert!(rig.read(id, values.len()) == *values);
                        }
                        failed => {
                            assert!(device_failure(failed).contains(call.to_str().unwrap()));
                            let kept = rig.read(id, values.len());
                            assert!(kept.iter().all(|byte| *byte == 0), "a part of it was kept");
                        }
                    }
                }
                after.assert_kept(&rig, &after.capture(&rig));
                made.ids.iter().chain(&after.ids).for_each(|id| rig.gradients.clear(*id));
                if call == c"cudaEventRecord" {
                    // Memory without an event is never used again.
                    assert!((rig.chunks.counters().fenced_bytes > 0) == (rig.fake.failures(call) > 0));
                    rig.link.close();
                } else {
                    rig.end();
                }
            });
        }
    }
}

/// An omitted wait of the thread is noticed: the measurements are not there yet, or its event is recorded
/// again too early.
#[test]
fn every_wait_for_pieces_is_needed() {
    for skipped in 1..=3 {
        within_patience("a wait left out", move || {
            let rig = Rig::new(60, Timing { lazy: true, seed: 3, lateness: 1000 });
            let made = Made::new(&rig, &[20 * BLOCK, 3 * BLOCK]);
            rig.fake.set(c"fake_set_skip_sync", skipped);
            let mut wrong = 0;
            for _ in 0..2 {
                for (values, id) in made.values.iter().zip(&made.ids) {
                    let capture = rig.capture(*id, 0, Dtype::Bf16, values, false, None).unwrap();
                    let (found, expected) = (capture.wait().unwrap(), stats(Dtype::Bf16, values));
                    wrong += usize::from(found.sum_squares.to_bits() != expected.sum_squares.to_bits());
                }
            }
            assert!(rig.fake.get(c"fake_syncs") >= skipped, "fewer than {skipped} waits");
            let seen = wrong + rig.fake.get(c"fake_early_reuses") + rig.fake.get(c"fake_races");
            assert!(seen > 0, "wait {skipped} was left out, and nothing saw it");
            rig.link.close();
        });
    }
}
