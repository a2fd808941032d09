//! Gradients from a device are kept, measured and accumulated as those from host memory.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use memascend_exec::{GradientId, Gradients, Staging};
use memascend_kernels::{Dtype, GradientStats};
use memascend_mem::{LeaseSlice, PageableAllocator, Pool, SizeClass, round_up_to_page};

use crate::rig::{BLOCK, CHUNK_ELEMENTS, RESERVE, Rig, Sums, Timing, assert_same};
use crate::support::gradients::stats;
use crate::support::{Bench, Kind, Random, within_patience};

/// A gradient in ordinary memory, as it is captured from there.
struct Reference {
    gradients: Gradients,
    id: GradientId,
    _bench: Bench,
}

impl Reference {
    fn new(dtype: Dtype, numel: usize) -> Self {
        let bench = Bench::new(Kind::Threads, 1);
        let classes = [SizeClass::new("test", CHUNK_ELEMENTS * 4, 40)];
        let pool = Pool::new(&PageableAllocator::default(), &classes).unwrap();
        let staging = Staging::new(Arc::clone(&bench.store), pool, CHUNK_ELEMENTS * 4);
        let gradients = Gradients::new(staging, CHUNK_ELEMENTS);
        let id = gradients.create("w.gradient", dtype, numel, Arc::default()).unwrap();
        Self { gradients, id, _bench: bench }
    }

    fn capture(&self, dtype: Dtype, source: &[u8], accumulate: bool) -> GradientStats {
        let numel = source.len() / dtype.bytes();
        // SAFETY: the source outlives the call, and is not written meanwhile.
        unsafe { self.gradients.capture(self.id, 0, source.as_ptr(), numel, accumulate) }.unwrap()
    }
}

#[test]
fn a_gradient_from_a_device_is_kept_and_measured_as_one_from_host_memory() {
    // Where all spill, where some do, and where none does.
    for (staging_chunks, timing) in [3, RESERVE + 3, 30].into_iter().zip(Timing::all()) {
        for (dtype, measured) in [(Dtype::Bf16, true), (Dtype::F16, false), (Dtype::F32, true)] {
            let what = format!("{staging_chunks} chunks, {timing:?}, {dtype:?}, sums {measured}");
            within_patience(&what.clone(), move || {
                let rig = Rig::new(staging_chunks, timing);
                let numel = 6 * BLOCK + 1234;
                let (id, pending) = rig.create(dtype, numel);
                let reference = Reference::new(dtype, numel);
                let mut random = Random(7);
                for round in 0..2 {
                    let parts: Vec<_> = (0..3).map(|_| random.values(dtype, numel)).collect();
                    let mut expected = vec![0; numel * dtype.bytes()];
                    for (micro_batch, part) in parts.iter().enumerate() {
                        let accumulate = micro_batch > 0;
                        let sums = (measured && !accumulate).then(|| Sums::of(dtype, part));
                        let capture = rig.capture(id, 0, dtype, part, accumulate, sums.as_ref()).unwrap();
                        let found = capture.wait().unwrap();
                        let where_ = format!("{what}, round {round}, micro batch {micro_batch}");
                        assert_same(found, reference.capture(dtype, part, accumulate), &where_);
                        reference.gradients.read(reference.id, &mut expected).unwrap();
                        assert!(rig.read(id, expected.len()) == expected, "{where_}: values");
                        rig.fake.access(part, true); // the copy is over: the memory is the computation's again
                    }
                    pending.wait().unwrap();
                    let kept = staging_chunks.saturating_sub(RESERVE).min(7);
                    assert!(rig.chunks_live() <= kept, "{what}: {} chunks in memory", rig.chunks_live());
                    assert_eq!(rig.chunks_live() == 0, kept == 0, "{what}");
                }
                drop(rig.gradients.take(id));
                assert_eq!(rig.chunks_live(), 0, "{what}: taken");
                rig.end();
            });
        }
    }
}

#[test]
fn an_element_that_is_not_finite_is_told_by_the_host_and_by_the_device() {
    within_patience("not finite", || {
        let rig = Rig::new(20, Timing::AT_ONCE);
        let dtype = Dtype::Bf16;
        for special in [f32::INFINITY, f32::NAN] {
            let mut part = Random(1).values(dtype, 2 * BLOCK + 9);
            part[BLOCK * 2..][..2].copy_from_slice(&((special.to_bits() >> 16) as u16).to_ne_bytes());
            let (id, _) = rig.create(dtype, 2 * BLOCK + 9);
            let sums = Sums::of(dtype, &part);
            for sums in [None, Some(&sums)] {
                let found = rig.capture(id, 0, dtype, &part, false, sums).unwrap().wait().unwrap();
                assert!(found.non_finite);
                assert_same(found, stats(dtype, &part), &format!("{special}"));
            }
            rig.gradients.clear(id);
        }
        rig.end();
    });
}

