//! Copies to and from a device, a simulated one: what comes from there is kept as what comes from
//! host memory, whatever runs when; memory is given back when no copy uses it; and no thread waits
//! for what fails.

#[path = "../../memascend-mem/tests/fake/mod.rs"]
mod fake;
mod support;

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use fake::Fake;
use memascend_exec::{
    Capture, DeviceEvent, DeviceGradient, DeviceLink, ExecError, GradientId, Gradients, Pending, Restore,
    Staging, Stash,
};
use memascend_kernels::{Dtype, GRADIENT_BLOCK, GradientStats, stats_bf16, stats_f16, stats_f32};
use memascend_mem::{CudaAllocator, Lease, LeaseSlice, PageableAllocator, Pool, SizeClass, round_up_to_page};
use support::{Bench, Kind, Random, within_patience};

const BLOCK: usize = GRADIENT_BLOCK;
/// Elements of the chunks of these tests.
const CHUNK_ELEMENTS: usize = BLOCK;
/// Chunks that what is kept leaves free for transfers.
const RESERVE: usize = 8;
/// The stream that computes: its work is done at once.
const COMPUTE: usize = 0;

/// A device, and what is kept of what comes from there.
struct Rig {
    link: Arc<DeviceLink>,
    gradients: Arc<Gradients>,
    staging: Arc<Staging>,
    chunks: Pool,
    packs: Pool,
    bench: Bench,
    // Dropped last: the pools are its memory.
    fake: Arc<Fake>,
}

/// How a device runs what it is told. Nothing in it may change a result.
#[derive(Debug, Clone, Copy)]
struct Timing {
    lazy: bool,
    seed: usize,
    lateness: usize,
}

impl Timing {
    const AT_ONCE: Self = Self { lazy: false, seed: 1, lateness: 0 };

    fn all() -> [Self; 3] {
        [Self::AT_ONCE, Self { lazy: true, seed: 1, lateness: 0 }, Self { lazy: true, seed: 2, lateness: 40 }]
    }
}

impl Rig {
    fn new(staging_chunks: usize, timing: Timing) -> Self {
        Self::on(Arc::new(Fake::new(&[])), 0, staging_chunks, timing)
    }

    fn on(fake: Arc<Fake>, device: i32, staging_chunks: usize, timing: Timing) -> Self {
        fake.set(c"fake_set_seed", timing.seed);
        fake.set(c"fake_set_lateness", timing.lateness);
        fake.set(c"fake_set_lazy", usize::from(timing.lazy));
        let cudart = fake.open().unwrap();
        let bench = Bench::new(Kind::Threads, 1);
        let class = |bytes, count| vec![SizeClass { consumer: "test".into(), bytes, count }];
        let groups = [class(CHUNK_ELEMENTS * 4, staging_chunks), class(1 << 20, 2)];
        let pools = Pool::carve(&CudaAllocator::with(Arc::clone(&cudart)), &groups).unwrap();
        let [chunks, packs] = <[Pool; 2]>::try_from(pools).unwrap();
        let staging = Staging::new(Arc::clone(&bench.store), chunks.clone(), CHUNK_ELEMENTS * 4);
        let gradients = Arc::new(Gradients::new(staging.clone(), CHUNK_ELEMENTS));
        let link = Arc::new(DeviceLink::open(cudart, device).unwrap());
        Self { link, gradients, staging: Arc::new(staging), chunks, packs, bench, fake }
    }

    fn create(&self, dtype: Dtype, numel: usize) -> (GradientId, Arc<Pending>) {
        let pending = Arc::default();
        (self.gradients.create("w.gradient", dtype, numel, Arc::clone(&pending)).unwrap(), pending)
    }

    /// An event behind the computation of `values`.
    fn computed(&self, values: &[u8]) -> DeviceEvent {
        self.fake.access(values, true);
        // SAFETY: the stream is the default one.
        unsafe { self.link.record(COMPUTE) }.unwrap()
    }

    /// Has the computation go on after `event` and use `values`.
    fn use_after(&self, event: &DeviceEvent, values: &[u8]) {
        // SAFETY: as above.
        unsafe { self.link.wait(COMPUTE, event) }.unwrap();
        self.fake.access(values, false);
    }

    /// Captures `source`, which its caller keeps, unchanged, until the capture has ended.
    fn capture(
        &self,
        id: GradientId,
        start: usize,
        dtype: Dtype,
        source: &[u8],
        accumulate: bool,
        sums: Option<&Sums>,
    ) -> memascend_exec::Result<Capture> {
        let (ready, numel) = (self.computed(source), source.len() / dtype.bytes());
        let sums = sums.map(|sums| (sums.bytes.as_ptr().addr(), sums.count));
        let address = source.as_ptr().addr();
        let source = DeviceGradient { start, address, numel, accumulate, sums, ready };
        // SAFETY: the caller's promise.
        unsafe { self.link.capture(&self.gradients, id, source) }
    }

    /// Puts `source` aside, which its caller keeps, unchanged, until it is copied.
    fn stash(&self, source: &[u8], spill: bool) -> Stash {
        let ready = self.computed(source);
        // SAFETY: the caller's promise.
        unsafe { self.link.stash(&self.staging, source.as_ptr().addr(), source.len(), &ready, spill) }
            .unwrap()
    }

