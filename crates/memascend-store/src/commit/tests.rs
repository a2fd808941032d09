//! Commits, snapshots and their manifests against a model.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use memascend_mem::{LeaseSlice, PageableAllocator, Pool, SizeClass};
use memascend_nvme::testing::{Faults, Power, SimDisk, SimEngine, SimNotePlace};
use memascend_nvme::{IoError, OpenedEngine, Operation, VolumeFile};
use proptest::prelude::*;

use super::*;
use crate::checksums::{Checksums, sum_writes};
use crate::manifest::Manifest;
use crate::{Extent, StoreOptions};

/// The manifest of a model of 7 billion parameters: 300 tensors with a weight and three states
/// each, 100 GB, and a snapshot of as many again. It takes little more than its checksums, and it
/// is read as it was written.
#[test]
fn the_manifest_of_a_large_model_is_little_more_than_its_checksums() {
    const TENSORS: u64 = 1200;
    const BYTES: u64 = (100_000_000_000 / TENSORS) / 4096 * 4096;
    let root = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    let engine = memascend_nvme::EngineOptions {
        choice: memascend_nvme::EngineChoice::Null,
        ..memascend_nvme::EngineOptions::default()
    };
    let options = StoreOptions { engine, ..StoreOptions::default() };
    let store = Store::create(&[root.path().to_owned()], &options).unwrap();
    let block = vec![7; 1 << 20];
    let know = |of: &Bytes| {
        of.sums().write(
            &(0..BYTES.div_ceil(1 << 20))
                .flat_map(|mib| {
                    let bytes = (BYTES - (mib << 20)).min(1 << 20) as usize;
                    sum_writes(mib << 20, &block[..bytes])
                })
                .collect::<Vec<_>>(),
        )
    };
    for index in 0..TENSORS {
        let id = store.create_tensor(&format!("model.layers.{}.states.{index}", index / 40), BYTES).unwrap();
        if index == 0 {
            know(store.table().current(id));
        } else {
            let first = store.find_tensor("model.layers.0.states.0").unwrap();
            let known = store.table().current(first).sums().encode();
            *store.table().current(id).sums() = Checksums::decode(BYTES, &known).unwrap();
        }
    }
    let mut sizes = Vec::new();
    for copies in 1..=2 {
        store.commit("{}").unwrap();
        let generation = store.table().durable.clone().unwrap();
        let snapshots = store.table().snapshots.clone();
        let note = Common::of(&store.body(Some(&generation), &snapshots)).unwrap().note(0).unwrap();
        let manifest = Manifest::parse(&note).unwrap();
        assert_eq!(manifest.body.versions.len() as u64, copies * TENSORS);
        let checksums = manifest.body.versions.len() * BYTES.div_ceil(1 << 20) as usize;
        assert!(checksums > 90_000);
        // Four bytes for a checksum; of each version also a name, extents and a head.
        let least = checksums * 4;
        assert!(
            (least..least + 256 * manifest.body.versions.len()).contains(&note.len()),
            "{} bytes",
            note.len()
        );
        assert_eq!(Common::of(&manifest.body).unwrap().note(0).unwrap(), note);
        sizes.push(note.len());
        if copies == 1 {
            store.snapshot("kept").unwrap();
            let ids: Vec<_> =
                store.tensors().into_iter().map(|(name, _)| store.find_tensor(&name).unwrap()).collect();
            for id in ids {
                let known = store.table().current(id).sums().encode();
                store.rewrite(id).unwrap();
                *store.table().current(id).sums() = Checksums::decode(BYTES, &known).unwrap();
            }
        }
    }
    assert!(sizes[1] <= 2 * sizes[0] + 4096, "{sizes:?}: twice as many versions take twice as much");
    store.forget().unwrap();
}

#[derive(Debug, Clone)]
enum Action {
    Create {
        blocks: u64,
    },
    Remove {
        pick: prop::sample::Index,
    },
    Spare {
        pick: prop::sample::Index,
    },
    Rewrite {
        pick: prop::sample::Index,
    },
    /// The power fails on the way; without a crash that is an error like any other.
    Commit {
        fails_at: Option<u64>,
    },
    Snapshot {
        fails_at: Option<u64>,
    },
    Delete {
        pick: prop::sample::Index,
        fails_at: Option<u64>,
    },
    Restore {
        pick: prop::sample::Index,
        fails_at: Option<u64>,
    },
    /// The values of a snapshot become current. The rest may follow, or never does.
    TakeUp {
        pick: prop::sample::Index,
        confirm: bool,
        fails_at: Option<u64>,
    },
    Plain {
        blocks: u64,
    },
    FreePlain,
    Reopen {
        crash: bool,
    },
}

