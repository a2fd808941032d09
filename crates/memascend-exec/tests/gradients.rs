//! Gradients captured into host chunks, onto the SSD or into packs are the in-memory sums, with the
//! same statistics, and give their buffers back.

mod support;

use std::sync::Arc;

use memascend_exec::{GradientDtypes, GradientId, Gradients, InFlightCounter, Result, Staging};
use memascend_kernels::{
    Dtype, GRADIENT_BLOCK, GradientStats, round_bf16, round_f16, stats_bf16, widen_bf16, widen_f16,
};
use memascend_mem::{LeaseSlice, Pool, round_up_to_page};
use memascend_nvme::testing::Faults;
use proptest::prelude::*;
use support::gradients::{create, floats, read, stats, words};
use support::{Bench, Kind, Random, pool, within_patience};

const BLOCK: usize = GRADIENT_BLOCK;
/// Chunks that gradients leave free for transfers.
const RESERVE: usize = 8;

struct Captures {
    gradients: Gradients,
    chunks: Pool,
    chunk_elements: usize,
    bench: Bench,
}

impl Captures {
    fn new(kind: Kind, volumes: usize, chunk_blocks: usize, staging_chunks: usize) -> Self {
        let bench = Bench::new(kind, volumes);
        let chunk_elements = chunk_blocks * BLOCK;
        let chunks = pool(chunk_elements * 4, staging_chunks);
        let staging = Staging::new(Arc::clone(&bench.store), chunks.clone(), chunk_elements * 4);
        Self { gradients: Gradients::new(staging, chunk_elements), chunks, chunk_elements, bench }
    }

    fn create(&self, dtype: Dtype, numel: usize) -> (GradientId, Arc<InFlightCounter>) {
        create(&self.gradients, dtype, numel)
    }

    fn capture(
        &self,
        id: GradientId,
        start: usize,
        dtype: Dtype,
        source: &[u8],
        accumulate: bool,
    ) -> Result<GradientStats> {
        // SAFETY: the source outlives the call, and is not written meanwhile.
        unsafe {
            self.gradients.capture(id, start, source.as_ptr(), source.len() / dtype.bytes(), accumulate)
        }
    }

    fn read(&self, id: GradientId, bytes: usize) -> Vec<u8> {
        read(&self.gradients, id, bytes)
    }

    fn chunks_live(&self) -> usize {
        self.chunks.counters().live_bytes / (self.chunk_elements * 4)
    }
}