#[test]
fn captures_into_a_pack_do_not_wait_for_one_another_where_they_are_asked_for() {
    for timing in Timing::all() {
        within_patience("pack", move || {
            let rig = Rig::new(12, timing);
            let (dtype, numel) = (Dtype::F32, 150_000);
            // The second is longer than a chunk.
            let ranges = [(3_usize, 700_usize), (703, 100_000), (120_000, 1), (120_001, 20_000)];
            let lease = Arc::new(rig.packs.try_lease(numel * 4).unwrap().unwrap());
            let buffer = LeaseSlice::new(lease, 0, round_up_to_page(numel * 4));
            // SAFETY: the lease is fresh.
            unsafe { buffer.as_mut_slice() }.fill(0);
            let id = rig.gradients.create_packed(dtype, numel, buffer);
            let mut random = Random(8);
            let mut expected = vec![0; numel * 4];
            for accumulate in [false, true] {
                let parts: Vec<_> = ranges.iter().map(|(_, numel)| random.values(dtype, *numel)).collect();
                let sums: Vec<_> = parts.iter().map(|part| Sums::of(dtype, part)).collect();
                let of = |index: usize| (!accumulate && index % 2 == 1).then(|| &sums[index]);
                rig.hold();
                let captures: Vec<_> = ranges
                    .iter()
                    .enumerate()
                    .map(|(index, (start, _))| {
                        rig.capture(id, *start, dtype, &parts[index], accumulate, of(index)).unwrap()
                    })
                    .collect();
                assert!(captures.iter().all(|capture| !capture.is_done()));
                rig.go_on();
                for ((capture, part), (start, numel)) in captures.iter().zip(&parts).zip(ranges) {
                    let place = &mut expected[start * 4..(start + numel) * 4];
                    for (sum, addend) in place.as_chunks_mut().0.iter_mut().zip(part.as_chunks().0) {
                        let addend = f32::from_ne_bytes(*addend);
                        let before = if accumulate { f32::from_ne_bytes(*sum) } else { 0.0 };
                        *sum = (before + addend).to_ne_bytes();
                    }
                    let place = &expected[start * 4..(start + numel) * 4];
                    assert_same(capture.wait().unwrap(), stats(dtype, place), &format!("{start}"));
                }
                assert!(rig.read(id, numel * 4) == expected, "the holes stay");
            }
            rig.end();
        });
    }
}

#[test]
fn whatever_is_done_with_a_gradient_comes_after_its_capture() {
    within_patience("order", || {
        let rig = Rig::new(20, Timing::AT_ONCE);
        let (dtype, numel) = (Dtype::Bf16, 3 * BLOCK);
        let part = Random(2).values(dtype, numel);
        type Act = fn(&Gradients, GradientId, &[u8]);
        let acts: [Act; 4] = [
            |gradients, id, part| {
                let mut target = vec![0xEE; part.len()];
                gradients.read(id, &mut target).unwrap();
                assert!(target == part);
                gradients.clear(id);
            },
            |gradients, id, _| gradients.clear(id),
            |gradients, id, _| drop(gradients.take(id)),
            |gradients, id, part| {
                // SAFETY: the source outlives the call, and is not written meanwhile.
                unsafe { gradients.capture(id, 0, part.as_ptr(), part.len() / 2, false) }.unwrap();
                gradients.clear(id);
            },
        ];
        for act in acts {
            let (id, _) = rig.create(dtype, numel);
            rig.hold();
            let capture = rig.capture(id, 0, dtype, &part, false, None).unwrap();
            thread::scope(|scope| {
                let (gradients, part) = (&rig.gradients, &part);
                let actor = scope.spawn(move || act(gradients, id, part));
                thread::sleep(Duration::from_millis(30));
                assert!(!actor.is_finished(), "it did not wait for the capture");
                rig.go_on();
                actor.join().unwrap();
            });
            capture.wait().unwrap();
            assert_eq!(rig.chunks_live(), 0);
        }
        rig.end();
    });
}
