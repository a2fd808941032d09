//! Parts and rows of tensors have their written values, whatever is under way, and an error belongs to its
//! own read alone.

mod support;

use std::sync::Arc;

use memascend_exec::{ExecError, Executor, InFlightCounter, Staging, write_part};
use memascend_kernels::Weight;
use memascend_mem::{Lease, LeaseSlice, OutsideMemory};
use memascend_nvme::Volume;
use memascend_nvme::testing::Faults;
use memascend_store::TensorId;
use proptest::prelude::*;
use support::{Bench, Kind, Model, Random, Setup, Shape, Unit, adamw, pool, within_patience};

const BLOCK: usize = memascend_kernels::GRADIENT_BLOCK;
const MIB: usize = 1 << 20;

fn random_bytes(seed: u64, bytes: usize) -> Vec<u8> {
    let mut random = Random(seed);
    let mut values = Vec::with_capacity(bytes + 8);
    while values.len() < bytes {
        values.extend(random.next().to_le_bytes());
    }
    values.truncate(bytes);
    values
}

fn bytes_of(lease: &Arc<Lease>, bytes: usize) -> Vec<u8> {
    let slice = LeaseSlice::new(Arc::clone(lease), 0, bytes);
    // SAFETY: nothing is under way on the lease.
    unsafe { slice.as_slice() }.to_vec()
}

fn fill(lease: &Arc<Lease>, bytes: &[u8]) -> LeaseSlice {
    let slice = LeaseSlice::new(Arc::clone(lease), 0, bytes.len().next_multiple_of(4096));
    // SAFETY: nothing is under way on the lease.
    let target = unsafe { slice.as_mut_slice() };
    target[..bytes.len()].copy_from_slice(bytes);
    slice
}

fn rows_of(values: &[u8], row_bytes: usize, rows: &[i64]) -> Vec<u8> {
    rows.iter().flat_map(|row| &values[*row as usize * row_bytes..][..row_bytes]).copied().collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, max_shrink_iters: 40, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn rows_are_those_of_the_tensor(
        row_bytes in prop::sample::select(vec![2_usize, 100, 1_536, 4_096, 5_000, 24_576, 70_000]),
        count in 1_usize..400,
        kept_of_ten in 0_u64..11,
        (pages, buffers, volumes) in (1_usize..40, 1_usize..8, 1_usize..4),
        seed in any::<u64>(),
        compare in any::<bool>(),
        engine in any::<prop::sample::Index>(),
    ) {
        let kinds = Kind::all(seed);
        let kind = kinds[engine.index(kinds.len())];
        let what = format!("seed {seed}, {kind:?}, {kept_of_ten} of 10 of {count} rows of {row_bytes} bytes, \
            {buffers} of {pages} pages, {volumes} volumes, compared {compare}");
        within_patience(&what.clone(), move || {
            let bench = Bench::new(kind, volumes);
            let values = random_bytes(seed, count * row_bytes);
            let id = bench.put("table", &values).unwrap();
            let chunks = pool(pages * 4096, buffers);
            let staging = Staging::new(Arc::clone(&bench.store), chunks.clone(), pages * 4096);
            let mut random = Random(seed);
            // Blocks that were read before are compared with checksums of their own.
            for _ in 0..3 {
                let rows: Vec<i64> = (0..count as i64).filter(|_| random.next() % 10 < kept_of_ten).collect();
                let mut found = vec![0xEE; rows.len() * row_bytes];
                let extent = bench.store.current(id);
                staging.read_rows(extent, row_bytes, &rows, &mut found, compare).unwrap();
                assert!(found == rows_of(&values, row_bytes, &rows), "{what}");
            }
            assert_eq!(chunks.counters().live_bytes, 0, "{what}");
        });
    }
}

