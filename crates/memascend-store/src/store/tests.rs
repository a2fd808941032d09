//! Stores on real files: extents, transfers, generations, damage.

use std::collections::BTreeSet;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::*;
use crate::table::Bytes;
use crate::{Damage, Rewrite};
use memascend_mem::{LeaseSlice, PageableAllocator, SizeClass};
use memascend_nvme::{EngineChoice, Operation};

fn buffer(bytes: usize) -> LeaseSlice {
    let class = SizeClass::new("test", bytes, 1);
    let pool = Pool::new(&PageableAllocator::default(), &[class]).unwrap();
    LeaseSlice::new(Arc::new(pool.try_lease(bytes).unwrap().unwrap()), 0, bytes)
}

fn store(root: &Path, volumes: usize) -> Store {
    let directories: Vec<PathBuf> = (0..volumes).map(|index| root.join(index.to_string())).collect();
    Store::create(&directories, &StoreOptions::default()).unwrap()
}

fn pattern(index: usize, seed: usize) -> u8 {
    (index / 5 + index / 4096 + seed) as u8
}

fn fill(store: &Store, extent: Extent, seed: usize) {
    let source = buffer(extent.bytes as usize);
    // SAFETY: the only handle to the buffer.
    let bytes = unsafe { source.as_mut_slice() };
    bytes.iter_mut().enumerate().for_each(|(index, byte)| *byte = pattern(index, seed));
    store.transfer_wait(Operation::Write, extent, 0, source).unwrap();
}

fn holds(store: &Store, extent: Extent, seed: usize) -> bool {
    let target = buffer(extent.bytes as usize);
    store.transfer_wait(Operation::Read, extent, 0, target.clone()).unwrap();
    // SAFETY: the transfer has ended.
    let bytes = unsafe { target.as_slice() };
    bytes.iter().enumerate().all(|(index, byte)| *byte == pattern(index, seed))
}

#[test]
fn tensors_survive_on_one_two_and_three_volumes() {
    for volumes in 1..=3 {
        let root = tempfile::tempdir().unwrap();
        let store = store(root.path(), volumes);
        let sizes = [4096, 5 << 20, (1 << 20) + 4096, 12_288];
        let extents: Vec<_> = sizes.iter().map(|bytes| store.allocate("t", *bytes).unwrap()).collect();
        extents.iter().enumerate().for_each(|(seed, extent)| fill(&store, *extent, seed));
        for (seed, extent) in extents.iter().enumerate() {
            assert!(holds(&store, *extent, seed), "{volumes} volumes");
        }
    }
}

#[test]
fn an_engine_that_moves_nothing_takes_no_room() {
    let root = tempfile::tempdir().unwrap();
    let engine = EngineOptions { choice: EngineChoice::Null, ..EngineOptions::default() };
    let options = StoreOptions { engine, ..StoreOptions::default() };
    let store = Store::create(&[root.path().to_owned()], &options).unwrap();
    store.check_room(1 << 60).unwrap();
    let extent = store.allocate("more than any disk holds", 1 << 60).unwrap();
    store.transfer_wait(Operation::Write, extent, 1 << 59, buffer(8192)).unwrap();
    assert_eq!(store.used_bytes(), 1 << 60);
    assert_eq!(std::fs::metadata(root.path().join(Volume::FILE_NAME)).unwrap().len(), 0);
}

#[test]
fn nothing_is_moved_at_once_and_who_waited_finds_the_buffer_free() {
    for volumes in 1..=2 {
        let root = tempfile::tempdir().unwrap();
        let store = store(root.path(), volumes);
        let extent = store.allocate("t", 3 << 20).unwrap();
        let class = SizeClass::new("test", 3 << 20, 1);
        let pool = Pool::new(&PageableAllocator::default(), &[class]).unwrap();
        for bytes in [0, 3 << 20, 4096].repeat(50) {
            let lease = pool.try_lease(3 << 20).unwrap().expect("returned before the end was told");
            let buffer = LeaseSlice::new(Arc::new(lease), 0, bytes);
            store.transfer_wait(Operation::Write, extent, 0, buffer).unwrap();
        }
    }
}