/// `sum += addend`: bf16 through fp32, rounded to nearest, ties to even. Written apart from the
/// kernels.
fn add(dtype: Dtype, sum: &[u8], addend: &[u8]) -> Vec<u8> {
    match dtype {
        Dtype::Bf16 => {
            let round = |(a, b): (&u16, &u16)| {
                let exact = f32::from_bits(u32::from(*a) << 16) + f32::from_bits(u32::from(*b) << 16);
                let bits = exact.to_bits();
                let (kept, rest) = (bits >> 16, bits & 0xFFFF);
                let up = rest > 0x8000 || (rest == 0x8000 && kept & 1 == 1);
                ((kept + u32::from(up)) as u16).to_le_bytes()
            };
            words(sum).iter().zip(&words(addend)).flat_map(round).collect()
        }
        Dtype::F16 => words(sum)
            .iter()
            .zip(&words(addend))
            // fp32 has bits enough that rounding twice is rounding once.
            .flat_map(|(a, b)| round_f16(widen_f16(*a) + widen_f16(*b)).to_le_bytes())
            .collect(),
        Dtype::F32 => {
            floats(sum).iter().zip(&floats(addend)).flat_map(|(a, b)| (a + b).to_le_bytes()).collect()
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, max_shrink_iters: 40, failure_persistence: None, ..ProptestConfig::default() })]

    /// Few staging chunks spill everything, many keep everything in host memory, some mix both.
    #[test]
    fn captured_and_accumulated_is_the_sum_in_memory(
        dtype in prop::sample::select(vec![Dtype::Bf16, Dtype::F16, Dtype::F32]),
        numel in 1..(6 * BLOCK),
        (chunk_blocks, staging_chunks, volumes) in (1_usize..3, 1_usize..16, 1_usize..4),
        seed in any::<u64>(),
        engine in any::<prop::sample::Index>(),
    ) {
        let kinds = Kind::all(seed);
        let kind = kinds[engine.index(kinds.len())];
        let what = format!("seed {seed}, {kind:?}, {dtype:?} of {numel}, {chunk_blocks} blocks a chunk, \
            {staging_chunks} staging chunks, {volumes} volumes");
        within_patience(&what.clone(), move || {
            let captures = Captures::new(kind, volumes, chunk_blocks, staging_chunks);
            let (id, pending) = captures.create(dtype, numel);
            let mut random = Random(seed);
            // Twice over: the second time without accumulation replaces the first result.
            for round in 0..2 {
                let mut sum = Vec::new();
                for micro_batch in 0..3 {
                    let part = random.values(dtype, numel);
                    let found = captures.capture(id, 0, dtype, &part, micro_batch > 0).unwrap();
                    sum = if micro_batch == 0 { part } else { add(dtype, &sum, &part) };
                    let where_ = format!("{what}, round {round}, micro batch {micro_batch}");
                    assert_eq!(found, stats(dtype, &sum), "{where_}: statistics");
                    assert!(captures.read(id, sum.len()) == sum, "{where_}: values");
                    let start = random.next() as usize % numel;
                    let part = start..start + 1 + random.next() as usize % (numel - start);
                    let mut visited = Vec::new();
                    let consume = |piece: &[u8]| visited.extend_from_slice(piece);
                    captures.gradients.visit(id, part.start, part.len(), consume).unwrap();
                    let bytes = part.start * dtype.bytes()..part.end * dtype.bytes();
                    assert!(visited == sum[bytes], "{where_}: elements {part:?}");
                }
                let whole = numel.div_ceil(captures.chunk_elements);
                pending.wait().unwrap();
                assert_eq!(captures.chunks_live(), whole.min(staging_chunks.saturating_sub(RESERVE)), "{what}");
            }
            drop(captures.gradients.take(id));
            assert_eq!(captures.chunks_live(), 0, "{what}: taken");
        });
    }

    /// Each stored sum is rounded, and has half as many bytes as the gradient.
    #[test]
    fn an_fp32_gradient_kept_in_bf16_is_rounded_after_each_addition(
        numel in 1..(6 * BLOCK),
        (chunk_blocks, staging_chunks, volumes) in (1_usize..3, 1_usize..16, 1_usize..4),
        seed in any::<u64>(),
        engine in any::<prop::sample::Index>(),
    ) {
        let kinds = Kind::all(seed);
        let kind = kinds[engine.index(kinds.len())];
        let what = format!("seed {seed}, {kind:?}, {numel} elements, {chunk_blocks} blocks a chunk, \
            {staging_chunks} staging chunks, {volumes} volumes");
        within_patience(&what.clone(), move || {
            let captures = Captures::new(kind, volumes, chunk_blocks, staging_chunks);
            let pending = Arc::<InFlightCounter>::default();
            let created = captures.gradients.create("w", GradientDtypes::ROUNDED, numel, Arc::clone(&pending));
            let (id, mut random) = (created.unwrap(), Random(seed));
            let mut sum = vec![0; numel];
            let written = || -> u64 {
                captures.bench.store.volumes().iter().map(|volume| volume.counters.writes.bytes).sum()
            };
            for micro_batch in 0..4 {
                let (part, before) = (random.values(Dtype::F32, numel), written());
                let found = captures.capture(id, 0, Dtype::F32, &part, micro_batch > 0).unwrap();
                let add = |(kept, part): (&u16, f32)| round_bf16(widen_bf16(*kept) + part);
                sum = sum.iter().zip(floats(&part)).map(add).collect();
                let mut expected = GradientStats::default();
                stats_bf16(&sum, &mut expected);
                assert_eq!(found, expected, "{what}, {micro_batch}: statistics");
                assert!(words(&captures.read(id, 2 * numel)) == sum, "{what}, {micro_batch}: values");
                pending.wait().unwrap();
                let in_memory = captures.chunks_live() * captures.chunk_elements;
                let spilled = 2 * numel.saturating_sub(in_memory);
                assert_eq!(written() - before, round_up_to_page(spilled) as u64, "{what}, {micro_batch}: spilled");
            }
        });
    }

    #[test]
    fn staging_moves_any_length_through_any_number_of_buffers(
        bytes in 0_usize..600_000,
        (pages, buffers, volumes) in (1_usize..30, 1_usize..8, 1_usize..4),
        seed in any::<u64>(),
        engine in any::<prop::sample::Index>(),
    ) {
        let kinds = Kind::all(seed);
        let kind = kinds[engine.index(kinds.len())];
        let what = format!("seed {seed}, {kind:?}, {bytes} bytes, {buffers} of {pages} pages, {volumes} volumes");
        within_patience(&what.clone(), move || {
            let bench = Bench::new(kind, volumes);
            let chunks = pool(pages * 4096, buffers);
            let staging = Staging::new(Arc::clone(&bench.store), chunks.clone(), pages * 4096);
            let mut random = Random(seed);
            let source: Vec<u8> = (0..bytes).map(|_| random.next() as u8).collect();
            let extent = bench.store.allocate("activation", bytes as u64).unwrap();
            let pending = Arc::default();
            staging.write(extent, &source, &pending).unwrap();
            pending.wait().unwrap();
            let mut target = vec![0xEE; bytes];
            staging.read(extent, &mut target).unwrap();
            assert!(target == source, "{what}");
            assert_eq!(chunks.counters().live_bytes, 0, "{what}");
        });
    }
}

