//! Generations: how they become durable, are kept under names, and come back.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::manifest::{Body, Common, Version, Written, is_tag};
use crate::table::{Bytes, Generation, Table, Tagged};
use crate::{Result, Store, StoreError};

/// A generation that is kept under a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// Its name.
    pub tag: String,
    /// The number that it had when it was committed.
    pub generation: u64,
    /// Length of its tensors together.
    pub bytes: u64,
    /// What its commit was given.
    pub state: String,
    /// When it was committed, in seconds of Unix time.
    pub time: u64,
}

/// A tensor of the durable generation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorReport {
    /// Its name.
    pub name: String,
    /// Its length.
    pub bytes: u64,
    /// How many extents it has, with those for its next value and those of snapshots.
    pub extents: usize,
    /// Length of all of them.
    pub extent_bytes: u64,
}

/// Why a manifest was not written, and whether a part of the volumes may have it.
struct NotWritten {
    error: StoreError,
    begun: usize,
}

impl Store {
    /// Makes the values that all tensors have now the durable generation, and returns its number: 1 for the first. `state` is the
    /// caller's, and comes back by [`Store::state`]. Every write that belongs to it must have ended.
    ///
    /// When it returns, all volumes have everything. A commit that fails leaves the generation before; nothing of either is
    /// overwritten, and the commit may be tried again.
    pub fn commit(&self, state: &str) -> Result<u64> {
        let _alone = self.writer();
        let generation = {
            let mut table = self.table();
            let generation = table.generation(table.last_number + 1, now(), state.into());
            table.pin(&generation);
            generation
        };
        if let Err(error) = self.sync() {
            self.table().release(generation, !self.in_place);
            return Err(error);
        }
        let number = generation.number;
        self.make_durable(generation, |table, generation, two_slots| {
            table.commit(Some(generation), two_slots)
        })?;
        Ok(number)
    }

    /// Writes the manifest in which a pinned generation is the current one.
    fn make_durable(
        &self,
        generation: Generation,
        then: impl FnOnce(&mut Table, Generation, bool),
    ) -> Result<()> {
        let snapshots = self.table().snapshots.clone();
        let written = self.write_manifest(Some(&generation), &snapshots);
        let mut table = self.table();
        match written {
            Ok(()) => {
                self.leave_in_place(true);
                then(&mut table, generation, !self.in_place);
                Ok(())
            }
            Err(NotWritten { error, begun }) => {
                // The first manifest of a store is on all volumes or on none: a part of a store is of no use, and in the way.
                let cleared = table.is_clean()
                    && self.members[..begun].iter().all(|member| member.clear_note().is_ok());
                if cleared {
                    table.release(generation, !self.in_place);
                } else {
                    table.doubt(generation);
                }
                Err(error)
            }
        }
    }

    /// Writes a manifest to every volume, one after another.
    fn write_manifest(
        &self,
        current: Option<&Generation>,
        snapshots: &[Tagged],
    ) -> std::result::Result<(), NotWritten> {
        let body = self.body(current, snapshots);
        let common = Common::of(&body);
        for (index, member) in self.members.iter().enumerate() {
            if let Err(error) = member.write_note(&common.note(index)) {
                return Err(NotWritten { error, begun: index + 1 });
            }
        }
        Ok(())
    }

    fn body(&self, current: Option<&Generation>, snapshots: &[Tagged]) -> Body {
        let mut versions: Vec<Arc<Bytes>> = Vec::new();
        let mut places: HashMap<u64, usize> = HashMap::new();
        let table = self.table();
        let mut written = |tag: &str, generation: &Generation| {
            let mut place = |key: u64| {
                *places.entry(key).or_insert_with(|| {
                    versions.push(Arc::clone(table.bytes(key).expect("pinned")));
                    versions.len() - 1
                })
            };
            Written {
                number: generation.number,
                tag: tag.to_owned(),
                time: generation.time,
                state: generation.state.to_string(),
                tensors: generation
                    .tensors
                    .iter()
                    .map(|(name, key)| (name.to_string(), place(*key)))
                    .collect(),
            }
        };
        let current = current.map(|generation| written("", generation));
        let snapshots =
            snapshots.iter().map(|snapshot| written(&snapshot.tag, &snapshot.generation)).collect();
        drop(table);
        let version = |bytes: &Arc<Bytes>| Version {
            ranges: bytes.ranges.iter().map(|range| (range.offset, range.bytes)).collect(),
            sums: bytes.sums().encode(),
        };
        Body {
            store: self.id.to_string(),
            // Every attempt has its own: parts of two are never taken for one.
            sequence: self.sequence.fetch_add(1, Ordering::Relaxed) + 1,
            volumes: self.members.iter().map(|member| member.volume.identity()).collect(),
            stripes: self.map.layout.counts().to_vec(),
            life: self.life_bytes_written(),
            versions: versions.iter().map(version).collect(),
            current,
            snapshots,
        }
    }