fn action() -> impl Strategy<Value = Action> {
    let pick = any::<prop::sample::Index>;
    let fails = || prop::option::weighted(0.3, 1_u64..12);
    prop_oneof![
        3 => (1_u64..5).prop_map(|blocks| Action::Create { blocks }),
        1 => pick().prop_map(|pick| Action::Remove { pick }),
        2 => pick().prop_map(|pick| Action::Spare { pick }),
        8 => pick().prop_map(|pick| Action::Rewrite { pick }),
        5 => fails().prop_map(|fails_at| Action::Commit { fails_at }),
        2 => fails().prop_map(|fails_at| Action::Snapshot { fails_at }),
        1 => (pick(), fails()).prop_map(|(pick, fails_at)| Action::Delete { pick, fails_at }),
        1 => (pick(), fails()).prop_map(|(pick, fails_at)| Action::Restore { pick, fails_at }),
        1 => (pick(), any::<bool>(), fails())
            .prop_map(|(pick, confirm, fails_at)| Action::TakeUp { pick, confirm, fails_at }),
        2 => (1_u64..4).prop_map(|blocks| Action::Plain { blocks }),
        1 => Just(Action::FreePlain),
        2 => any::<bool>().prop_map(|crash| Action::Reopen { crash }),
    ]
}

fn buffer(bytes: u64, value: u8) -> LeaseSlice {
    let class = SizeClass::new("test", bytes as usize, 1);
    let pool = Pool::new(&PageableAllocator::default(), &[class]).unwrap();
    let lease = Arc::new(pool.try_lease(bytes as usize).unwrap().unwrap());
    let buffer = LeaseSlice::new(lease, 0, bytes as usize);
    // SAFETY: the only handle to the buffer.
    unsafe { buffer.as_mut_slice() }.fill(value);
    buffer
}

/// Writes an extent full of `value`, or asserts that it reads so.
fn transfer(store: &Store, operation: Operation, extent: Extent, value: u8) {
    let buffer = buffer(extent.bytes, if operation == Operation::Write { value } else { !value });
    store.transfer_wait(operation, extent, 0, buffer.clone()).unwrap();
    // SAFETY: the transfer has ended.
    let bytes = unsafe { buffer.as_slice() };
    assert!(bytes.iter().all(|byte| *byte == value), "{extent:?} is not {value}");
}

/// A tensor's value and where it lies.
type Values = BTreeMap<String, (u8, Extent)>;

/// The expected store.
#[derive(Debug, Clone, Default, PartialEq)]
struct World {
    durable: Option<Values>,
    snapshots: Vec<(String, Values)>,
}

struct Trial<'a> {
    directories: Vec<PathBuf>,
    disks: Vec<Arc<SimDisk>>,
    power: Arc<Power>,
    place: SimNotePlace,
    store: Option<Store>,
    /// As it is known to be, and as it may be on the medium after failures.
    world: World,
    doubtful: Vec<World>,
    /// A flush has failed since the store was opened.
    lost: bool,
    present: Values,
    plain: Vec<Extent>,
    values: u8,
    made: usize,
    _root: &'a Path,
}