#[test]
fn a_store_is_replaced_on_request_unless_it_is_in_use() {
    let root = tempfile::tempdir().unwrap();
    let directories: Vec<PathBuf> = (0..2).map(|index| root.path().join(index.to_string())).collect();
    let replace = StoreOptions { replace: true, ..StoreOptions::default() };
    let first = Store::create(&directories, &replace).unwrap();
    first.create_tensor("tensor", 9 << 20).unwrap();
    assert_eq!(first.commit("the state").unwrap(), 1);
    let error = Store::create(&directories, &replace).err().unwrap();
    assert!(error.to_string().contains("in use"), "{error}");
    drop(first);
    assert_eq!(Store::open(&directories, &StoreOptions::default()).unwrap().generation(), 1);

    let second = Store::create(&directories, &replace).unwrap();
    assert_eq!((second.generation(), second.state(), second.tensors().len()), (0, None, 0));
    drop(second);
    for directory in &directories {
        let left = std::fs::read_dir(directory).map_or(0, |entries| entries.count());
        assert_eq!(left, 0, "{}", directory.display());
    }
}

#[test]
fn a_kept_store_is_opened_again_whole_from_any_of_its_volumes() {
    let root = tempfile::tempdir().unwrap();
    let directories: Vec<PathBuf> = (0..3).map(|index| root.path().join(index.to_string())).collect();
    let options = StoreOptions { rates: vec![1e9, 3e9, 2e9], ..StoreOptions::default() };
    let first = Store::create(&directories, &options).unwrap();
    let shares: Vec<f64> = first.volumes().iter().map(|volume| (volume.share * 6.0).round()).collect();
    assert_eq!(shares, [1.0, 3.0, 2.0]);
    for (seed, bytes) in [(1, 9 << 20), (2, 4096), (3, 5 << 20)] {
        let id = first.create_tensor(&format!("tensor {seed}"), bytes).unwrap();
        fill(&first, first.current(id), seed);
    }
    assert_eq!(first.commit("the state").unwrap(), 1);
    drop(first);
    let error = Store::create(&directories[1..2], &StoreOptions::default()).err().unwrap();
    assert!(error.to_string().contains("memascend.resume"), "{error}");
    // Where a store cannot be created, the one to be replaced stays.
    let elsewhere = [directories[0].clone(), root.path().join("missing/volume")];
    let replace = StoreOptions { replace: true, ..StoreOptions::default() };
    Store::create(&elsewhere, &replace).err().unwrap();
    for given in &directories {
        let store = Store::open(std::slice::from_ref(given), &StoreOptions::default()).unwrap();
        assert_eq!((store.generation(), store.state().as_deref()), (1, Some("the state")));
        assert_eq!(store.tensors().len(), 3);
        for (name, extent) in store.tensors() {
            let seed = name.strip_prefix("tensor ").unwrap().parse().unwrap();
            assert!(holds(&store, extent, seed), "{name}");
        }
    }
    let store = Store::open(&directories, &StoreOptions::default()).unwrap();
    let fourth = store.allocate("tensor 4", 8192).unwrap();
    assert!(
        store.tensors().iter().all(|(name, extent)| name == "tensor 4" || extent.offset != fourth.offset)
    );
    drop(store);
    // A volume of another store in its place is noticed.
    let other = Store::create(&[root.path().join("other")], &StoreOptions::default()).unwrap();
    other.commit("").unwrap();
    drop(other);
    std::fs::remove_dir_all(&directories[2]).unwrap();
    std::fs::rename(root.path().join("other"), &directories[2]).unwrap();
    let error = Store::open(&directories[..1], &StoreOptions::default()).err().unwrap();
    assert!(error.to_string().contains("another store"), "{error}");
}

fn open(directories: &[PathBuf]) -> Store {
    Store::open(directories, &StoreOptions::default()).unwrap()
}