/// Spills pass through update slots too, and may use all but two.
#[test]
fn spills_pass_through_free_update_slots_and_give_them_back() {
    let chunk_bytes = BLOCK * 4;
    for (seed, kind) in (0..).zip(Kind::all(5)) {
        for taken in 0..5 {
            let bench = Bench::new(kind, 2);
            let (chunks, slots) = (pool(chunk_bytes, 2), pool(6 * BLOCK * 2, 4));
            let staging = Staging::new(Arc::clone(&bench.store), chunks.clone(), chunk_bytes)
                .lending(slots.clone(), 6 * BLOCK * 2);
            let gradients = Gradients::new(staging, BLOCK);
            let held: Vec<_> = (0..taken).map(|_| slots.try_lease(6 * BLOCK * 2).unwrap().unwrap()).collect();
            // As many chunks as a slot holds.
            let numel = 5 * BLOCK + 1234;
            let (id, pending) = create(&gradients, Dtype::Bf16, numel);
            let mut random = Random(seed);
            let mut sum = Vec::new();
            for micro_batch in 0..3 {
                let part = random.values(Dtype::Bf16, numel);
                // With every chunk in use, all of it goes through slots.
                let alone = taken < 2 && micro_batch == 0;
                let in_use: Vec<_> = (0..2)
                    .filter(|_| alone)
                    .map(|_| chunks.try_lease(chunk_bytes).unwrap().unwrap())
                    .collect();
                // SAFETY: the part outlives the call, and is not written meanwhile.
                let found =
                    unsafe { gradients.capture(id, 0, part.as_ptr(), numel, micro_batch > 0) }.unwrap();
                drop(in_use);
                sum = if micro_batch == 0 { part } else { add(Dtype::Bf16, &sum, &part) };
                assert_eq!(found, stats(Dtype::Bf16, &sum), "{kind:?}, {taken} slots in use");
                assert!(read(&gradients, id, sum.len()) == sum, "{kind:?}, {taken} slots in use");
                pending.wait().unwrap();
            }
            let counters = slots.counters();
            assert_eq!(counters.live_bytes, taken * 6 * BLOCK * 2, "all came back");
            assert_eq!(
                counters.hits > taken as u64,
                taken < 2,
                "{kind:?}: lent while more than two are free"
            );
            drop(held);
        }
    }
}

#[test]
fn a_pack_keeps_each_tensor_apart_and_its_buffer_for_the_run() {
    for dtype in [Dtype::Bf16, Dtype::F32] {
        let captures = Captures::new(Kind::Threads, 1, 1, 4);
        let (numel, ranges) = (5_000, [(3_usize, 700_usize), (703, 1), (2_000, 3_000)]);
        let bytes = numel * dtype.bytes();
        let packs = pool(bytes, 1);
        let lease = Arc::new(packs.try_lease(bytes).unwrap().unwrap());
        let buffer = LeaseSlice::new(lease, 0, round_up_to_page(bytes));
        // SAFETY: the lease is fresh.
        unsafe { buffer.as_mut_slice() }.fill(0);
        let id = captures.gradients.create_packed(dtype, numel, buffer);
        let mut random = Random(8);
        let mut expected = vec![0; bytes];
        for micro_batch in 0..3 {
            for (start, numel) in ranges {
                let part = random.values(dtype, numel);
                let found = captures.capture(id, start, dtype, &part, micro_batch > 0).unwrap();
                let place = start * dtype.bytes()..(start + numel) * dtype.bytes();
                let sum = if micro_batch == 0 { part } else { add(dtype, &expected[place.clone()], &part) };
                assert_eq!(found, stats(dtype, &sum), "{dtype:?}");
                expected[place].copy_from_slice(&sum);
            }
            assert!(captures.read(id, bytes) == expected, "{dtype:?}: the holes stay");
        }
        drop(captures.gradients.take(id));
        captures.gradients.clear(id);
        assert_eq!(packs.counters().live_bytes, bytes, "the pack's buffer stays with it");
        drop(captures);
        assert_eq!(packs.counters().live_bytes, 0);
    }
}