#[test]
fn few_rows_read_few_pages_and_many_read_all_once() {
    let bench = Bench::new(Kind::Threads, 1);
    let (row_bytes, count) = (4_096, 4_096);
    let values = random_bytes(1, row_bytes * count);
    let id = bench.put("table", &values).unwrap();
    let staging = Staging::new(Arc::clone(&bench.store), pool(MIB, 4), MIB);
    let read = |rows: &[i64], compare: bool| {
        let before = bench.store.volumes()[0].counters.reads;
        let mut found = vec![0; rows.len() * row_bytes];
        staging.read_rows(bench.store.current(id), row_bytes, rows, &mut found, compare).unwrap();
        assert!(found == rows_of(&values, row_bytes, rows));
        let after = bench.store.volumes()[0].counters.reads;
        (after.requests - before.requests, after.bytes - before.bytes)
    };
    // Three that are far apart, and two with a gap that is read too.
    let few = (3, 4_096 + 4_096 + 6 * 4_096);
    assert_eq!(read(&[0, 100, 1_000, 1_005], false), few);
    let (_, bytes) = read(&(0..count as i64).step_by(2).collect::<Vec<_>>(), false);
    assert_eq!(bytes, values.len() as u64);
    assert_eq!(read(&[], false), (0, 0));
    // To be compared, each MiB is read as a whole once: rows 0 and 100 lie in the first, the others in the fourth.
    assert_eq!(read(&[0, 100, 1_000, 1_005], true).1, 2 * MIB as u64);
    assert_eq!(read(&[0, 100, 1_000, 1_005], true), few);
    assert_eq!(read(&[1, 900], true), (2, 2 * 4_096));
    // The MiB of row 300 is new; row 255's, which is read with it, is not.
    assert_eq!(read(&[255, 300], true).1, 4_096 + MIB as u64);
    assert_eq!(read(&[], true), (0, 0));
}

/// Flips a byte of a row where it lies on the volume.
fn flip(bench: &Bench, row: &[u8]) {
    let path = bench.store.volumes()[0].path.join(Volume::FILE_NAME);
    let stored = std::fs::read(&path).unwrap();
    let at = stored.chunks(4_096).position(|block| block == row).unwrap() * 4_096;
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &[!row[0]], at as u64).unwrap();
    file.sync_all().unwrap();
}

#[test]
fn damage_is_found_in_rows_that_are_compared() {
    for chunk_bytes in [MIB, 24 << 10] {
        let bench = Bench::new(Kind::Threads, 1);
        let (row_bytes, count) = (4_096, 1_100);
        let values = random_bytes(1, row_bytes * count);
        let id = bench.put("table", &values).unwrap();
        let staging = Staging::new(Arc::clone(&bench.store), pool(chunk_bytes, 8), chunk_bytes);
        let extent = bench.store.current(id);
        let mut found = vec![0; row_bytes];
        let mut read = |row: i64| {
            let result = staging.read_rows(extent, row_bytes, &[row], &mut found, true);
            result.map_err(|error| error.to_string())
        };
        let row = |row: usize| &values[row * row_bytes..][..row_bytes];
        // Before its MiB was read, for any row of the MiB; the last one is shorter.
        flip(&bench, row(700));
        flip(&bench, row(1_099));
        for (touched, offset, bytes) in
            [(700, 2 << 20, MIB), (513, 2 << 20, MIB), (1_030, 4 << 20, 76 * 4_096)]
        {
            let error = read(touched).unwrap_err();
            assert!(error.contains(&format!("table: {bytes} bytes at offset {offset} are not")), "{error}");
        }
        // After that, in the block alone; rows beside it are as they were.
        read(100).unwrap();
        flip(&bench, row(101));
        read(100).unwrap();
        let error = read(101).unwrap_err();
        assert!(error.contains(&format!("table: 4096 bytes at offset {} are not", 101 * 4_096)), "{error}");
        // Bytes written in its place have checksums of their own.
        let other = random_bytes(2, values.len());
        let pending = Arc::default();
        staging.write(extent, &other, &pending).unwrap();
        pending.wait().unwrap();
        staging.read_rows(extent, row_bytes, &[101], &mut found, true).unwrap();
        assert!(found == other[101 * row_bytes..][..row_bytes]);
    }
}

