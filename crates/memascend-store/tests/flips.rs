//! Single bits that flip on the drive: each is noticed, or it is in bytes without a use.
//!
//! `MEMASCEND_FLIPS` is how many places are tried in each test, or `all`.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memascend_mem::{LeaseSlice, PageableAllocator, Pool, SizeClass};
use memascend_nvme::testing::{Faults, SimDisk, SimEngine, SimNotePlace};
use memascend_nvme::{OpenedEngine, Operation, Volume};
use memascend_store::{Extent, Store, StoreError, StoreOptions};

const FLIPS: usize = 1_000;

fn buffer(bytes: u64) -> LeaseSlice {
    let class = SizeClass::new("test", bytes as usize, 1);
    let pool = Pool::new(&PageableAllocator::default(), &[class]).unwrap();
    LeaseSlice::new(Arc::new(pool.try_lease(bytes as usize).unwrap().unwrap()), 0, bytes as usize)
}

fn pattern(index: usize, value: u64) -> u8 {
    (index as u64 / 3 + index as u64 / 4096 + value * 77) as u8
}

fn fill(store: &Store, extent: Extent, value: u64) {
    let source = buffer(extent.bytes);
    // SAFETY: the only handle to the buffer.
    let bytes = unsafe { source.as_mut_slice() };
    bytes.iter_mut().enumerate().for_each(|(index, byte)| *byte = pattern(index, value));
    store.transfer_wait(Operation::Write, extent, 0, source).unwrap();
}

fn holds(store: &Store, name: &str, value: u64) -> Result<bool, StoreError> {
    let extent = store.current(store.find_tensor(name).expect("it was committed"));
    let target = buffer(extent.bytes);
    store.transfer_wait(Operation::Read, extent, 0, target.clone())?;
    // SAFETY: the transfer has ended.
    let bytes = unsafe { target.as_slice() };
    Ok(bytes.iter().enumerate().all(|(index, byte)| *byte == pattern(index, value)))
}

/// Three generations of two tensors, the first with a snapshot; and bytes of no generation.
fn train(store: &Store) {
    let ids = [("large", (1 << 20) + 12_288), ("small", 20_480)]
        .map(|(name, bytes)| store.create_tensor(name, bytes).unwrap());
    for step in 1..=3 {
        for id in ids {
            store.make_spare(id).unwrap();
            fill(store, store.rewrite(id).unwrap().target, step);
        }
        let gradient = store.allocate("gradient", 8192).unwrap();
        fill(store, gradient, step);
        store.commit(&step.to_string()).unwrap();
        if step == 1 {
            store.snapshot("first").unwrap();
        }
    }
}

/// Places of bits among `bytes` bytes: a sample that is the same every time, or every one of them.
fn places(bytes: u64) -> Vec<(u64, u8)> {
    let bits = bytes * 8;
    let count = match std::env::var("MEMASCEND_FLIPS") {
        Ok(count) if count == "all" => bits,
        Ok(count) => count.parse().expect("a number, or all"),
        Err(_) => FLIPS as u64,
    };
    let place = |index: u64| {
        let bit = if count >= bits {
            index
        } else {
            (u128::from(index) * 0x9E37_79B9_7F4A_7C15 % u128::from(bits)) as u64
        };
        (bit / 8, 1 << (bit % 8))
    };
    (0..count.min(bits)).map(place).collect()
}

fn flip(file: &File, (place, change): (u64, u8)) {
    let mut byte = [0];
    file.read_exact_at(&mut byte, place).unwrap();
    file.write_all_at(&[byte[0] ^ change], place).unwrap();
}

fn options() -> StoreOptions {
    // A flip through the page cache has to be seen at once.
    StoreOptions { direct: false, ..StoreOptions::default() }
}

/// The ranges that the generations have, by the manifest.
fn used(directory: &Path) -> Vec<(u64, u64)> {
    let note = std::fs::read(directory.join(Volume::NOTE_NAME)).unwrap();
    let json = note.iter().position(|byte| *byte == b'\n').unwrap() + 1;
    let end = note.iter().position(|byte| *byte == 0).unwrap_or(note.len());
    let manifest: serde_json::Value = serde_json::from_slice(&note[json..end]).unwrap();
    let versions = manifest["versions"].as_array().unwrap().iter();
    let ranges = versions.flat_map(|version| version["ranges"].as_array().unwrap());
    ranges.map(|range| (range[0].as_u64().unwrap(), range[1].as_u64().unwrap())).collect()
}