#[test]
fn generations_take_turns_and_snapshots_stay() {
    let root = tempfile::tempdir().unwrap();
    let directories: Vec<PathBuf> = (0..2).map(|index| root.path().join(index.to_string())).collect();
    let store = Store::create(&directories, &StoreOptions::default()).unwrap();
    let id = store.create_tensor("weights", 3 << 20).unwrap();
    assert_eq!(store.spare_bytes(id), 3 << 20);
    assert!(matches!(store.create_tensor("weights", 4096), Err(StoreError::TensorExists { .. })));
    assert!(matches!(store.snapshot("too early"), Err(StoreError::NothingCommitted)));
    store.make_spare(id).unwrap();
    assert_eq!((store.spare_bytes(id), store.used_bytes()), (0, 6 << 20));
    let step = |store: &Store, id, seed| {
        let Rewrite { source, target } = store.rewrite(id).unwrap();
        fill(store, target, seed);
        (source, target)
    };
    let mut places = BTreeSet::new();
    for seed in 1..=6 {
        let (source, target) = step(&store, id, seed);
        // A second time before the commit it is in place.
        assert_eq!(step(&store, id, seed), (target, target));
        assert_eq!(source == target, seed == 1);
        places.insert(target.offset);
        assert_eq!(store.commit(&seed.to_string()).unwrap(), seed as u64);
        assert_eq!(store.used_bytes(), 6 << 20);
    }
    assert_eq!(places.len(), 2);
    for bad in ["", "-x", ".x", "a/b", "a\nb"] {
        assert!(matches!(store.snapshot(bad), Err(StoreError::SnapshotName { .. })), "{bad:?}");
    }
    store.snapshot("six").unwrap();
    assert!(matches!(store.snapshot("six"), Err(StoreError::SnapshotExists { .. })));
    assert_eq!(store.used_bytes(), 9 << 20);
    for seed in 7..=9 {
        step(&store, id, seed);
        store.commit(&seed.to_string()).unwrap();
        assert_eq!(store.used_bytes(), 9 << 20);
    }
    drop(store);
    let store = open(&directories[1..]);
    let id = store.find_tensor("weights").unwrap();
    assert!(holds(&store, store.current(id), 9));
    assert_eq!((store.generation(), store.state().as_deref()), (9, Some("9")));
    let snapshots = store.snapshots();
    assert_eq!((snapshots.len(), snapshots[0].generation, snapshots[0].bytes), (1, 6, 3 << 20));
    assert!(store.life_bytes_written().iter().sum::<u64>() > 30 << 20);
    assert_eq!(store.verify(&mut |_, _| true).unwrap(), []);
    step(&store, id, 10);
    let new = store.create_tensor("new", 4096).unwrap();
    fill(&store, store.current(new), 1);
    store.restore_snapshot("six").unwrap();
    assert!(holds(&store, store.current(id), 6));
    assert_eq!((store.generation(), store.state().as_deref()), (10, Some("6")));
    assert_eq!(store.find_tensor("new"), None);
    store.table().check();
    drop(store);
    the_snapshot_goes_and_its_extents_with_it(&directories);
}

fn the_snapshot_goes_and_its_extents_with_it(directories: &[PathBuf]) {
    let store = open(directories);
    let id = store.find_tensor("weights").unwrap();
    assert!(holds(&store, store.current(id), 6));
    store.delete_snapshot("six").unwrap();
    assert!(matches!(store.delete_snapshot("six"), Err(StoreError::NoSnapshot { .. })));
    assert_eq!(store.used_bytes(), 3 << 20);
    store.remove_tensor(id);
    assert_eq!(store.used_bytes(), 3 << 20, "the generation has it");
    store.commit("").unwrap();
    assert_eq!(store.used_bytes(), 0);
    store.forget().unwrap();
    drop(store);
    assert!(directories.iter().all(|directory| std::fs::read_dir(directory).unwrap().next().is_none()));
}

#[test]
fn a_store_that_is_overwritten_in_place_says_so_no_more() {
    let root = tempfile::tempdir().unwrap();
    let directories = [root.path().join("volume")];
    let options = StoreOptions { in_place: true, ..StoreOptions::default() };
    let store = Store::create(&directories, &options).unwrap();
    let id = store.create_tensor("weights", 3 << 20).unwrap();
    store.make_spare(id).unwrap();
    fill(&store, store.current(id), 1);
    store.commit("1").unwrap();
    assert_eq!((store.used_bytes(), store.generation()), (3 << 20, 1));
    drop(store);
    let store = Store::open(&directories, &options).unwrap();
    let id = store.find_tensor("weights").unwrap();
    let Rewrite { source, target } = store.rewrite(id).unwrap();
    assert_eq!((source, store.generation()), (target, 0));
    assert!(!directories[0].join(Volume::NOTE_NAME).exists());
    fill(&store, target, 2);
    assert_eq!(store.commit("2").unwrap(), 2);
    store.snapshot("two").unwrap();
    // Extents of a snapshot are not overwritten.
    let Rewrite { source, target } = store.rewrite(id).unwrap();
    assert_ne!(source, target);
    fill(&store, target, 3);
    store.commit("3").unwrap();
    assert_eq!(store.rewrite(id).unwrap().target, target);
    assert_eq!((store.generation(), store.snapshots().len()), (0, 1));
    drop(store);
    let store = Store::open(&directories, &options).unwrap();
    assert_eq!((store.generation(), store.tensors().len()), (0, 0));
    store.restore_snapshot("two").unwrap();
    let id = store.find_tensor("weights").unwrap();
    assert!(holds(&store, store.current(id), 2));
    store.table().check();
}