impl Trial<'_> {
    fn store(&self) -> &Store {
        self.store.as_ref().unwrap()
    }

    fn open(&self, create: bool) -> Result<Store> {
        let options = StoreOptions { direct: false, ..StoreOptions::default() };
        let open = |file: &Arc<VolumeFile>| {
            let directory = file.path().parent().unwrap();
            let index = self.directories.iter().position(|known| known == directory).unwrap();
            let engine = SimEngine::new(file, Arc::clone(&self.disks[index])).with_notes(self.place);
            Ok(OpenedEngine { engine: Arc::new(engine), notice: None })
        };
        if create {
            Store::create_with(&self.directories, &options, &open)
        } else {
            Store::open_with(&self.directories, &options, &open)
        }
    }

    fn transfer(&self, operation: Operation, extent: Extent, value: u8) {
        transfer(self.store(), operation, extent, value);
    }

    /// Everything that may be needed again.
    fn pinned(&self) -> BTreeSet<u64> {
        let worlds = [&self.world].into_iter().chain(&self.doubtful);
        let values =
            worlds.flat_map(|world| world.durable.iter().chain(world.snapshots.iter().map(|(_, of)| of)));
        values.flat_map(|values| values.values().map(|(_, extent)| extent.offset)).collect()
    }

    fn pick(&self, pick: &prop::sample::Index) -> Option<String> {
        let count = self.present.len();
        (count > 0).then(|| self.present.keys().nth(pick.index(count)).unwrap().clone())
    }

    /// Runs the operations that change the medium, whether they fail or not.
    fn change(
        &mut self,
        fails_at: Option<u64>,
        after: World,
        run: impl FnOnce(&Store) -> Result<()>,
    ) -> bool {
        if let Some(at) = fails_at {
            self.power.cut_at(at);
        }
        let done = run(self.store());
        let failed = self.power.is_off();
        self.power.restore();
        let flush_failed = matches!(done, Err(StoreError::Volume(IoError::Flush { .. })));
        let had_failed = self.lost;
        // Volumes are written at once: the error that was told may be another one's.
        self.lost |= self.store().members.iter().any(|member| member.check_flushes().is_err());
        if had_failed {
            assert!(flush_failed, "nothing becomes durable once a flush has failed: {done:?}");
            return false;
        }
        assert_eq!(done.is_err(), failed, "{done:?}");
        if failed {
            self.doubtful.push(after);
        } else {
            self.world = after;
            self.doubtful.clear();
        }
        !failed
    }

    fn create(&mut self, blocks: u64) {
        let name = format!("tensor {:03}", self.made);
        self.made += 1;
        let id = self.store().create_tensor(&name, blocks * 4096).unwrap();
        let extent = self.store().current(id);
        self.values = self.values.wrapping_add(1);
        assert!(!self.pinned().contains(&extent.offset));
        self.transfer(Operation::Write, extent, self.values);
        self.present.insert(name, (self.values, extent));
    }

    fn make_spare(&self, pick: &prop::sample::Index) {
        let Some(name) = self.pick(pick) else { return };
        let id = self.store().find_tensor(&name).unwrap();
        let (lacking, used) = (self.store().spare_bytes(id), self.store().used_bytes());
        self.store().make_spare(id).unwrap();
        assert_eq!(self.store().used_bytes(), used + lacking);
        assert_eq!(self.store().spare_bytes(id), 0);
    }

    fn rewrite(&mut self, pick: &prop::sample::Index) {
        let Some(name) = self.pick(pick) else { return };
        let id = self.store().find_tensor(&name).unwrap();
        let rewrite = self.store().rewrite(id).unwrap();
        let (value, extent) = self.present[&name];
        assert_eq!(rewrite.source, extent);
        assert!(!self.pinned().contains(&rewrite.target.offset), "what was committed is a target");
        self.transfer(Operation::Read, rewrite.source, value);
        self.values = self.values.wrapping_add(1);
        self.transfer(Operation::Write, rewrite.target, self.values);
        self.present.insert(name, (self.values, rewrite.target));
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Create { blocks } => self.create(blocks),
            Action::Remove { pick } => {
                let Some(name) = self.pick(&pick) else { return };
                self.store().remove_tensor(self.store().find_tensor(&name).unwrap());
                self.present.remove(&name);
            }
            Action::Spare { pick } => self.make_spare(&pick),
            Action::Rewrite { pick } => self.rewrite(&pick),
            Action::Commit { fails_at } => {
                let after = World { durable: Some(self.present.clone()), ..self.world.clone() };
                // While volumes are flushed no manifest is on its way yet.
                let flushing = fails_at.is_some_and(|at| at <= self.disks.len() as u64);
                let after = if flushing { self.world.clone() } else { after };
                self.change(fails_at, after, |store| store.commit("").map(drop));
            }
            Action::Snapshot { fails_at } => {
                let Some(durable) = self.world.durable.clone() else { return };
                let tag = format!("tag {}", self.made);
                self.made += 1;
                let mut after = self.world.clone();
                after.snapshots.push((tag.clone(), durable));
                self.change(fails_at, after, |store| store.snapshot(&tag));
            }
            Action::Delete { pick, fails_at } => {
                if self.world.snapshots.is_empty() {
                    return;
                }
                let mut after = self.world.clone();
                let (tag, _) = after.snapshots.remove(pick.index(self.world.snapshots.len()));
                self.change(fails_at, after, |store| store.delete_snapshot(&tag));
            }
            Action::Restore { pick, fails_at } => {
                if self.world.snapshots.is_empty() {
                    return;
                }
                let (tag, values) = self.world.snapshots[pick.index(self.world.snapshots.len())].clone();
                let after = World { durable: Some(values.clone()), ..self.world.clone() };
                if self.change(fails_at, after, |store| store.restore_snapshot(&tag)) {
                    self.present = values;
                }
            }
            Action::TakeUp { pick, confirm, fails_at } => {
                if self.world.snapshots.is_empty() {
                    return;
                }
                let (tag, values) = self.world.snapshots[pick.index(self.world.snapshots.len())].clone();
                self.store().load_snapshot(&tag).unwrap();
                self.present = values.clone();
                if confirm {
                    let after = World { durable: Some(values), ..self.world.clone() };
                    self.change(fails_at, after, |store| store.confirm_snapshot(&tag));
                }
            }
            Action::Plain { blocks } => {
                let extent = self.store().allocate("plain", blocks * 4096).unwrap();
                assert!(!self.pinned().contains(&extent.offset));
                self.transfer(Operation::Write, extent, 0xFF);
                self.plain.push(extent);
            }
            Action::FreePlain => {
                if let Some(extent) = self.plain.pop() {
                    self.store().free(extent);
                }
            }
            Action::Reopen { crash } => self.reopen(crash),
        }
        self.store().table().check();
    }

    fn reopen(&mut self, crash: bool) {
        if self.world.durable.is_none() {
            // A failure before the first success leaves nothing that has to be found.
            return;
        }
        self.store = None;
        self.lost = false;
        if crash {
            self.disks.iter().for_each(|disk| disk.crash());
        }
        let store = self.open(false).unwrap();
        let names =
            |values: &Values| values.iter().map(|(name, (_, extent))| (name.clone(), *extent)).collect();
        let found: Vec<(String, Extent)> = store.tensors();
        let found: BTreeMap<String, Extent> = found.into_iter().collect();
        let tags: Vec<String> = store.snapshots().into_iter().map(|snapshot| snapshot.tag).collect();
        self.store = Some(store);
        self.plain.clear();
        let worlds: Vec<World> = std::mem::take(&mut self.doubtful);
        let fits = |world: &&World| {
            let known: BTreeMap<String, Extent> = world.durable.as_ref().map(names).unwrap_or_default();
            known == found && world.snapshots.iter().map(|(tag, _)| tag).eq(&tags)
        };
        let candidates: Vec<World> =
            [self.world.clone()].iter().chain(worlds.iter().rev()).filter(fits).cloned().collect();
        assert!(
            !candidates.is_empty(),
            "neither {:?} nor what was under way: {found:?} {tags:?}",
            self.world
        );
        self.world = candidates[0].clone();
        self.present = self.world.durable.clone().unwrap_or_default();
        for (value, extent) in self.present.clone().into_values() {
            self.transfer(Operation::Read, extent, value);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_extent_that_a_generation_has_is_ever_written_to(
        actions in prop::collection::vec(action(), 1..60), volumes in 1_usize..3, slots in any::<bool>(),
    ) {
        let root = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
        let power = Power::new();
        let disk = |seed| SimDisk::with_power(Faults { seed, ..Faults::default() }, Arc::clone(&power));
        let mut trial = Trial {
            directories: (0..volumes).map(|index| root.path().join(index.to_string())).collect(),
            disks: (0..volumes as u64).map(disk).collect(),
            power: Arc::clone(&power),
            place: if slots { SimNotePlace::Slots } else { SimNotePlace::File },
            store: None,
            world: World::default(),
            doubtful: Vec::new(),
            lost: false,
            present: Values::new(),
            plain: Vec::new(),
            values: 0,
            made: 0,
            _root: root.path(),
        };
        trial.store = Some(trial.open(true).unwrap());
        for action in actions {
            trial.act(action);
        }
        for (value, extent) in trial.present.clone().into_values() {
            trial.transfer(Operation::Read, extent, value);
        }
        if trial.lost {
            trial.reopen(false);
        }
        for (tag, values) in trial.world.snapshots.clone() {
            trial.store().restore_snapshot(&tag).unwrap();
            for (value, extent) in values.into_values() {
                trial.transfer(Operation::Read, extent, value);
            }
        }
    }
}

/// A simulated drive with one store, and the power that it hangs on.
struct Drive {
    root: tempfile::TempDir,
    power: Arc<Power>,
    disk: Arc<SimDisk>,
    options: StoreOptions,
}

impl Drive {
    fn new(faults: Faults, in_place: bool) -> Self {
        let power = Power::new();
        Self {
            root: tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap(),
            disk: SimDisk::with_power(faults, Arc::clone(&power)),
            power,
            options: StoreOptions { direct: false, in_place, ..StoreOptions::default() },
        }
    }

    fn open(&self, create: bool) -> Store {
        let open = |file: &Arc<VolumeFile>| {
            let engine = SimEngine::new(file, Arc::clone(&self.disk)).with_notes(SimNotePlace::File);
            Ok(OpenedEngine { engine: Arc::new(engine), notice: None })
        };
        let directories = [self.root.path().join("volume")];
        let opened = if create { Store::create_with } else { Store::open_with };
        opened(&directories, &self.options, &open).unwrap()
    }

    /// Opens the store after a power failure.
    fn open_after_crash(&self, store: Store) -> Store {
        drop(store);
        self.disk.crash();
        self.open(false)
    }
}

/// What is overwritten in place leaves the manifest first, in favour of the next generation. None follows a
/// flush that failed.
#[test]
fn the_last_generation_is_not_given_up_after_a_flush_has_failed() {
    let drive = Drive::new(Faults::default(), true);
    let store = drive.open(true);
    let id = store.create_tensor("weights", 8192).unwrap();
    transfer(&store, Operation::Write, store.current(id), 1);
    store.commit("1").unwrap();
    drive.power.cut_at(1);
    store.sync().unwrap_err();
    drive.power.restore();
    let error = store.rewrite(id).unwrap_err();
    assert!(matches!(error, StoreError::Volume(IoError::Flush { .. })), "{error}");
    let store = drive.open_after_crash(store);
    assert_eq!(store.state().as_deref(), Some("1"));
    transfer(&store, Operation::Read, store.current(store.find_tensor("weights").unwrap()), 1);
}

/// No checksum tells of a part that is in memory alone: it has none until it is written.
#[test]
fn what_only_memory_has_is_written_before_a_manifest_names_it() {
    let mut failed = 0;
    for seed in 0..32 {
        let drive = Drive::new(Faults { seed, write_error_one_in: 2, ..Faults::default() }, false);
        let store = drive.open(true);
        let id = store.create_tensor("weights", 8192).unwrap();
        for value in 1..=3 {
            let target = store.rewrite(id).unwrap().target;
            store.keep(target, 0, buffer(4096, value), false);
            store.keep(target, 4096, buffer(4096, value), false);
            while store.commit(&value.to_string()).is_err() {
                failed += 1;
            }
        }
        let store = drive.open_after_crash(store);
        assert_eq!(store.state().as_deref(), Some("3"));
        transfer(&store, Operation::Read, store.current(store.find_tensor("weights").unwrap()), 3);
    }
    assert!(failed > 32, "{failed} commits failed");
}

/// Parts that memory has are between parts that the drive alone has.
#[test]
fn a_value_that_memory_has_in_part_is_read_and_committed_whole() {
    const BLOCK: u64 = 4096;
    let drive = Drive::new(Faults::default(), false);
    let store = drive.open(true);
    let id = store.create_tensor("weights", 5 * BLOCK).unwrap();
    let extent = store.current(id);
    transfer(&store, Operation::Write, extent, 1);
    store.keep(extent, BLOCK, buffer(BLOCK, 2), false);
    let written = buffer(BLOCK, 3);
    store.transfer_wait(Operation::Write, extent, 3 * BLOCK, written.clone()).unwrap();
    store.keep(extent, 3 * BLOCK, written, true);
    let read = |store: &Store| -> Result<Vec<(u8, bool)>> {
        let all = buffer(5 * BLOCK, 0);
        let extent = store.current(store.find_tensor("weights").unwrap());
        store.transfer_wait(Operation::Read, extent, 0, all.clone())?;
        // SAFETY: the transfer has ended.
        let bytes = unsafe { all.as_slice() };
        Ok(bytes
            .chunks(BLOCK as usize)
            .map(|block| (block[0], block.iter().all(|byte| *byte == block[0])))
            .collect())
    };
    let right: Vec<(u8, bool)> = [1, 2, 1, 3, 1].map(|value| (value, true)).to_vec();
    assert_eq!(read(&store).unwrap(), right);
    // Each of the three parts that come from the drive may fail.
    for part in 1..=3 {
        drive.power.cut_at(part);
        read(&store).unwrap_err();
        drive.power.restore();
    }
    store.commit("1").unwrap();
    assert_eq!(read(&store).unwrap(), right);
    assert_eq!(read(&drive.open_after_crash(store)).unwrap(), right);
}
