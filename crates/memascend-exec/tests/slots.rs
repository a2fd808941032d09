//! An update without a buffer for the unit's weights has the bits of one through a buffer, and reads only the
//! tensors that it updates.

mod support;

use std::sync::Arc;

use memascend_kernels::{Moments, Rule, Weight};
use memascend_nvme::testing::Faults;
use memascend_nvme::{EngineChoice, EngineOptions};
use memascend_store::{Store, StoreOptions};
use support::{Bench, Kind, Model, Setup, Shape, Unit, adamw, every_rule, names_a_tensor, within_patience};

const BLOCK: usize = memascend_kernels::GRADIENT_BLOCK;

/// A head with its bias for each dtype, the bias in a pack, and frozen weights between them.
fn heads() -> Vec<Shape> {
    let head = |weight| {
        let rule = adamw(weight);
        [
            Shape::whole(rule, 2 * BLOCK + 1_234, 2),
            Shape { rule, numel: 9_000, gap_pages: 1, segments: vec![(5, 300), (4_096, 4_001)] },
        ]
    };
    [Weight::F32, Weight::Bf16Split, Weight::F16Master].map(head).concat()
}

/// Slots are for 12 bytes an element, so most rules take pieces of a chunk when the weights lie in
/// the slot too.
#[test]
fn every_rule_gives_the_bits_of_the_one_in_memory_without_a_buffer() {
    for (index, rules) in every_rule().chunks(12).enumerate() {
        let mut shapes = Vec::new();
        for rule in rules {
            shapes.push(Shape::whole(*rule, BLOCK + 1_234, 1));
            if rule.moments != Moments::Block8 {
                shapes.push(Shape {
                    rule: *rule,
                    numel: 9_000,
                    gap_pages: 0,
                    segments: vec![(3, 300), (303, 7)],
                });
            }
        }
        let model = Arc::new(Model::new(shapes, 7).with_gradients_rounded(index / 2 % 2 == 1));
        let expected = model.in_memory(2);
        let kinds = Kind::all(index as u64);
        let setup = Setup {
            kind: kinds[index % kinds.len()],
            volumes: 1 + index % 3,
            slots: 1 + index % 3,
            compute_threads: 2,
            staging_chunks: if index % 2 == 0 { 60 } else { 8 },
            ..Setup::plain(kinds[0])
        };
        within_patience(&format!("{rules:?}"), move || {
            let unit = Unit::new(&model, setup);
            for step in 1..=2 {
                unit.capture(step).unwrap();
                unit.update_in_slots(unit.updates(step)).wait().unwrap();
                unit.pending.wait().unwrap();
                assert_eq!(unit.live_bytes(), [0; 3], "step {step}: leases of slots, staging, units");
            }
            unit.on_ssd().unwrap().assert_same(&expected, &format!("{setup:?}"));
        });
    }
}

/// A durable generation stays as it was, or is overwritten in place.
#[test]
fn steps_with_and_without_a_buffer_follow_one_another_across_generations() {
    for in_place in [false, true] {
        within_patience(&format!("in place: {in_place}"), move || {
            let root = tempfile::tempdir().unwrap();
            let options = StoreOptions {
                engine: EngineOptions { choice: EngineChoice::Threads, ..EngineOptions::default() },
                in_place,
                ..StoreOptions::default()
            };
            let store = Store::create(&[root.path().to_owned()], &options).unwrap();
            let model = Arc::new(Model::new(heads(), 5));
            let setup = Setup { chunk_blocks: 2, slots: 1, ..Setup::plain(Kind::Threads) };
            let unit = Unit::put_on(Bench::on(store), &model, setup).unwrap();
            for step in 1..=4 {
                unit.bench.store.commit("").unwrap();
                unit.capture(step).unwrap();
                if step % 2 == 1 {
                    unit.update_in_slots(unit.updates(step)).wait().unwrap();
                } else {
                    unit.fetch(&unit.lease(), unit.updates(step)).wait().unwrap();
                }
                unit.on_ssd().unwrap().assert_same(&model.in_memory(step), &format!("step {step}"));
                let durable = unit.bench.store.generation();
                assert_eq!(durable, if in_place { 0 } else { step }, "step {step}");
            }
        });
    }
}

#[test]
fn only_what_is_updated_is_read() {
    let model = Arc::new(Model::new(heads(), 3));
    let unit = Unit::new(&model, Setup { staging_chunks: 60, ..Setup::plain(Kind::Threads) });
    let bytes_read = || unit.bench.store.volumes()[0].counters.reads.bytes;
    unit.capture(1).unwrap();
    let mut updates = unit.updates(1);
    updates.truncate(1);
    let before = bytes_read();
    unit.update_in_slots(updates).wait().unwrap();
    unit.pending.wait().unwrap();
    // The weights of the first head: its states are fresh, its gradient is in host memory.
    assert_eq!(bytes_read() - before, ((2 * BLOCK + 1_234) * 4).next_multiple_of(4096) as u64);
    let before = bytes_read();
    unit.update_in_slots(Vec::new()).wait().unwrap();
    assert_eq!(bytes_read(), before);
}

#[test]
fn a_failed_read_fails_the_unit_and_returns_the_slots() {
    within_patience("read errors", || {
        let block8 = Rule { moments: Moments::Block8, ..adamw(Weight::F16Master) };
        let model = Arc::new(Model::new([heads(), vec![Shape::whole(block8, BLOCK + 9, 0)]].concat(), 2));
        let kind = Kind::Sim(Faults { seed: 1, read_error_one_in: 1, reorder: 5, ..Faults::default() });
        let unit = Unit::new(&model, Setup { staging_chunks: 30, ..Setup::plain(kind) });
        unit.capture(1).unwrap();
        let error = unit.update_in_slots(unit.updates(1)).wait().unwrap_err();
        assert!(names_a_tensor(&error) && error.to_string().contains("read of"), "{error}");
        assert_eq!(unit.pending.wait().unwrap_err().to_string(), error.to_string());
        assert_eq!(unit.live_bytes(), [0; 3]);
    });
}