    /// The number of the durable generation; 0 where there is none.
    pub fn generation(&self) -> u64 {
        self.table().durable.as_ref().map_or(0, |durable| durable.number)
    }

    /// What the commit of the durable generation was given.
    pub fn state(&self) -> Option<String> {
        self.table().durable.as_ref().map(|durable| durable.state.to_string())
    }

    /// When the durable generation was committed, in seconds of Unix time.
    pub fn committed_at(&self) -> Option<u64> {
        self.table().durable.as_ref().map(|durable| durable.time)
    }

    /// The tensors of the durable generation, by name.
    pub fn durable_tensors(&self) -> Vec<TensorReport> {
        let table = self.table();
        let held = table.held();
        let report = |(name, key): &(Arc<str>, u64)| {
            let (extents, extent_bytes) = held[name];
            let bytes = table.bytes(*key).expect("pinned").extent().bytes;
            TensorReport { name: name.to_string(), bytes, extents, extent_bytes }
        };
        table.durable.iter().flat_map(|durable| durable.tensors.iter()).map(report).collect()
    }

    /// Keeps the durable generation under a name. Nothing is copied; but every tensor that has room for its next value gets
    /// room for one more, since this one stays where it is. Where that room is lacking nothing has changed.
    pub fn snapshot(&self, tag: &str) -> Result<()> {
        if !is_tag(tag) {
            return Err(StoreError::SnapshotName { tag: tag.to_owned() });
        }
        let _alone = self.writer();
        let (snapshots, snapshot, spares) = {
            let mut table = self.table();
            if table.snapshots.iter().any(|snapshot| &*snapshot.tag == tag) {
                return Err(StoreError::SnapshotExists { tag: tag.to_owned() });
            }
            let generation = table.durable.clone().ok_or(StoreError::NothingCommitted)?;
            let snapshot = Tagged { tag: tag.into(), generation };
            let mut spares = Vec::new();
            let needs = if self.in_place { Vec::new() } else { table.spares_for_snapshot() };
            for id in needs {
                match self.allocate_for(&mut table, id) {
                    Ok(key) => spares.push((id, key)),
                    Err(error) => {
                        spares.iter().for_each(|(_, key)| table.free(*key));
                        return Err(error);
                    }
                }
            }
            (table.snapshots.clone(), snapshot, spares)
        };
        let mut all = snapshots;
        all.push(snapshot.clone());
        let written = self.write_manifest(Some(&snapshot.generation), &all);
        let mut table = self.table();
        match written {
            Ok(()) => {
                for (id, key) in spares {
                    // The tensor may have been removed meanwhile.
                    if table.exists(id) { table.add_spare(id, key) } else { table.free(key) }
                }
                table.add_snapshot(snapshot);
                Ok(())
            }
            Err(NotWritten { error, .. }) => {
                spares.iter().for_each(|(_, key)| table.free(*key));
                Err(error)
            }
        }
    }

    /// The snapshots, the oldest first.
    pub fn snapshots(&self) -> Vec<Snapshot> {
        let table = self.table();
        let bytes = |(_, key): &(Arc<str>, u64)| table.bytes(*key).expect("pinned").extent().bytes;
        let report = |Tagged { tag, generation }: &Tagged| Snapshot {
            tag: tag.to_string(),
            generation: generation.number,
            bytes: generation.tensors.iter().map(bytes).sum(),
            state: generation.state.to_string(),
            time: generation.time,
        };
        table.snapshots.iter().map(report).collect()
    }

    /// Deletes a snapshot: what only it had is free when this returns.
    pub fn delete_snapshot(&self, tag: &str) -> Result<()> {
        let _alone = self.writer();
        let (durable, left) = {
            let table = self.table();
            self.tagged(&table, tag)?;
            let left: Vec<Tagged> =
                table.snapshots.iter().filter(|snapshot| &*snapshot.tag != tag).cloned().collect();
            (table.durable.clone(), left)
        };
        self.write_manifest(durable.as_ref(), &left).map_err(|failed| failed.error)?;
        self.table().remove_snapshot(tag, !self.in_place);
        Ok(())
    }