#[test]
fn a_taken_or_cleared_gradient_is_empty_and_starts_anew() {
    // All in host memory, and all on the SSD.
    for staging_chunks in [20, 2] {
        let captures = Captures::new(Kind::Threads, 1, 1, staging_chunks);
        let (dtype, numel) = (Dtype::Bf16, 3 * BLOCK + 5);
        let (id, pending) = captures.create(dtype, numel);
        let mut random = Random(4);
        for take in [true, false] {
            let first = random.values(dtype, numel);
            captures.capture(id, 0, dtype, &first, false).unwrap();
            pending.wait().unwrap();
            assert_eq!(captures.chunks_live(), if staging_chunks > RESERVE { 4 } else { 0 });
            if take {
                let source = captures.gradients.take(id);
                assert!(
                    captures.read(id, first.len()).iter().all(|byte| *byte == 0),
                    "nothing is left behind"
                );
                assert_eq!(
                    captures.chunks_live() > 0,
                    staging_chunks > RESERVE,
                    "the update holds the chunks"
                );
                drop(source);
            } else {
                captures.gradients.clear(id);
            }
            assert_eq!(captures.chunks_live(), 0);
            // Accumulating onto nothing copies.
            let next = random.values(dtype, numel);
            let found = captures.capture(id, 0, dtype, &next, true).unwrap();
            assert_eq!(found, stats(dtype, &next));
            assert!(captures.read(id, next.len()) == next);
            captures.gradients.clear(id);
        }
    }
}

#[test]
fn an_overflow_is_seen_wherever_the_chunk_lies() {
    for staging_chunks in [20, 2] {
        for dtype in [Dtype::Bf16, Dtype::F16, Dtype::F32] {
            let captures = Captures::new(Kind::Threads, 1, 1, staging_chunks);
            let numel = 2 * BLOCK + 9;
            let (id, _) = captures.create(dtype, numel);
            let mut part = Random(1).values(dtype, numel);
            let largest = match dtype {
                Dtype::Bf16 => vec![0x7F, 0x7F],
                Dtype::F16 => vec![0xFF, 0x7B],
                Dtype::F32 => vec![0xFF, 0xFF, 0x7F, 0x7F],
            };
            let end = part.len() - dtype.bytes();
            part[end..].copy_from_slice(&largest);
            let finite = captures.capture(id, 0, dtype, &part, false).unwrap();
            assert!(!finite.non_finite, "the largest value is finite");
            let infinite = captures.capture(id, 0, dtype, &part, true).unwrap();
            assert!(infinite.non_finite, "{dtype:?}: its double is not");
        }
    }
}

#[test]
fn errors_of_spills_surface_with_the_gradients_name_and_return_the_chunks() {
    for seed in 0..6 {
        within_patience(&format!("seed {seed}"), move || {
            let faults = Faults { seed, write_error_one_in: 1, reorder: 4, ..Faults::default() };
            let captures = Captures::new(Kind::Sim(faults), 2, 1, 3);
            let (id, pending) = captures.create(Dtype::F32, 4 * BLOCK);
            let part = Random(seed).values(Dtype::F32, 4 * BLOCK);
            captures.capture(id, 0, Dtype::F32, &part, false).unwrap();
            let error = pending.wait().unwrap_err().to_string();
            assert!(error.starts_with("w.gradient: write of"), "seed {seed}: {error}");
            let again = captures.capture(id, 0, Dtype::F32, &part, true).unwrap_err().to_string();
            assert_eq!(again, error, "seed {seed}");
            assert_eq!(captures.chunks_live(), 0, "seed {seed}");
        });
        within_patience(&format!("seed {seed}"), move || {
            let faults = Faults { seed, read_error_one_in: 2, reorder: 4, ..Faults::default() };
            let captures = Captures::new(Kind::Sim(faults), 2, 1, 6);
            let (id, pending) = captures.create(Dtype::Bf16, 20 * BLOCK);
            let part = Random(seed).values(Dtype::Bf16, 20 * BLOCK);
            captures.capture(id, 0, Dtype::Bf16, &part, false).unwrap();
            let error = captures.capture(id, 0, Dtype::Bf16, &part, true).unwrap_err().to_string();
            assert!(error.starts_with("w.gradient: read of"), "seed {seed}: {error}");
            pending.wait().unwrap();
            let Captures { gradients, chunks, bench, .. } = captures;
            // The reads ahead of the one that failed end with the engine.
            drop((gradients, bench));
            assert_eq!(chunks.counters().live_bytes, 0, "seed {seed}");
        });
    }
}