#[test]
fn a_bit_of_the_data_is_noticed_or_nobodys() {
    let root = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    let directories = [root.path().join("volume")];
    let store = Store::create(&directories, &options()).unwrap();
    train(&store);
    drop(store);
    let used = used(&directories[0]);
    let path = directories[0].join(Volume::FILE_NAME);
    let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    let store = Store::open(&directories, &options()).unwrap();
    let (mut noticed, mut unused) = (0, 0);
    for place in places(file.metadata().unwrap().len()) {
        flip(&file, place);
        let damages = store.verify(&mut |_, _| true).unwrap();
        let is_used = used.iter().any(|(begin, bytes)| (*begin..begin + bytes).contains(&place.0));
        match damages.as_slice() {
            [] => {
                assert!(!is_used, "byte {} is used, and the flip went unnoticed", place.0);
                assert!(holds(&store, "large", 3).unwrap() && holds(&store, "small", 3).unwrap());
                unused += 1;
            }
            [damage] => {
                assert!(is_used, "{damage}");
                let (found, position) = &damage.places[0];
                assert_eq!(*found, path);
                assert!((*position..position + damage.bytes).contains(&place.0), "{damage}");
                noticed += 1;
                // Reads of the present value say so too, if it is in that.
                let current = store.current(store.find_tensor(&damage.tensor).unwrap());
                let is_current = (current.offset..current.end()).contains(&place.0);
                match holds(&store, &damage.tensor, 3) {
                    Ok(right) => assert!(right && !is_current),
                    Err(StoreError::Damaged(read)) => assert!(is_current && read == *damage),
                    Err(error) => panic!("{error}"),
                }
            }
            more => panic!("one bit, and {more:?}"),
        }
        flip(&file, place);
    }
    assert_eq!(store.verify(&mut |_, _| true).unwrap(), []);
    eprintln!("{noticed} noticed, {unused} in bytes that no generation has");
    assert!(noticed > unused && unused > 0);
}

#[test]
fn a_bit_of_the_manifest_is_noticed() {
    let root = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    for volumes in [1, 2] {
        let directories: Vec<PathBuf> =
            (0..volumes).map(|index| root.path().join(format!("{volumes} {index}"))).collect();
        let store = Store::create(&directories, &options()).unwrap();
        train(&store);
        drop(store);
        let path = directories[0].join(Volume::NOTE_NAME);
        let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
        let length = written_bytes(&std::fs::read(&path).unwrap()) as u64;
        let (mut noticed, mut unused, mut other_formats) = (0, 0, 0);
        for place in places(file.metadata().unwrap().len()) {
            flip(&file, place);
            match Store::open(&directories, &options()) {
                // One bit makes the 3 of the format a 7, which nothing older may stand in for.
                Err(StoreError::Manifest { path, reason }) => {
                    assert!(volumes == 1 && reason.contains("format 7"), "{place:?}: {reason}");
                    assert_eq!(path, directories[0]);
                    other_formats += 1;
                }
                Err(error) => panic!("{error}"),
                Ok(store) => {
                    let is_used = place.0 < length;
                    let told = store.notices().iter().any(|notice| notice.contains("manifest"));
                    assert_eq!(told, is_used, "{place:?}: {:?}", store.notices());
                    // The other volume has the last one; one volume alone has the one before.
                    let value = if volumes == 1 && is_used { 2 } else { 3 };
                    assert_eq!((store.generation(), store.state()), (value, Some(value.to_string())));
                    assert_eq!(store.snapshots().len(), 1);
                    let (damaged, is_older) = store.damaged_manifests();
                    assert_eq!(is_older, value == 2);
                    // A manifest of another format is not damaged.
                    assert!(damaged.is_empty() != is_used || volumes == 2);
                    *(if is_used { &mut noticed } else { &mut unused }) += 1;
                    if place.0.is_multiple_of(16) {
                        assert!(
                            holds(&store, "large", value).unwrap() && holds(&store, "small", value).unwrap()
                        );
                    }
                }
            }
            flip(&file, place);
        }
        eprintln!("{noticed} noticed, {unused} behind the manifest, {other_formats} of another format");
        assert!(noticed > 0 && unused > 0);
        let store = Store::open(&directories, &options()).unwrap();
        assert!(!store.notices().iter().any(|notice| notice.contains("manifest")));
    }
}

