//! A gradient captured in ranges is the one that is captured whole, with the same statistics.

mod support;

use std::sync::Arc;

use memascend_exec::{ExecError, GradientDtypes, GradientId, Gradients, InFlightCounter, Result, Staging};
use memascend_kernels::{Dtype, GRADIENT_BLOCK, GradientStats};
use memascend_mem::Pool;
use memascend_nvme::testing::Faults;
use proptest::prelude::*;
use support::{Bench, Kind, Random, pool, within_patience};

const BLOCK: usize = GRADIENT_BLOCK;
/// Dtypes in which gradients are made and stored.
const DTYPES: [(Dtype, Dtype); 4] = [
    (Dtype::Bf16, Dtype::Bf16),
    (Dtype::F16, Dtype::F16),
    (Dtype::F32, Dtype::F32),
    (Dtype::F32, Dtype::Bf16),
];

struct Captures {
    gradients: Gradients,
    chunks: Pool,
    dtypes: GradientDtypes,
    dtype: Dtype,
    numel: usize,
    whole: GradientId,
    ranges: GradientId,
    pending: Arc<InFlightCounter>,
    bench: Bench,
}

impl Captures {
    /// Two gradients of the same shape: one is captured whole, the other in ranges.
    fn new(kind: Kind, dtype: Dtype, numel: usize, chunk_blocks: usize, staging_chunks: usize) -> Self {
        Self::kept_in(dtype, kind, dtype, numel, chunk_blocks, staging_chunks)
    }

    fn kept_in(
        kept: Dtype,
        kind: Kind,
        dtype: Dtype,
        numel: usize,
        chunk_blocks: usize,
        staging_chunks: usize,
    ) -> Self {
        let dtypes = GradientDtypes::of(dtype, kept).unwrap();
        let bench = Bench::new(kind, 2);
        let chunk_elements = chunk_blocks * BLOCK;
        let chunks = pool(chunk_elements * 4, staging_chunks);
        let staging = Staging::new(Arc::clone(&bench.store), chunks.clone(), chunk_elements * 4);
        let gradients = Gradients::new(staging, chunk_elements);
        let pending = Arc::<InFlightCounter>::default();
        let create = |name| gradients.create(name, dtypes, numel, Arc::clone(&pending)).unwrap();
        let (whole, ranges) = (create("whole.gradient"), create("w.gradient"));
        Self { whole, ranges, gradients, chunks, dtypes, dtype, numel, pending, bench }
    }

    fn values(&self, seed: u64) -> Vec<u8> {
        Random(seed).values(self.dtype, self.numel)
    }

    fn capture(&self, id: GradientId, source: &[u8], accumulate: bool) -> Result<GradientStats> {
        // SAFETY: the source outlives the call, and is not written meanwhile.
        unsafe { self.gradients.capture(id, 0, source.as_ptr(), self.numel, accumulate) }
    }

    /// Captures in ranges of random lengths up to `longest`.
    fn capture_ranges(
        &self,
        source: &[u8],
        accumulate: bool,
        longest: usize,
        random: &mut Random,
    ) -> Result<GradientStats> {
        let mut ranges = self.gradients.begin_ranges(self.ranges, accumulate)?;
        let mut added = 0;
        while added < self.numel {
            let numel = (random.next() as usize % (longest + 1)).min(self.numel - added);
            let from = &source[added * self.dtype.bytes()..];
            // SAFETY: the source outlives the call, and is not written meanwhile.
            unsafe { self.gradients.add_range(&mut ranges, from.as_ptr(), numel)? };
            added += numel;
        }
        self.gradients.end_ranges(&mut ranges)
    }

    fn read(&self, id: GradientId) -> Vec<u8> {
        let mut target = vec![0xEE; self.numel * self.dtypes.kept_bytes()];
        self.gradients.read(id, &mut target).unwrap();
        target
    }

    fn live(&self) -> usize {
        self.chunks.counters().live_bytes
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, max_shrink_iters: 40, failure_persistence: None, ..ProptestConfig::default() })]

    /// Few staging chunks spill everything, many keep everything in host memory, some mix both.
    #[test]
    fn ranges_of_any_lengths_give_what_one_capture_gives(
        (dtype, kept) in prop::sample::select(DTYPES.to_vec()),
        numel in 1..(6 * BLOCK),
        (chunk_blocks, staging_chunks) in (1_usize..3, 1_usize..16),
        longest in prop::sample::select(vec![1_000, BLOCK, 3 * BLOCK, 6 * BLOCK]),
        seed in any::<u64>(),
        engine in any::<prop::sample::Index>(),
    ) {
        let kinds = Kind::all(seed);
        let kind = kinds[engine.index(kinds.len())];
        let what = format!("seed {seed}, {kind:?}, {dtype:?} of {numel} in {kept:?}, up to {longest} at a time, \
            {chunk_blocks} blocks a chunk, {staging_chunks} staging chunks");
        within_patience(&what.clone(), move || {
            let captures = Captures::kept_in(kept, kind, dtype, numel, chunk_blocks, staging_chunks);
            let mut random = Random(seed);
            for round in 0..2 {
                for micro_batch in 0..3 {
                    let part = captures.values(seed ^ micro_batch);
                    let found = captures.capture_ranges(&part, micro_batch > 0, longest, &mut random).unwrap();
                    let expected = captures.capture(captures.whole, &part, micro_batch > 0).unwrap();
                    let where_ = format!("{what}, round {round}, micro batch {micro_batch}");
                    assert_eq!(found, expected, "{where_}: statistics");
                    assert!(captures.read(captures.ranges) == captures.read(captures.whole), "{where_}: values");
                }
                captures.gradients.clear(captures.whole);
                if round == 0 {
                    let kept = captures.live();
                    captures.gradients.clear(captures.ranges);
                    captures.pending.wait().unwrap();
                    // As many chunks stay in host memory as of the whole one.
                    for id in [captures.whole, captures.ranges] {
                        let part = captures.values(seed);
                        if id == captures.whole {
                            captures.capture(id, &part, false).unwrap();
                        } else {
                            captures.capture_ranges(&part, false, longest, &mut random).unwrap();
                        }
                        captures.pending.wait().unwrap();
                        assert_eq!(captures.live(), kept, "{what}");
                        captures.gradients.clear(id);
                    }
                }
            }
            captures.gradients.clear(captures.ranges);
            captures.pending.wait().unwrap();
            assert_eq!(captures.live(), 0, "{what}");
        });
    }
}