#[test]
fn a_flipped_bit_is_named_and_never_read_as_if_it_were_right() {
    let root = tempfile::tempdir().unwrap();
    let directories: Vec<PathBuf> = (0..2).map(|index| root.path().join(index.to_string())).collect();
    let store = Store::create(&directories, &StoreOptions::default()).unwrap();
    let id = store.create_tensor("weights", 5 << 20).unwrap();
    fill(&store, store.current(id), 1);
    store.commit("").unwrap();
    drop(store);
    // Stripe 3 is the second one on the second volume.
    let path = directories[1].join(Volume::FILE_NAME);
    let file = std::fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, (1 << 20) + 77).unwrap();
    file.write_all_at(&[byte[0] ^ 16], (1 << 20) + 77).unwrap();
    file.sync_all().unwrap();
    let store = open(&directories);
    let extent = store.current(store.find_tensor("weights").unwrap());
    let read = |offset: u64, bytes: usize| {
        store.transfer_wait(Operation::Read, extent, offset, buffer(bytes)).map_err(|error| {
            let StoreError::Damaged(damage) = error else { panic!("{error}") };
            damage
        })
    };
    let damage =
        Damage { tensor: "weights".into(), offset: 3 << 20, bytes: 1 << 20, places: vec![(path, 1 << 20)] };
    assert_eq!(read(0, 5 << 20), Err(damage.clone()));
    assert_eq!(read(0, 3 << 20), Ok(()));
    assert_eq!(read(3 << 20, 1 << 20), Err(damage.clone()));
    // Part by part, in any order: the last one completes it.
    assert_eq!(read((3 << 20) + (512 << 10), 1 << 20), Ok(()));
    assert_eq!(read((2 << 20) + 4096, (3 << 19) - 4096), Err(damage.clone()));
    assert_eq!(store.verify(&mut |_, _| true).unwrap(), [damage]);
}

#[test]
fn a_tensor_may_lie_in_several_ranges_when_only_they_have_the_room() {
    let root = tempfile::tempdir().unwrap();
    // A volume that cannot grow, as a device cannot.
    let store = store(root.path(), 2);
    let extents: Vec<_> = (0..8).map(|_| store.allocate("small", 3 << 20).unwrap()).collect();
    extents.iter().step_by(2).for_each(|extent| store.free(*extent));
    let ranges = store.table().allocator.find(12 << 20, 0).unwrap();
    assert_eq!(ranges.len(), 4);
    let scattered = Extent { offset: ranges[0].offset, bytes: 12 << 20 };
    {
        let mut table = store.table();
        table.insert(Bytes::new("scattered".into(), ranges, None), true);
    }
    extents.iter().skip(1).step_by(2).for_each(|extent| fill(&store, *extent, 7));
    fill(&store, scattered, 9);
    assert!(holds(&store, scattered, 9));
    // From the middle of one range into the next but one.
    let part = buffer(7 << 20);
    store.transfer_wait(Operation::Read, scattered, (2 << 20) + 4096, part.clone()).unwrap();
    // SAFETY: the transfer has ended.
    let bytes = unsafe { part.as_slice() };
    assert!((0..bytes.len()).all(|index| bytes[index] == pattern(index + (2 << 20) + 4096, 9)));
    extents.iter().skip(1).step_by(2).for_each(|extent| assert!(holds(&store, *extent, 7)));
    store.free(scattered);
    extents.iter().skip(1).step_by(2).for_each(|extent| store.free(*extent));
    assert_eq!(store.used_bytes(), 0);
}

#[test]
fn lack_of_room_is_known_before_anything_is_written() {
    let root = tempfile::tempdir().unwrap();
    let store = store(root.path(), 2);
    assert!(store.check_room(1 << 20).is_ok());
    let error = store.check_room(1 << 60).unwrap_err();
    assert_eq!(error.errno(), Some(libc::ENOSPC));
    assert!(store.allocate("too large", 1 << 60).is_err());
    assert_eq!(store.used_bytes(), 0);
}