/// Rows that are not compared are read as they are; reading all of them is compared.
#[test]
fn damage_is_found_where_most_of_the_tensor_is_read() {
    let bench = Bench::new(Kind::Threads, 1);
    let (row_bytes, count) = (4_096, 1_024);
    let values = random_bytes(1, row_bytes * count);
    let id = bench.put("table", &values).unwrap();
    let row = &values[700 * row_bytes..][..row_bytes];
    flip(&bench, row);

    let staging = Staging::new(Arc::clone(&bench.store), pool(MIB, 4), MIB);
    let extent = bench.store.current(id);
    let mut found = vec![0; row_bytes];
    for _ in 0..3 {
        staging.read_rows(extent, row_bytes, &[700], &mut found, false).unwrap();
        assert!(found[0] == !row[0] && found[1..] == row[1..]);
    }
    let all: Vec<i64> = (0..count as i64).collect();
    let mut found = vec![0; values.len()];
    let error = staging.read_rows(extent, row_bytes, &all, &mut found, false).unwrap_err().to_string();
    assert!(error.contains("table"), "{error}");
}

#[test]
fn rows_that_are_not_there_or_out_of_order_are_an_error() {
    let bench = Bench::new(Kind::Threads, 1);
    let id = bench.put("table", &random_bytes(1, 10 * 4_096)).unwrap();
    let staging = Staging::new(Arc::clone(&bench.store), pool(MIB, 2), MIB);
    for (rows, says) in [([1, 10], "row 10"), ([-1, 3], "row -1"), ([3, 3], "order"), ([4, 3], "order")] {
        let error =
            staging.read_rows(bench.store.current(id), 4_096, &rows, &mut [0; 2 * 4_096], true).unwrap_err();
        assert!(matches!(&error, ExecError::Misused(message) if message.contains(says)), "{error}");
    }
}

#[test]
fn a_failed_read_of_rows_names_the_tensor() {
    within_patience("rows", || {
        let faults = Faults { seed: 3, read_error_one_in: 1, reorder: 4, ..Faults::default() };
        let bench = Bench::new(Kind::Sim(faults), 2);
        let id = bench.put("table", &random_bytes(1, 4 * MIB)).unwrap();
        let chunks = pool(8 * 4096, 6);
        let staging = Staging::new(Arc::clone(&bench.store), chunks.clone(), 8 * 4096);
        let rows: Vec<i64> = (0..40).map(|row| row * 20).collect();
        let mut found = vec![0; 40 * 4096];
        let error = staging.read_rows(bench.store.current(id), 4_096, &rows, &mut found, true).unwrap_err();
        assert!(error.to_string().starts_with("table: read of"), "{error}");
        drop((staging, bench));
        assert_eq!(chunks.counters().live_bytes, 0);
    });
}

fn write_all(bench: &Bench, pending: &Arc<InFlightCounter>, id: TensorId, values: &[u8], part_bytes: usize) {
    let outside = Arc::<OutsideMemory>::default();
    let leases = [(); 2].map(|()| Arc::new(outside.lease(part_bytes).unwrap()));
    let mut tickets = std::collections::VecDeque::new();
    for (index, part) in values.chunks(part_bytes).enumerate() {
        if index >= 2 {
            let ticket: Arc<memascend_exec::Ticket> = tickets.pop_front().unwrap();
            ticket.wait().unwrap();
        }
        let offset = (index * part_bytes) as u64;
        let buffer = fill(&leases[index % 2], part);
        tickets.push_back(write_part(&bench.store, pending, id, offset, buffer).unwrap());
    }
    pending.wait_all().unwrap();
}