#[test]
fn an_abandoned_capture_leaves_the_gradient_empty() {
    for staging_chunks in [20, 2] {
        let captures = Captures::new(Kind::Threads, Dtype::F32, 3 * BLOCK + 5, 1, staging_chunks);
        let part = captures.values(1);
        captures.capture(captures.ranges, &part, false).unwrap();
        let mut ranges = captures.gradients.begin_ranges(captures.ranges, true).unwrap();
        // SAFETY: the source outlives the call, and is not written meanwhile.
        unsafe { captures.gradients.add_range(&mut ranges, part.as_ptr(), 2 * BLOCK + 7).unwrap() };
        drop(ranges);
        assert!(captures.read(captures.ranges).iter().all(|byte| *byte == 0));
        captures.pending.wait().unwrap();
        assert_eq!(captures.live(), 0);
        // Accumulating onto nothing copies.
        captures.capture_ranges(&part, true, BLOCK, &mut Random(2)).unwrap();
        assert!(captures.read(captures.ranges) == part);
    }
}

#[test]
fn a_wrong_number_of_elements_is_an_error() {
    let captures = Captures::new(Kind::Threads, Dtype::Bf16, 2 * BLOCK + 5, 1, 4);
    let part = captures.values(1);
    let mut ranges = captures.gradients.begin_ranges(captures.ranges, false).unwrap();
    let mut add = |start: usize, numel| {
        let source = part[start * 2..].as_ptr();
        // SAFETY: only what lies in the source is read, which outlives the call.
        unsafe { captures.gradients.add_range(&mut ranges, source, numel) }
    };
    add(0, BLOCK + 1).unwrap();
    let error = add(0, 2 * BLOCK).unwrap_err();
    assert!(matches!(error, ExecError::Misused(_)), "{error}");
    assert!(error.to_string().contains(&format!("{} are left", BLOCK + 4)), "{error}");
    let error = captures.gradients.end_ranges(&mut ranges).unwrap_err();
    assert!(matches!(error, ExecError::Misused(_)), "{error}");
    // Neither has harmed the added gradients.
    let source = part[(BLOCK + 1) * 2..].as_ptr();
    // SAFETY: the source outlives the call, and is not written meanwhile.
    unsafe { captures.gradients.add_range(&mut ranges, source, BLOCK + 4).unwrap() };
    captures.gradients.end_ranges(&mut ranges).unwrap();
    assert!(captures.read(captures.ranges) == part);
    assert!(captures.gradients.end_ranges(&mut ranges).is_err(), "ended twice");
}

#[test]
fn a_gradient_that_was_changed_meanwhile_ends_the_capture() {
    let captures = Captures::new(Kind::Threads, Dtype::F32, BLOCK + 5, 1, 4);
    let part = captures.values(1);
    let mut ranges = captures.gradients.begin_ranges(captures.ranges, false).unwrap();
    captures.capture(captures.ranges, &part, false).unwrap();
    // SAFETY: the source outlives the call, and is not written meanwhile.
    let error = unsafe { captures.gradients.add_range(&mut ranges, part.as_ptr(), BLOCK + 5) }.unwrap_err();
    assert!(error.to_string().contains("changed"), "{error}");
    drop(ranges);
    assert!(captures.read(captures.ranges) == part, "the other capture's values stay");
}

#[test]
fn a_failed_spill_or_read_is_an_error_and_returns_the_chunks() {
    for seed in 0..4 {
        within_patience(&format!("seed {seed}"), move || {
            let faults = Faults { seed, read_error_one_in: 1, reorder: 4, ..Faults::default() };
            let captures = Captures::new(Kind::Sim(faults), Dtype::F32, 4 * BLOCK, 1, 3);
            let part = captures.values(seed);
            captures.capture_ranges(&part, false, BLOCK, &mut Random(seed)).unwrap();
            let error = captures.capture_ranges(&part, true, BLOCK, &mut Random(seed)).unwrap_err();
            assert!(error.to_string().starts_with("w.gradient: read of"), "seed {seed}: {error}");
            captures.pending.wait().unwrap();
            let Captures { gradients, chunks, bench, .. } = captures;
            drop((gradients, bench));
            assert_eq!(chunks.counters().live_bytes, 0, "seed {seed}");
        });
    }
}