/// Where the zeros behind a manifest begin.
fn written_bytes(note: &[u8]) -> usize {
    note.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1)
}

/// A store of one volume after three steps, and the file of its manifest.
fn trained(root: &Path, options: &StoreOptions) -> ([PathBuf; 1], File) {
    let directories = [root.join("volume")];
    train(&Store::create(&directories, options).unwrap());
    let path = directories[0].join(Volume::NOTE_NAME);
    (directories, OpenOptions::new().read(true).write(true).open(path).unwrap())
}

/// The place of a bit in the JSON.
const PLACE: (u64, u8) = (100, 4);

/// The run writes where the last generation was: its manifest must not be found again, even if it can be read
/// another time.
#[test]
fn a_run_that_went_back_stays_back() {
    let root = tempfile::tempdir().unwrap();
    let (directories, file) = trained(root.path(), &options());
    flip(&file, PLACE);
    let store = Store::open(&directories, &options()).unwrap();
    drop(store);
    assert!(Store::open(&directories, &options()).unwrap().damaged_manifests().1, "looking changes nothing");
    let store = Store::open(&directories, &options()).unwrap();
    store.settle_manifests().unwrap();
    let id = store.find_tensor("large").unwrap();
    store.make_spare(id).unwrap();
    fill(&store, store.rewrite(id).unwrap().target, 9);
    drop(store);
    flip(&file, PLACE);
    let store = Store::open(&directories, &options()).unwrap();
    assert_eq!((store.generation(), store.damaged_manifests().1), (2, false));
    assert!(holds(&store, "large", 2).unwrap() && holds(&store, "small", 2).unwrap());
    store.commit("after").unwrap();
    drop(store);
    assert_eq!(Store::open(&directories, &options()).unwrap().state().as_deref(), Some("after"));
}

/// Whatever writes a manifest first, the only whole one is not written over.
#[test]
fn the_only_whole_manifest_is_not_written_over() {
    let root = tempfile::tempdir().unwrap();
    let (directories, file) = trained(root.path(), &options());
    flip(&file, PLACE);
    let whole = std::fs::read(directories[0].join("memascend.json.new")).unwrap();
    let store = Store::open(&directories, &options()).unwrap();
    store.delete_snapshot("first").unwrap();
    // The one replaced last is the one that was taken.
    let before = std::fs::read(directories[0].join("memascend.json.new")).unwrap();
    assert_eq!(before[..written_bytes(&before)], whole[..written_bytes(&whole)]);
}

#[test]
fn a_damaged_manifest_is_mended() {
    let root = tempfile::tempdir().unwrap();
    let (directories, file) = trained(root.path(), &options());
    flip(&file, PLACE);
    let store = Store::open(&directories, &options()).unwrap();
    assert_eq!(store.verify(&mut |_, _| true).unwrap(), []);
    store.mend_manifests().unwrap();
    drop(store);
    let store = Store::open(&directories, &options()).unwrap();
    assert_eq!((store.generation(), store.damaged_manifests()), (2, (&[][..], false)));
    assert_eq!(store.snapshots().len(), 1);
}

/// The generation before may have been written over in part by the step after the last one.
#[test]
fn what_was_written_over_is_told_and_snapshots_stay() {
    let root = tempfile::tempdir().unwrap();
    let (directories, file) = trained(root.path(), &options());
    let store = Store::open(&directories, &options()).unwrap();
    let id = store.find_tensor("small").unwrap();
    store.make_spare(id).unwrap();
    fill(&store, store.rewrite(id).unwrap().target, 4);
    drop(store);
    flip(&file, PLACE);
    let store = Store::open(&directories, &options()).unwrap();
    assert_eq!(store.generation(), 2);
    let damaged = ["large", "small"].map(|name| match holds(&store, name, 2) {
        Ok(right) => !right && panic!("{name} has other bytes, and nothing tells"),
        Err(StoreError::Damaged(damage)) => damage.tensor == name,
        Err(error) => panic!("{error}"),
    });
    assert!(damaged.contains(&true), "the step went on where the second generation was");
    assert!(!store.verify(&mut |_, _| true).unwrap().is_empty());
    store.restore_snapshot("first").unwrap();
    assert!(holds(&store, "large", 1).unwrap() && holds(&store, "small", 1).unwrap());
}