/// In buffers that belong to no arena, beside an arena that the engine knows.
#[test]
fn a_tensor_written_in_parts_is_read_in_parts() {
    for kind in Kind::all(3) {
        within_patience(&format!("{kind:?}"), move || {
            let bench = Bench::new(kind, 2);
            let slots = pool(12 * BLOCK, 1);
            bench.store.register(&slots);
            let (pending, outside) = (Arc::<InFlightCounter>::default(), Arc::<OutsideMemory>::default());
            let part_bytes = 3 * 4096 * 41;
            let bytes = 5 * part_bytes + 1_000;
            let id = bench.store.create_tensor("table", bytes as u64).unwrap();
            let executor =
                Executor::new(Arc::clone(&bench.store), slots, 12 * BLOCK, BLOCK, 1, None).unwrap();
            for round in 0..3 {
                let before = bench.store.current(id);
                let durable = (round > 0).then(|| bench.get(id, bytes).unwrap());
                let values = random_bytes(round, bytes);
                write_all(&bench, &pending, id, &values, part_bytes);
                if let Some(durable) = durable {
                    // The generation's extent was left alone, and all parts went to one other.
                    assert_ne!(bench.store.current(id), before);
                    let staging = Staging::new(Arc::clone(&bench.store), pool(MIB, 3), MIB);
                    let mut found = vec![0; bytes];
                    staging.read(before, &mut found).unwrap();
                    assert!(found == durable, "{kind:?}, round {round}");
                }
                let parts: Vec<_> = (0..bytes)
                    .step_by(part_bytes)
                    .map(|offset| {
                        let length = part_bytes.min(bytes - offset);
                        let lease = Arc::new(outside.lease(part_bytes).unwrap());
                        let whole = length.next_multiple_of(4096);
                        let buffer = LeaseSlice::new(Arc::clone(&lease), 0, whole);
                        let read = executor.read_part(Arc::clone(&pending), id, offset as u64, buffer);
                        (read, lease, length)
                    })
                    .collect();
                pending.wait_all().unwrap();
                let mut found = Vec::new();
                for (read, lease, length) in &parts {
                    // The unit's reads have ended, whether or not the tickets were waited for.
                    found.extend(bytes_of(lease, *length));
                    read.wait().unwrap();
                }
                assert!(found == values, "{kind:?}, round {round}");
                bench.store.commit("").unwrap();
            }
            assert_eq!(outside.bytes(), 0);
            assert_eq!(outside.bytes_most(), 6 * part_bytes);
        });
    }
}

#[test]
fn a_part_that_is_read_behind_an_update_is_updated() {
    for kind in Kind::all(17) {
        within_patience(&format!("{kind:?}"), move || {
            let shapes = vec![Shape::whole(adamw(Weight::Bf16Split), 3 * BLOCK, 0)];
            let model = Arc::new(Model::new(shapes, 23));
            let unit = Unit::new(&model, Setup { volumes: 2, compute_threads: 2, ..Setup::plain(kind) });
            let id = unit.bench.store.find_tensor("layer.0.0").unwrap();
            let outside = Arc::<OutsideMemory>::default();
            for step in 1..=10 {
                unit.capture(step).unwrap();
                let updated = unit.update_in_slots(unit.updates(step));
                let executor = unit.executor.as_ref().unwrap();
                let reads: Vec<_> = (0..3)
                    .map(|part| {
                        let lease = Arc::new(outside.lease(2 * BLOCK).unwrap());
                        let buffer = LeaseSlice::new(Arc::clone(&lease), 0, 2 * BLOCK);
                        let offset = part * 2 * BLOCK;
                        (executor.read_part(Arc::clone(&unit.pending), id, offset as u64, buffer), lease)
                    })
                    .collect();
                let mut found = Vec::new();
                for (read, lease) in &reads {
                    read.wait().unwrap();
                    found.extend(bytes_of(lease, 2 * BLOCK));
                }
                updated.wait().unwrap();
                assert!(found == model.in_memory(step).unit[..6 * BLOCK], "{kind:?}: step {step}");
            }
        });
    }
}

#[test]
fn a_failed_read_of_a_part_is_its_tickets_alone() {
    within_patience("parts", || {
        let faults = Faults { seed: 1, read_error_one_in: 1, reorder: 4, ..Faults::default() };
        let bench = Bench::new(Kind::Sim(faults), 1);
        let id = bench.put("table", &random_bytes(1, MIB)).unwrap();
        let executor =
            Executor::new(Arc::clone(&bench.store), pool(12 * BLOCK, 1), 12 * BLOCK, BLOCK, 1, None).unwrap();
        let (pending, outside) = (Arc::<InFlightCounter>::default(), Arc::<OutsideMemory>::default());
        let buffer = LeaseSlice::new(Arc::new(outside.lease(8_192).unwrap()), 0, 8_192);
        let read = executor.read_part(Arc::clone(&pending), id, 4_096, buffer);
        let error = read.wait().unwrap_err();
        assert!(error.to_string().starts_with("table: read of"), "{error}");
        pending.wait_all().unwrap();
        assert_eq!(outside.bytes(), 0);
    });
}
