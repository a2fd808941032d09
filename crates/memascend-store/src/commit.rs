//! Generations: commits, snapshots, and the return to a snapshot.
//!
//! Resuming takes a snapshot up first and confirms it last: the manifest names the newest generation until
//! then, so whatever `resume` refuses in between loses no step.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::manifest::{Body, Common, Version, Written, is_tag};
use crate::member::Member;
use crate::table::{Bytes, Generation, Table, Tagged};
use crate::{Result, Store, StoreError};
use memascend_mem::LockExt;
use memascend_nvme::memory::copy_of;

/// A generation under a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// Its name.
    pub tag: String,
    /// The number of the generation.
    pub generation: u64,
    /// Total length of its tensors.
    pub bytes: u64,
    /// The state that its commit was given.
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
    /// Number of its extents, spares and snapshots included.
    pub extents: usize,
    /// Total length of those extents.
    pub extent_bytes: u64,
}

/// Why a manifest was not written, and whether any volume may hold it.
struct NotWritten {
    error: StoreError,
    begun: bool,
}

impl Store {
    /// Makes the current values of all tensors the durable generation, and returns its number: 1 for the
    /// first. Bytes that only memory has are written first. `state` is the caller's, and [`Store::state`]
    /// returns it. Every write that belongs to the generation must have ended.
    ///
    /// When this returns, the generation is on all volumes. A commit that fails leaves the
    /// generation before it durable; nothing of either generation is overwritten, and the commit
    /// may be tried again.
    pub fn commit(&self, state: &str) -> Result<u64> {
        let _alone = self.writer();
        let state =
            copy_of(state.as_bytes()).map_err(|_| StoreError::NoMemory { bytes: state.len() as u64 })?;
        let state = Arc::new(String::from_utf8(state).expect("it was text"));
        self.write_kept()?;
        let generation = {
            let mut table = self.table();
            let generation = table.generation(table.last_number + 1, now(), state);
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

    /// Writes the manifest in which a pinned generation is the current one, then runs `then`.
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
                // The first manifest has to be on all volumes or on none: part of a store cannot be
                // opened, and blocks a new one.
                let cleared = table.is_clean() && self.on_all(|_, member| member.clear_note()).is_ok();
                if cleared || !begun {
                    table.release(generation, !self.in_place);
                } else {
                    table.doubt(generation);
                }
                Err(error)
            }
        }
    }

    /// Writes a manifest to every volume.
    fn write_manifest(
        &self,
        current: Option<&Generation>,
        snapshots: &[Tagged],
    ) -> std::result::Result<(), NotWritten> {
        let refused = |error| NotWritten { error, begun: false };
        self.members.iter().try_for_each(Member::check_flushes).map_err(refused)?;
        let body = self.body(current, snapshots);
        let lacking = |_| StoreError::NoMemory { bytes: body.about_bytes() };
        let common = Common::of(&body).map_err(lacking).map_err(refused)?;
        self.check_length(&body, &common).map_err(refused)?;
        self.on_all(|index, member| member.write_note(&common.note(index).map_err(lacking)?))
            .map_err(|error| NotWritten { error, begun: true })
    }

    /// Refuses a manifest that one of the volumes could not hold, before any has it.
    fn check_length(&self, body: &Body, common: &Common) -> Result<()> {
        for (index, member) in self.members.iter().enumerate() {
            let (bytes, limit_bytes) = (common.note_bytes(index), member.note_limit_bytes());
            if bytes > limit_bytes {
                let written = body.snapshots.iter().chain(&body.current);
                return Err(StoreError::ManifestTooLong {
                    path: member.volume.path().to_owned(),
                    bytes,
                    limit_bytes,
                    state_bytes: written.map(|written| written.state.len() as u64).sum(),
                });
            }
        }
        Ok(())
    }

    /// The content of a manifest with these generations.
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
                state: Arc::clone(&generation.state),
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
            // Every attempt has its own number, so that parts of two manifests are never taken for
            // one.
            sequence: self.sequence.fetch_add(1, Ordering::Relaxed) + 1,
            volumes: self.members.iter().map(|member| member.volume.identity()).collect(),
            stripes: self.map.layout.counts().to_vec(),
            life: self.life_bytes_written(),
            versions: versions.iter().map(version).collect(),
            current,
            snapshots,
        }
    }

    /// Has every later opening find the generations that this one has found, where a manifest is
    /// damaged. Call it before anything is written: the bytes that only the damaged manifest has,
    /// should it be readable another time, are free.
    pub fn settle_manifests(&self) -> Result<()> {
        let _alone = self.writer();
        self.on_all(|_, member| member.settle_note())
    }

    /// Writes the manifest anew on every volume, in the place of those that are damaged.
    pub fn mend_manifests(&self) -> Result<()> {
        let _alone = self.writer();
        let (durable, snapshots) = {
            let table = self.table();
            (table.durable.clone(), table.snapshots.clone())
        };
        self.write_manifest(durable.as_ref(), &snapshots).map_err(|failed| failed.error)
    }

    /// The number of the durable generation; 0 if there is none.
    pub fn generation(&self) -> u64 {
        self.table().durable.as_ref().map_or(0, |durable| durable.number)
    }

    /// The state that the commit of the durable generation was given.
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

    /// Keeps the durable generation under a name. Nothing is copied, but every tensor that has a
    /// spare gets one more, since the extent of this value stays in use. If there is no space for
    /// the spares, nothing has changed.
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

    /// Deletes a snapshot. The extents that only this snapshot held are free when this returns.
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

    /// Makes the content of a snapshot the newest generation. Nothing is copied, and the snapshot stays.
    /// Tensors that are not in the snapshot are removed, tensors that only the snapshot has are created, and
    /// uncommitted values are lost. No transfer may be under way.
    pub fn restore_snapshot(&self, tag: &str) -> Result<()> {
        let _alone = self.writer();
        let generation = self.renewed(tag)?;
        self.make_durable(generation, Table::restore)
    }

    /// Restores a snapshot as the current values. The manifest is unchanged until
    /// [`Store::confirm_snapshot`]. No transfer may be under way.
    pub fn load_snapshot(&self, tag: &str) -> Result<()> {
        let _alone = self.writer();
        let mut table = self.table();
        let generation = self.tagged(&table, tag)?.generation.clone();
        table.load(&generation, !self.in_place);
        Ok(())
    }

    /// Makes the content of a snapshot the newest generation, whose tensors are current since
    /// [`Store::load_snapshot`]. Tensors made since then stay.
    pub fn confirm_snapshot(&self, tag: &str) -> Result<()> {
        let _alone = self.writer();
        let generation = self.renewed(tag)?;
        self.make_durable(generation, |table, generation, two_slots| {
            table.commit(Some(generation), two_slots)
        })
    }

    /// The content of a snapshot as a new generation, pinned.
    fn renewed(&self, tag: &str) -> Result<Generation> {
        let mut table = self.table();
        let snapshot = self.tagged(&table, tag)?.generation.clone();
        let generation = Generation { number: table.last_number + 1, time: now(), ..snapshot };
        table.pin(&generation);
        Ok(generation)
    }

    /// The snapshot named `tag`.
    fn tagged<'a>(&self, table: &'a Table, tag: &str) -> Result<&'a Tagged> {
        table.snapshots.iter().find(|snapshot| &*snapshot.tag == tag).ok_or_else(|| StoreError::NoSnapshot {
            tag: tag.to_owned(),
            existing: table.snapshots.iter().map(|snapshot| snapshot.tag.to_string()).collect(),
        })
    }

    /// Removes the manifests: no generation and no snapshot is left, and dropping the store removes
    /// its files.
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

    /// Removes the durable generation from the manifests, since it is about to be overwritten in
    /// place. Snapshots stay.
    pub(crate) fn withdraw(&self) -> Result<()> {
        let _alone = self.writer();
        let (has_current, snapshots) = {
            let table = self.table();
            (table.has_current(), table.snapshots.clone())
        };
        if !has_current {
            return Ok(());
        }
        // It is the last durable one: no other can follow it.
        self.members.iter().try_for_each(Member::check_flushes)?;
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
        self.writer.locked()
    }
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests;