    /// Has a stash copied to `target`, which its caller leaves alone until the event of the end.
    fn restore(&self, stash: &Stash, target: &mut [u8]) -> Restore {
        let after = self.computed(target);
        // SAFETY: the caller's promise.
        unsafe { self.link.restore(stash, target.as_mut_ptr().addr(), &after) }.unwrap()
    }

    /// Keeps every event from being done until [`Rig::go_on`].
    fn hold(&self) {
        self.fake.set(c"fake_set_busy", 1);
    }

    fn go_on(&self) {
        self.fake.set(c"fake_set_busy", 0);
    }

    fn read(&self, id: GradientId, bytes: usize) -> Vec<u8> {
        let mut target = vec![0xEE; bytes];
        self.gradients.read(id, &mut target).unwrap();
        target
    }

    fn chunks_live(&self) -> usize {
        self.chunks.counters().live_bytes / (CHUNK_ELEMENTS * 4)
    }

    /// Ends everything and looks at the books.
    fn end(self) {
        self.link.close();
        let Self { link, gradients, staging, chunks, packs, bench, fake } = self;
        drop((link, gradients, staging));
        // Writes that nobody waits for, of what was dropped, have their chunks until they end.
        until("all chunks are returned", || chunks.counters().live_bytes == 0);
        drop((chunks, packs, bench));
        fake.assert_clean();
    }
}

/// What a device measures of a gradient: the sums of squares of its blocks, and the flag behind
/// them.
struct Sums {
    bytes: Vec<u8>,
    count: usize,
}

impl Sums {
    fn of(dtype: Dtype, values: &[u8]) -> Self {
        let blocks: Vec<_> = values.chunks(BLOCK * dtype.bytes()).map(|block| stats(dtype, block)).collect();
        let mut bytes: Vec<u8> = blocks.iter().flat_map(|block| block.sum_squares.to_ne_bytes()).collect();
        let flag = u32::from(blocks.iter().any(|block| block.non_finite));
        bytes.extend(flag.to_ne_bytes());
        Self { bytes, count: blocks.len() }
    }
}

fn stats(dtype: Dtype, bytes: &[u8]) -> GradientStats {
    let words: Vec<u16> = bytes.as_chunks().0.iter().map(|pair| u16::from_ne_bytes(*pair)).collect();
    let mut stats = GradientStats::default();
    match dtype {
        Dtype::Bf16 => stats_bf16(&words, &mut stats),
        Dtype::F16 => stats_f16(&words, &mut stats),
        Dtype::F32 => {
            let floats: Vec<f32> = bytes.as_chunks().0.iter().map(|four| f32::from_ne_bytes(*four)).collect();
            stats_f32(&floats, &mut stats);
        }
    }
    stats
}

fn assert_same(found: GradientStats, expected: GradientStats, what: &str) {
    assert_eq!(found.sum_squares.to_bits(), expected.sum_squares.to_bits(), "{what}: sum of squares");
    assert_eq!(found.non_finite, expected.non_finite, "{what}: whether all are finite");
}

/// Fills a lease that only this test uses.
fn fill(lease: &Arc<Lease>, value: u8) {
    let all = LeaseSlice::new(Arc::clone(lease), 0, lease.capacity());
    // SAFETY: the caller's promise.
    unsafe { all.as_mut_slice() }.fill(value);
}

/// Waits until something that another thread does has happened.
fn until(what: &str, mut happened: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !happened() {
        assert!(Instant::now() < deadline, "{what}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// What an [`ExecError::Device`] says.
fn device_failure<T>(result: memascend_exec::Result<T>) -> String {
    match result {
        Err(ExecError::Device(error)) => error.to_string(),
        Err(other) => panic!("another error: {other}"),
        Ok(_) => panic!("no error"),
    }
}

/// A gradient in ordinary memory, as it is captured from there.
struct Reference {
    gradients: Gradients,
    id: GradientId,
    _bench: Bench,
}

impl Reference {
    fn new(dtype: Dtype, numel: usize) -> Self {
        let bench = Bench::new(Kind::Threads, 1);
        let classes = [SizeClass { consumer: "test".into(), bytes: CHUNK_ELEMENTS * 4, count: 40 }];
        let pool = Pool::new(&PageableAllocator, &classes).unwrap();
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
fn an_element_that_is_not_finite_is_told_by_whoever_measures() {
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
        assert!(rig.fake.get(c"fake_live_events") <= 2, "events gather");
        let counters = rig.link.counters();
        assert_eq!((counters.h2d_copies, counters.h2d_bytes), (101, 101_000));
        drop((other, kept, event));
        rig.end();
    });
}

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
fn what_nobody_wants_any_more_is_given_up_when_no_copy_uses_it() {
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
            assert!(target == source, "who wants it no more gets it all the same, and nothing else");
            assert_eq!(rig.bench.store.used_bytes() - used, 5 * BLOCK as u64 * 4, "the gradient's room");
            rig.end();
        });
    }
}

#[test]
fn a_copy_that_fails_is_told_to_who_waits_for_it_and_harms_nobody_else() {
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
            // What failed is gone, so that it is not taken for a gradient; all else goes on.
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
        assert_eq!(fake.device(), 0);
        rig.end();
    });
}

/// The race detector of the fake sees each order that this module makes: left out, it is missed.
#[test]
fn every_wait_is_needed() {
    for skipped in 1..=4 {
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
            assert!(rig.fake.get(c"fake_waits") == 4, "upload, its use, download, restore");
            assert!(rig.fake.get(c"fake_races") > 0, "wait {skipped} orders nothing");
        });
    }
}
