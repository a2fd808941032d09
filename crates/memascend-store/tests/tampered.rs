//! Manifests whose numbers another program has changed, with a checksum that is right: each is refused or opened, and
//! what is opened can be read, verified and committed to. No number panics, hangs, or takes all memory.
//!
//! `MEMASCEND_SEEDS` is how many manifests with two or three changes are tried, beside each change by itself.

use std::path::{Path, PathBuf};

use crc_fast::CrcAlgorithm::Crc32Iscsi;
use memascend_mem::{LeaseSlice, PageableAllocator, Pool, SizeClass};
use memascend_nvme::{EngineChoice, EngineOptions, Operation, Volume};
use memascend_store::{Store, StoreOptions};
use serde_json::{Value, json};

const BYTES: usize = 3 << 20;

fn options() -> StoreOptions {
    let engine = EngineOptions { choice: EngineChoice::Threads, ..EngineOptions::default() };
    StoreOptions { engine, direct: false, ..StoreOptions::default() }
}

fn buffer(bytes: usize) -> LeaseSlice {
    let pool = Pool::new(&PageableAllocator::default(), &[SizeClass::new("test", bytes, 1)]).unwrap();
    LeaseSlice::new(std::sync::Arc::new(pool.try_lease(bytes).unwrap().unwrap()), 0, bytes)
}

/// A store with two tensors, a snapshot, and checksums of whole MiBs and of parts.
fn make(directories: &[PathBuf]) {
    let store = Store::create(directories, &options()).unwrap();
    let ids = ["one", "two"].map(|name| store.create_tensor(name, BYTES as u64 + 8192).unwrap());
    for step in 1..=2 {
        for id in ids {
            store.make_spare(id).unwrap();
            let target = store.rewrite(id).unwrap().target;
            let (whole, part) = (buffer(BYTES), buffer(4096));
            store.transfer_wait(Operation::Write, target, 0, whole).unwrap();
            store.transfer_wait(Operation::Write, target, BYTES as u64, part).unwrap();
        }
        store.commit("a state").unwrap();
        store.snapshot(&format!("tag {step}")).unwrap();
    }
}

fn read(directory: &Path) -> Value {
    let note = std::fs::read(directory.join(Volume::NOTE_NAME)).unwrap();
    let json = note.iter().position(|byte| *byte == b'\n').unwrap() + 1;
    let end = note.iter().rposition(|byte| *byte != 0).unwrap() + 1;
    serde_json::from_slice(&note[json..end]).unwrap()
}

/// Writes a manifest as a right one, and as the one before, so that nothing else is found.
fn write(directory: &Path, manifest: &Value) {
    let json = manifest.to_string();
    let sum = crc_fast::checksum(Crc32Iscsi, json.as_bytes());
    let note = format!("memascend-store 3 {} {sum:08x}\n{json}", json.len());
    std::fs::write(directory.join(Volume::NOTE_NAME), &note).unwrap();
    std::fs::write(directory.join("memascend.json.new"), &note).unwrap();
}

/// The pointers of all numbers.
fn numbers(value: &Value, at: &str, found: &mut Vec<String>) {
    match value {
        Value::Number(_) => found.push(at.to_owned()),
        Value::Array(values) => {
            values
                .iter()
                .enumerate()
                .for_each(|(index, value)| numbers(value, &format!("{at}/{index}"), found));
        }
        Value::Object(fields) => {
            fields.iter().for_each(|(name, value)| numbers(value, &format!("{at}/{name}"), found));
        }
        _ => {}
    }
}

fn extremes(was: u64) -> Vec<u64> {
    let (block, stripe) = (4096, 1 << 20);
    let mut values =
        vec![0, 1, 2, 63, 65, block, stripe, u64::from(u32::MAX), 1 << 32, 1 << 44, i64::MAX as u64];
    values.extend([
        (1 << 63) - block,
        1 << 63,
        u64::MAX - block + 1,
        u64::MAX - stripe + 1,
        u64::MAX / 2,
        u64::MAX,
    ]);
    values.extend([was + 1, was.saturating_sub(1), was + block, was.saturating_sub(block), was ^ 1 << 40]);
    values
}

/// Opens what is there and uses it as a run does.
fn is_opened(directories: &[PathBuf]) -> bool {
    let store = match Store::open(directories, &options()) {
        Ok(store) => store,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return false;
        }
    };
    drop((
        store.tensors(),
        store.snapshots(),
        store.volumes(),
        store.durable_tensors(),
        store.life_bytes_written(),
    ));
    let _ = store.verify(&mut |_, _| true);
    let used = (|| {
        store.settle_manifests()?;
        for (name, extent) in store.tensors() {
            let target = buffer(4096);
            store.transfer_wait(Operation::Read, extent, extent.bytes - 4096, target)?;
            store.spare_bytes(store.find_tensor(&name).expect("it has the name"));
        }
        store.check_room(4096)?;
        store.create_tensor("three", 4096)?;
        store.commit("another state")
    })();
    if let Err(error) = used {
        assert!(!error.to_string().is_empty());
    }
    true
}

#[test]
fn every_number_of_a_manifest_may_be_any_number() {
    let root = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    for volumes in [1, 2] {
        let directories: Vec<PathBuf> =
            (0..volumes).map(|index| root.path().join(format!("{volumes} {index}"))).collect();
        make(&directories);
        let manifests: Vec<Value> = directories.iter().map(|directory| read(directory)).collect();
        let mut places = Vec::new();
        numbers(&manifests[0], "", &mut places);
        assert!(places.len() > 20, "{places:?}");
        let mut outcomes = [0, 0];
        let mut attempt = |changes: &[(&String, u64)]| {
            for (directory, manifest) in directories.iter().zip(&manifests) {
                let mut manifest = manifest.clone();
                for (place, value) in changes {
                    *manifest.pointer_mut(place).expect("it was found") = json!(value);
                }
                write(directory, &manifest);
            }
            eprintln!("{changes:?}"); // shown where the test fails
            outcomes[usize::from(is_opened(&directories))] += 1;
        };
        let was = |place: &String| manifests[0].pointer(place).and_then(Value::as_u64).expect("a number");
        for place in &places {
            // In each volume's own copy the volume's number differs.
            for value in extremes(was(place)) {
                attempt(&[(place, value)]);
            }
        }
        let seeds = std::env::var("MEMASCEND_SEEDS").map_or(300, |seeds| seeds.parse().expect("a number"));
        let mut random = 0x9E37_79B9_7F4A_7C15_u64;
        let mut below = |limit: usize| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            (random >> 11) as usize % limit
        };
        for _ in 0..seeds {
            let changes: Vec<(&String, u64)> = (0..2 + below(2))
                .map(|_| {
                    let place = &places[below(places.len())];
                    let values = extremes(was(place));
                    (place, values[below(values.len())])
                })
                .collect();
            attempt(&changes);
        }
        println!("{volumes} volumes: {} refused, {} opened", outcomes[0], outcomes[1]);
        assert!(outcomes[0] > outcomes[1] && outcomes[1] > 10);
    }
}

#[test]
fn more_volumes_than_a_machine_has_are_refused_at_once() {
    let root = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    let directories = [root.path().join("volume")];
    make(&directories);
    let mut manifest = read(&directories[0]);
    let count = 1_000_000;
    manifest["volumes"] = json!(vec!["/a"; count]);
    manifest["stripes"] = json!(vec![1; count]);
    manifest["life"] = json!(vec![0; count]);
    write(&directories[0], &manifest);
    let begun = std::time::Instant::now();
    assert!(!is_opened(&directories));
    assert!(begun.elapsed().as_secs() < 20);
}