/// Without checksums nothing would reveal overwritten bytes.
#[test]
fn an_older_manifest_without_checksums_is_not_taken() {
    let root = tempfile::tempdir().unwrap();
    let unchecked = StoreOptions { checksums: false, ..options() };
    let (directories, file) = trained(root.path(), &unchecked);
    flip(&file, PLACE);
    match Store::open(&directories, &options()) {
        Err(StoreError::Manifest { reason, .. }) => assert!(reason.contains("without checksums"), "{reason}"),
        other => panic!("{:?}", other.map(|store| store.generation())),
    }
}

/// An older step stands in for a manifest that is damaged, not for one that cannot be read, is of a
/// later version, or was removed.
#[test]
fn an_older_manifest_is_taken_for_a_damaged_one_alone() {
    let root = tempfile::tempdir().unwrap();
    let (directories, file) = trained(root.path(), &options());
    let opened = || Store::open(&directories, &options()).map(|store| store.generation());
    let path = directories[0].join(Volume::NOTE_NAME);
    let length = file.metadata().unwrap().len();
    file.set_len(257 << 20).unwrap();
    assert_eq!(opened().unwrap_err().io().and_then(memascend_nvme::IoError::errno), Some(libc::EFBIG));
    file.set_len(length).unwrap();
    assert_eq!(opened().unwrap(), 3);
    let mut format = [0];
    let place = "memascend-store ".len() as u64;
    file.read_exact_at(&mut format, place).unwrap();
    file.write_all_at(b"4", place).unwrap();
    assert!(opened().unwrap_err().to_string().contains("format 4"));
    file.write_all_at(&format, place).unwrap();
    let aside = root.path().join("aside");
    std::fs::rename(&path, &aside).unwrap();
    std::fs::create_dir(&path).unwrap();
    assert!(opened().is_err());
    std::fs::remove_dir(&path).unwrap();
    assert!(matches!(opened(), Err(StoreError::Volume(memascend_nvme::IoError::NotKept { .. }))));
    std::fs::rename(&aside, &path).unwrap();
    assert_eq!(opened().unwrap(), 3);
}

/// On a device, whose two slots are simulated: the generation before is taken, and a notice says so.
#[test]
fn a_bit_of_a_devices_manifest_is_noticed_or_nobodys() {
    const SLOTS: [u64; 2] = [1 << 40, (1 << 40) + (1 << 19)];
    let root = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    let directories = [root.path().join("volume")];
    let disk = SimDisk::new(Faults::default());
    let open = |file: &_| {
        let engine = Arc::new(SimEngine::running(file, Arc::clone(&disk)).with_notes(SimNotePlace::Slots));
        Ok(OpenedEngine { engine, notice: None })
    };
    let store = Store::create_with(&directories, &options(), &open).unwrap();
    train(&store);
    drop(store);
    let (mut newest, mut older, mut told) = (0, 0, 0);
    let area = 3 * 4096;
    for (place, change) in places(2 * area) {
        let place = SLOTS[(place / area) as usize] + place % area;
        if !disk.flip(place, change) {
            // Nothing was ever written there.
            continue;
        }
        match Store::open_with(&directories, &options(), &open) {
            Ok(store) => {
                let notice = store.notices().iter().any(|notice| notice.contains("manifests"));
                told += u64::from(notice);
                match store.generation() {
                    3 => newest += 1,
                    2 => {
                        older += 1;
                        assert!(notice, "{place}");
                    }
                    other => panic!("generation {other}"),
                }
                let value = store.generation();
                assert_eq!(store.state(), Some(value.to_string()));
                assert!(holds(&store, "large", value).unwrap() && holds(&store, "small", value).unwrap());
                assert_eq!(store.snapshots().len(), 1);
            }
            Err(error) => panic!("one of the two is whole: {error}"),
        }
        disk.flip(place, change);
    }
    eprintln!("{newest} times the newest, {older} times the one before, {told} times with a notice");
    assert!(newest > 0 && older > 0 && told > older);
}