    /// Makes the content of a snapshot the newest generation. Nothing is copied; the snapshot stays. Tensors that it does not
    /// have are removed, those that only it has are there again; what was not committed is lost. No transfer may be under way.
    pub fn restore_snapshot(&self, tag: &str) -> Result<()> {
        let _alone = self.writer();
        let generation = {
            let mut table = self.table();
            let found = self.tagged(&table, tag)?.generation.clone();
            let generation = Generation { number: table.last_number + 1, time: now(), ..found };
            table.pin(&generation);
            generation
        };
        self.make_durable(generation, Table::restore)
    }

    fn tagged<'a>(&self, table: &'a Table, tag: &str) -> Result<&'a Tagged> {
        table.snapshots.iter().find(|snapshot| &*snapshot.tag == tag).ok_or_else(|| StoreError::NoSnapshot {
            tag: tag.to_owned(),
            existing: table.snapshots.iter().map(|snapshot| snapshot.tag.to_string()).collect(),
        })
    }

    /// Takes the manifests back: there is no generation and no snapshot any more, and the files go on drop.
    pub fn forget(&self) -> Result<()> {
        let _alone = self.writer();
        self.take_back()?;
        Ok(())
    }

    fn take_back(&self) -> Result<()> {
        self.members.iter().try_for_each(|member| member.clear_note())?;
        self.leave_in_place(false);
        let mut table = self.table();
        let tags: Vec<Arc<str>> = table.snapshots.iter().map(|snapshot| Arc::clone(&snapshot.tag)).collect();
        tags.iter().for_each(|tag| table.remove_snapshot(tag, !self.in_place));
        table.commit(None, !self.in_place);
        Ok(())
    }

    /// What was committed is about to be overwritten in place: no manifest may speak of it any more. Snapshots stay.
    pub(crate) fn withdraw(&self) -> Result<()> {
        let _alone = self.writer();
        let (has_current, snapshots) = {
            let table = self.table();
            (table.has_current(), table.snapshots.clone())
        };
        if !has_current {
            return Ok(());
        }
        if snapshots.is_empty() {
            return self.take_back();
        }
        self.write_manifest(None, &snapshots).map_err(|failed| failed.error)?;
        self.table().commit(None, !self.in_place);
        Ok(())
    }

    /// Bytes written to each volume over the store's whole life, manifests included.
    pub fn life_bytes_written(&self) -> Vec<u64> {
        self.members.iter().map(|member| member.life_bytes()).collect()
    }

    fn leave_in_place(&self, leave: bool) {
        self.members.iter().for_each(|member| member.volume.leave_in_place(leave));
    }

    fn writer(&self) -> MutexGuard<'_, ()> {
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};
    use std::path::{Path, PathBuf};
    use std::time::Instant;

    use memascend_mem::{LeaseSlice, PageableAllocator, Pool, SizeClass};
    use memascend_nvme::{
        Faults, OpenedEngine, Operation, Power, SimDisk, SimEngine, SimNotePlace, VolumeFile,
    };
    use proptest::prelude::*;

    use super::*;
    use crate::checksums::{Checksums, sum_writes};
    use crate::manifest::Manifest;
    use crate::{Extent, StoreOptions};

    /// What a commit of a model of 7 billion parameters does besides waiting for drives: 300 tensors with a weight and three
    /// states each, 100 GB, and a snapshot of as many again.
    #[test]
    fn the_manifest_of_a_large_model_is_soon_made() {
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
            let id =
                store.create_tensor(&format!("model.layers.{}.states.{index}", index / 40), BYTES).unwrap();
            if index == 0 {
                know(store.table().current(id));
            } else {
                let first = store.find_tensor("model.layers.0.states.0").unwrap();
                let known = store.table().current(first).sums().encode();
                *store.table().current(id).sums() = Checksums::decode(BYTES, &known).unwrap();
            }
        }
        for what in ["first", "second"] {
            let begun = Instant::now();
            store.commit("{}").unwrap();
            let whole = begun.elapsed();
            let generation = store.table().durable.clone().unwrap();
            let snapshots = store.table().snapshots.clone();
            let begun = Instant::now();
            let body = store.body(Some(&generation), &snapshots);
            let collected = begun.elapsed();
            let note = Common::of(&body).note(0);
            let made = begun.elapsed();
            let begun = Instant::now();
            let manifest = Manifest::parse(&note).unwrap();
            let parsed = begun.elapsed();
            eprintln!(
                "{what}: commit {whole:?}, of it collecting {collected:?} and encoding {:?}; {} bytes; parsed in {parsed:?}",
                made - collected,
                note.len()
            );
            let checksums: usize = manifest.body.versions.len() * BYTES.div_ceil(1 << 20) as usize;
            assert!(checksums > 90_000 && note.len() > checksums * 4);
            if what == "first" {
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
            2 => (1_u64..4).prop_map(|blocks| Action::Plain { blocks }),
            1 => Just(Action::FreePlain),
            2 => any::<bool>().prop_map(|crash| Action::Reopen { crash }),
        ]
    }

    /// A tensor's value and where it lies.
    type Values = BTreeMap<String, (u8, Extent)>;

    /// What the store is to be.
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
            let class = SizeClass { consumer: "test".into(), bytes: extent.bytes as usize, count: 1 };
            let pool = Pool::new(&PageableAllocator, &[class]).unwrap();
            let lease = Arc::new(pool.try_lease(extent.bytes as usize).unwrap().unwrap());
            let buffer = LeaseSlice::new(lease, 0, extent.bytes as usize);
            if operation == Operation::Write {
                // SAFETY: the only handle to the buffer.
                unsafe { buffer.as_mut_slice() }.fill(value);
            }
            self.store().transfer_wait(operation, extent, 0, buffer.clone()).unwrap();
            // SAFETY: the transfer has ended.
            let bytes = unsafe { buffer.as_slice() };
            assert!(bytes.iter().all(|byte| *byte == value), "{extent:?} is not {value}");
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

        /// Runs what changes the medium, failing on the way or not.
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
            assert_eq!(done.is_err(), failed, "{done:?}");
            if failed {
                self.doubtful.push(after);
            } else {
                self.world = after;
                self.doubtful.clear();
            }
            !failed
        }

        fn act(&mut self, action: Action) {
            match action {
                Action::Create { blocks } => {
                    let name = format!("tensor {:03}", self.made);
                    self.made += 1;
                    let id = self.store().create_tensor(&name, blocks * 4096).unwrap();
                    let extent = self.store().current(id);
                    self.values = self.values.wrapping_add(1);
                    assert!(!self.pinned().contains(&extent.offset));
                    self.transfer(Operation::Write, extent, self.values);
                    self.present.insert(name, (self.values, extent));
                }
                Action::Remove { pick } => {
                    let Some(name) = self.pick(&pick) else { return };
                    self.store().remove_tensor(self.store().find_tensor(&name).unwrap());
                    self.present.remove(&name);
                }
                Action::Spare { pick } => {
                    let Some(name) = self.pick(&pick) else { return };
                    let id = self.store().find_tensor(&name).unwrap();
                    let (lacking, used) = (self.store().spare_bytes(id), self.store().used_bytes());
                    self.store().make_spare(id).unwrap();
                    assert_eq!(self.store().used_bytes(), used + lacking);
                    assert_eq!(self.store().spare_bytes(id), 0);
                }
                Action::Rewrite { pick } => {
                    let Some(name) = self.pick(&pick) else { return };
                    let id = self.store().find_tensor(&name).unwrap();
                    let rewrite = self.store().rewrite(id).unwrap();
                    let (value, extent) = self.present[&name];
                    assert_eq!(rewrite.source, extent);
                    assert!(
                        !self.pinned().contains(&rewrite.target.offset),
                        "what was committed is a target"
                    );
                    self.transfer(Operation::Read, rewrite.source, value);
                    self.values = self.values.wrapping_add(1);
                    self.transfer(Operation::Write, rewrite.target, self.values);
                    self.present.insert(name, (self.values, rewrite.target));
                }
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
                // What failed before the first success leaves nothing that has to be found.
                return;
            }
            self.store = None;
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
            for (tag, values) in trial.world.snapshots.clone() {
                trial.store().restore_snapshot(&tag).unwrap();
                for (value, extent) in values.into_values() {
                    trial.transfer(Operation::Read, extent, value);
                }
            }
        }
    }
}