/// Copies the files of a volume in a directory.
fn copy(from: &Path, to: &Path) {
    std::fs::create_dir(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

#[test]
fn a_copy_of_one_volume_does_not_take_the_others_of_its_original() {
    let root = tempfile::tempdir().unwrap();
    let [one, two, copy_of_one, copy_of_two] =
        ["1", "2", "copy 1", "copy 2"].map(|name| root.path().join(name));
    let directories = [one.clone(), two.clone()];
    let store = Store::create(&directories, &StoreOptions::default()).unwrap();
    let id = store.create_tensor("weights", 5 << 20).unwrap();
    fill(&store, store.current(id), 1);
    store.commit("one").unwrap();
    drop(store);
    copy(&one, &copy_of_one);
    copy(&two, &copy_of_two);
    let refused = |paths: &[&PathBuf]| {
        let paths: Vec<PathBuf> = paths.iter().map(|path| (*path).clone()).collect();
        let error = Store::open(&paths, &StoreOptions::default()).err().unwrap();
        let StoreError::Copied { path, .. } = &error else { panic!("{error}") };
        let told = error.to_string();
        assert!(told.contains("it is a copy, or was moved") && told.contains("Name every volume"), "{told}");
        path.clone()
    };
    assert_eq!(refused(&[&copy_of_one]), copy_of_one);
    assert_eq!(refused(&[&copy_of_two]), copy_of_two);
    // All volumes of the copy are one store, and the volumes of the original stay another.
    let store = open(&[copy_of_two.clone(), copy_of_one.clone()]);
    let id = store.find_tensor("weights").unwrap();
    fill(&store, store.rewrite(id).unwrap().target, 2);
    store.commit("two").unwrap();
    drop(store);
    for (path, seed) in [(&one, 1), (&two, 1), (&copy_of_one, 2)] {
        let store = open(std::slice::from_ref(path));
        assert!(holds(&store, store.current(store.find_tensor("weights").unwrap()), seed));
    }
    // One volume moves to another drive: the other then names the new one, and the old one is out.
    std::fs::remove_dir_all(&copy_of_two).unwrap();
    copy(&two, &copy_of_two);
    std::fs::remove_dir_all(&copy_of_one).unwrap();
    let store = open(&[one.clone(), copy_of_two.clone()]);
    store.commit("three").unwrap();
    drop(store);
    assert_eq!(refused(&[&two]), two);
    assert_eq!(open(&[copy_of_two]).state().as_deref(), Some("three"));
    assert_eq!(open(&[one]).state().as_deref(), Some("three"));
}

#[test]
fn a_snapshot_is_loaded_and_durable_only_once_confirmed() {
    let root = tempfile::tempdir().unwrap();
    let directories = [root.path().join("1")];
    let store = Store::create(&directories, &StoreOptions::default()).unwrap();
    let id = store.create_tensor("weights", 2 << 20).unwrap();
    fill(&store, store.current(id), 1);
    store.commit("one").unwrap();
    store.snapshot("one").unwrap();
    store.make_spare(id).unwrap();
    let later = store.create_tensor("later", 1 << 20).unwrap();
    fill(&store, store.current(later), 7);
    fill(&store, store.rewrite(id).unwrap().target, 2);
    store.commit("two").unwrap();
    store.load_snapshot("one").unwrap();
    assert!(holds(&store, store.current(id), 1));
    assert_eq!((store.find_tensor("later"), store.state().as_deref()), (None, Some("two")));
    drop(store);
    // Whatever was refused then has changed nothing.
    let store = open(&directories);
    assert_eq!(store.state().as_deref(), Some("two"));
    assert!(holds(&store, store.current(store.find_tensor("later").unwrap()), 7));
    let id = store.find_tensor("weights").unwrap();
    store.make_spare(id).unwrap();
    store.load_snapshot("one").unwrap();
    let made = store.create_tensor("made meanwhile", 4096).unwrap();
    store.make_spare(id).unwrap();
    store.confirm_snapshot("one").unwrap();
    assert_eq!((store.state().as_deref(), store.current(made).bytes), (Some("one"), 4096));
    assert_eq!(store.spare_bytes(id), 0, "no step has to allocate");
    store.table().check();
}

#[test]
fn a_directory_given_twice_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let directory = root.path().to_owned();
    let error = Store::create(&[directory.clone(), directory], &StoreOptions::default()).err().unwrap();
    assert!(matches!(error, StoreError::Duplicate { .. }), "{error}");
}
