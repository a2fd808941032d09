//! The extents in use, and the tensors, generations and snapshots that hold them. Nothing here
//! moves a byte.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard};

use crate::checksums::Checksums;
use crate::kept::KeptParts;
use crate::{Extent, ExtentAllocator};
use memascend_mem::LockExt;

/// A tensor whose bytes belong to generations: weights, states.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TensorId(pub(crate) u64);

/// Where the current value of a tensor lies, and where to write the new one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rewrite {
    /// The current value.
    pub source: Extent,
    /// The new value: the same extent if it may be overwritten.
    pub target: Extent,
}

/// The bytes of one extent: their ranges, in order, their checksums, and the resident parts.
#[derive(Debug)]
pub(crate) struct Bytes {
    pub name: Arc<str>,
    pub ranges: Arc<[Extent]>,
    sums: Mutex<Checksums>,
    kept: Mutex<KeptParts>,
}

impl Bytes {
    pub(crate) fn new(name: Arc<str>, ranges: Vec<Extent>, sums: Option<Checksums>) -> Self {
        let bytes = ranges.iter().map(|range| range.bytes).sum();
        let sums = Mutex::new(sums.unwrap_or_else(|| Checksums::new(bytes)));
        Self { name, ranges: ranges.into(), sums, kept: Mutex::default() }
    }

    /// The handle: the offset of the first range, and the length of all of them.
    pub(crate) fn extent(&self) -> Extent {
        Extent { offset: self.ranges[0].offset, bytes: self.ranges.iter().map(|range| range.bytes).sum() }
    }

    pub(crate) fn sums(&self) -> MutexGuard<'_, Checksums> {
        self.sums.locked()
    }

    pub(crate) fn kept(&self) -> MutexGuard<'_, KeptParts> {
        self.kept.locked()
    }
}

/// An extent in use.
struct Entry {
    bytes: Arc<Bytes>,
    /// Number of generations that hold it, snapshots included: while there is one, the extent is
    /// not written.
    pins: u32,
    snapshots: u32,
    /// Allocated by [`Store::allocate`](crate::Store::allocate); it belongs to no generation.
    plain: bool,
}

struct Tensor {
    name: Arc<str>,
    /// Key of its extent.
    current: u64,
    /// Keys of the extents for its next values.
    spares: Vec<u64>,
}

/// A generation that was committed or is being committed: names and extents.
#[derive(Debug, Clone)]
pub(crate) struct Generation {
    pub number: u64,
    pub time: u64,
    pub state: Arc<String>,
    pub tensors: Arc<[(Arc<str>, u64)]>,
}

/// A generation under a name.
#[derive(Debug, Clone)]
pub(crate) struct Tagged {
    pub tag: Arc<str>,
    pub generation: Generation,
}

/// The extents on the volumes, and their holders.
#[derive(Default)]
pub(crate) struct Table {
    pub allocator: ExtentAllocator,
    /// By the offset of the first range.
    entries: BTreeMap<u64, Entry>,
    tensors: BTreeMap<TensorId, Tensor>,
    names: HashMap<Arc<str>, TensorId>,
    next: u64,
    /// The last committed generation.
    pub durable: Option<Generation>,
    /// Generations whose commit failed: a manifest may name them all the same.
    doubtful: Vec<Generation>,
    pub snapshots: Vec<Tagged>,
    /// The number of the last generation.
    pub last_number: u64,
}

impl Table {
    /// Takes extents that are free.
    pub(crate) fn insert(&mut self, bytes: Bytes, plain: bool) -> Extent {
        self.allocator.take(&bytes.ranges);
        let extent = bytes.extent();
        let entry = Entry { bytes: Arc::new(bytes), pins: 0, snapshots: 0, plain };
        self.entries.insert(extent.offset, entry);
        extent
    }

    /// The bytes of the extent with this key.
    pub(crate) fn bytes(&self, key: u64) -> Option<&Arc<Bytes>> {
        self.entries.get(&key).map(|entry| &entry.bytes)
    }

    /// Frees an extent that belongs to no generation.
    pub(crate) fn free_plain(&mut self, extent: Extent) {
        let plain = self.entries.get(&extent.offset).is_some_and(|entry| entry.plain);
        assert!(plain, "an extent is freed once, and a tensor of generations is removed instead");
        self.free(extent.offset);
    }

    /// Frees an extent that no tensor and no generation holds.
    pub(crate) fn free(&mut self, key: u64) {
        let entry = self.entries.remove(&key).expect("the extent is in use");
        debug_assert_eq!(entry.pins, 0);
        self.allocator.free(&entry.bytes.ranges);
    }

    /// The extents of the current values of all tensors, and plain ones.
    pub(crate) fn values(&self) -> Vec<(String, Extent)> {
        let plain = self.entries.values().filter(|entry| entry.plain);
        let named = self.tensors.values().map(|tensor| &self.entries[&tensor.current]);
        let mut values: Vec<_> =
            plain.chain(named).map(|entry| (entry.bytes.name.to_string(), entry.bytes.extent())).collect();
        values.sort_unstable_by_key(|(_, extent)| extent.offset);
        values
    }

    /// Creates a tensor whose first value lies in the extent `key`.
    pub(crate) fn create_tensor(&mut self, name: Arc<str>, key: u64) -> TensorId {
        let id = TensorId(self.next);
        self.next += 1;
        self.names.insert(Arc::clone(&name), id);
        self.tensors.insert(id, Tensor { name, current: key, spares: Vec::new() });
        id
    }

    pub(crate) fn find_tensor(&self, name: &str) -> Option<TensorId> {
        self.names.get(name).copied()
    }

    pub(crate) fn exists(&self, id: TensorId) -> bool {
        self.tensors.contains_key(&id)
    }

    fn tensor(&self, id: TensorId) -> &Tensor {
        self.tensors.get(&id).expect("the tensor was not removed")
    }

    pub(crate) fn current(&self, id: TensorId) -> &Arc<Bytes> {
        &self.entries[&self.tensor(id).current].bytes
    }

    /// The bytes of the current values of all tensors.
    pub(crate) fn all_current(&self) -> Vec<Arc<Bytes>> {
        self.tensors.values().map(|tensor| Arc::clone(&self.entries[&tensor.current].bytes)).collect()
    }

    /// Removes a tensor, and frees its extents that no generation holds.
    pub(crate) fn remove_tensor(&mut self, id: TensorId) {
        let tensor = self.tensors.remove(&id).expect("a tensor is removed once");
        self.names.remove(&tensor.name);
        for key in tensor.spares.into_iter().chain([tensor.current]) {
            if self.entries[&key].pins == 0 {
                self.free(key);
            }
        }
    }

    /// Whether a generation holds the current value, so that the next one needs another extent.
    pub(crate) fn is_pinned(&self, id: TensorId) -> bool {
        self.entries[&self.tensor(id).current].pins > 0
    }

    /// Whether a snapshot holds the current value.
    pub(crate) fn in_snapshot(&self, id: TensorId) -> bool {
        self.entries[&self.tensor(id).current].snapshots > 0
    }

    pub(crate) fn take_spare(&mut self, id: TensorId) -> Option<u64> {
        self.tensors.get_mut(&id).expect("the tensor was not removed").spares.pop()
    }

    pub(crate) fn add_spare(&mut self, id: TensorId, key: u64) {
        // Resident parts of a dropped value free their memory.
        self.entries[&key].bytes.kept().clear();
        self.tensors.get_mut(&id).expect("the tensor was not removed").spares.push(key);
    }

    pub(crate) fn set_current(&mut self, id: TensorId, key: u64) {
        self.tensors.get_mut(&id).expect("the tensor was not removed").current = key;
    }

    /// How many spares a tensor needs so that no rewrite has to allocate, neither this one nor
    /// those after commits. Two if a snapshot holds the extent of the current value.
    fn spares_needed(&self, tensor: &Tensor, durable: Option<u64>) -> usize {
        let in_snapshot = |key: u64| usize::from(self.entries[&key].snapshots > 0);
        match durable {
            Some(key) if key == tensor.current => 1 + in_snapshot(key),
            // The extent that the next commit supersedes becomes the spare. A value restored from a snapshot
            // needs a spare before.
            Some(key) => in_snapshot(key) + in_snapshot(tensor.current),
            None => 1 + in_snapshot(tensor.current),
        }
    }

    fn durable_key(&self, name: &str) -> Option<u64> {
        self.durable.as_ref()?.key(name)
    }

    /// How many spares a tensor lacks for no step to have to allocate.
    pub(crate) fn spares_lacking(&self, id: TensorId) -> usize {
        let tensor = self.tensor(id);
        let needed = self.spares_needed(tensor, self.durable_key(&tensor.name));
        needed.saturating_sub(tensor.spares.len())
    }

    /// The tensors that need one more spare when the durable generation becomes a snapshot: those
    /// that have two slots, and whose durable value no snapshot holds yet.
    pub(crate) fn spares_for_snapshot(&self) -> Vec<TensorId> {
        let needs = |(name, key): &(Arc<str>, u64)| {
            let id = self.find_tensor(name)?;
            let tensor = self.tensor(id);
            let two_slots = !tensor.spares.is_empty() || tensor.current != *key;
            (two_slots && self.entries[key].snapshots == 0).then_some(id)
        };
        self.durable.iter().flat_map(|durable| durable.tensors.iter()).filter_map(needs).collect()
    }

    /// The current values of all tensors, as a generation.
    pub(crate) fn generation(&self, number: u64, time: u64, state: Arc<String>) -> Generation {
        let mut tensors: Vec<_> =
            self.tensors.values().map(|tensor| (Arc::clone(&tensor.name), tensor.current)).collect();
        tensors.sort_unstable();
        Generation { number, time, state, tensors: tensors.into() }
    }

    /// Pins the extents of a generation: they are not written from now on.
    pub(crate) fn pin(&mut self, generation: &Generation) {
        for (_, key) in generation.tensors.iter() {
            self.entries.get_mut(key).expect("a generation's extents are in use").pins += 1;
        }
    }

    fn unpin(&mut self, generation: &Generation) {
        for (_, key) in generation.tensors.iter() {
            self.entries.get_mut(key).expect("a generation's extents are in use").pins -= 1;
        }
    }

    /// Removes a pin, and reclaims the extents that nothing holds any more.
    pub(crate) fn release(&mut self, generation: Generation, two_slots: bool) {
        self.unpin(&generation);
        self.reclaim(&[generation], two_slots);
    }

    /// Whether no manifest on the volumes can name a generation.
    pub(crate) fn is_clean(&self) -> bool {
        self.durable.is_none() && self.doubtful.is_empty() && self.snapshots.is_empty()
    }

    /// Whether a manifest on the volumes may name a generation that is no snapshot.
    pub(crate) fn has_current(&self) -> bool {
        self.durable.is_some() || !self.doubtful.is_empty()
    }

    /// Records that a manifest may name a pinned generation, since its commit failed.
    pub(crate) fn doubt(&mut self, generation: Generation) {
        self.doubtful.push(generation);
    }

    /// Makes a pinned generation the durable one.
    pub(crate) fn commit(&mut self, generation: Option<Generation>, two_slots: bool) {
        self.last_number = generation.as_ref().map_or(self.last_number, |generation| generation.number);
        let mut old = std::mem::take(&mut self.doubtful);
        old.extend(std::mem::replace(&mut self.durable, generation));
        old.iter().for_each(|old| self.unpin(old));
        self.reclaim(&old, two_slots);
    }

    pub(crate) fn add_snapshot(&mut self, snapshot: Tagged) {
        self.pin(&snapshot.generation);
        for (_, key) in snapshot.generation.tensors.iter() {
            self.entries.get_mut(key).expect("pinned").snapshots += 1;
        }
        self.snapshots.push(snapshot);
    }

    pub(crate) fn remove_snapshot(&mut self, tag: &str, two_slots: bool) {
        let Some(place) = self.snapshots.iter().position(|snapshot| &*snapshot.tag == tag) else { return };
        let snapshot = self.snapshots.remove(place);
        for (_, key) in snapshot.generation.tensors.iter() {
            self.entries.get_mut(key).expect("pinned").snapshots -= 1;
        }
        self.release(snapshot.generation, two_slots);
    }

    /// Makes a pinned generation the durable one, and the tensors those that it has.
    pub(crate) fn restore(&mut self, generation: Generation, two_slots: bool) {
        let superseded = self.become_those_of(&generation);
        self.commit(Some(generation), two_slots);
        self.reclaim_keys(&superseded, two_slots);
    }

    /// Restores the tensors of a pinned generation. The durable one stays.
    pub(crate) fn load(&mut self, generation: &Generation, two_slots: bool) {
        let superseded = self.become_those_of(generation);
        self.reclaim_keys(&superseded, two_slots);
    }

    /// Restores the tensors of a pinned generation. Returns the names and extents of the values that they
    /// replace.
    fn become_those_of(&mut self, generation: &Generation) -> Vec<(Arc<str>, u64)> {
        let gone: Vec<TensorId> = self
            .tensors
            .iter()
            .filter(|(_, tensor)| generation.key(&tensor.name).is_none())
            .map(|(id, _)| *id)
            .collect();
        gone.into_iter().for_each(|id| self.remove_tensor(id));
        let mut superseded = Vec::new();
        for (name, key) in generation.tensors.iter() {
            match self.find_tensor(name) {
                Some(id) => {
                    let tensor = self.tensors.get_mut(&id).expect("found by its name");
                    let old = std::mem::replace(&mut tensor.current, *key);
                    superseded.push((Arc::clone(name), old));
                }
                None => drop(self.create_tensor(Arc::clone(name), *key)),
            }
        }
        superseded
    }

    /// Reclaims extents of generations that nothing holds any more: they become spares where spares
    /// are needed, and are freed otherwise. Spares that are not needed any more are freed too.
    fn reclaim(&mut self, generations: &[Generation], two_slots: bool) {
        for generation in generations {
            self.reclaim_keys(&generation.tensors, two_slots);
        }
    }

    fn reclaim_keys(&mut self, keys: &[(Arc<str>, u64)], two_slots: bool) {
        for (name, key) in keys {
            let tensor = self.find_tensor(name).map(|id| (id, self.tensor(id)));
            let has = |tensor: &Tensor| tensor.current == *key || tensor.spares.contains(key);
            let unused = self.entries.get(key).is_some_and(|entry| entry.pins == 0 && !entry.plain)
                && !tensor.is_some_and(|(_, tensor)| has(tensor));
            match tensor.map(|(id, _)| id) {
                Some(id) => {
                    if unused {
                        // `trim` keeps or frees it.
                        self.add_spare(id, *key);
                    }
                    self.trim(id, two_slots);
                }
                None if unused => self.free(*key),
                None => {}
            }
        }
    }

    /// Frees spares that a tensor does not need, or whose length differs from the tensor's.
    fn trim(&mut self, id: TensorId, two_slots: bool) {
        let tensor = self.tensor(id);
        let needed = match two_slots {
            // While a manifest may name a failed commit, it is unknown which extents the next commit
            // supersedes.
            true if !self.doubtful.is_empty() => usize::MAX,
            true => self.spares_needed(tensor, self.durable_key(&tensor.name)),
            false => 0,
        };
        let bytes = self.entries[&tensor.current].bytes.extent().bytes;
        let fits = |key: &u64| self.entries[key].bytes.extent().bytes == bytes;
        let (mut spares, mut unneeded): (Vec<u64>, Vec<u64>) =
            tensor.spares.iter().partition(|key| fits(key));
        unneeded.extend(spares.drain(needed.min(spares.len())..));
        self.tensors.get_mut(&id).expect("found above").spares = spares;
        unneeded.into_iter().for_each(|key| self.free(key));
    }

    /// Number and total length of the extents in use for each tensor name: its value, its spares and its
    /// generations.
    pub(crate) fn held(&self) -> HashMap<Arc<str>, (usize, u64)> {
        let mut held: HashMap<Arc<str>, (usize, u64)> = HashMap::new();
        for entry in self.entries.values().filter(|entry| !entry.plain) {
            let sum = held.entry(Arc::clone(&entry.bytes.name)).or_default();
            sum.0 += 1;
            sum.1 += entry.bytes.extent().bytes;
        }
        held
    }

    /// Whether every extent has the owners that it should.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn check(&self) {
        let mut pins: HashMap<u64, (u32, u32)> = HashMap::new();
        for generation in self.durable.iter().chain(&self.doubtful) {
            generation.tensors.iter().for_each(|(_, key)| pins.entry(*key).or_default().0 += 1);
        }
        for snapshot in &self.snapshots {
            for (_, key) in snapshot.generation.tensors.iter() {
                pins.entry(*key).or_default().0 += 1;
                pins.entry(*key).or_default().1 += 1;
            }
        }
        let mut used: HashMap<u64, usize> = HashMap::new();
        for tensor in self.tensors.values() {
            for key in tensor.spares.iter().chain([&tensor.current]) {
                *used.entry(*key).or_default() += 1;
            }
        }
        for (key, entry) in &self.entries {
            let (all, snapshots) = pins.remove(key).unwrap_or_default();
            assert_eq!((entry.pins, entry.snapshots), (all, snapshots), "pins of {key}");
            let users = used.remove(key).unwrap_or(0);
            assert!(users <= 1, "{key} is in two places");
            assert!(entry.plain || users > 0 || all > 0, "{key} has no user");
        }
        assert!(pins.is_empty() && used.is_empty(), "not in use: {pins:?} {used:?}");
        let total: u64 = self.entries.values().map(|entry| entry.bytes.extent().bytes).sum();
        assert_eq!(total, self.allocator.end() - self.allocator.free_bytes());
    }
}

impl Generation {
    /// The extent of a tensor.
    pub(crate) fn key(&self, name: &str) -> Option<u64> {
        let place = self.tensors.binary_search_by(|(found, _)| (**found).cmp(name)).ok()?;
        Some(self.tensors[place].1)
    }
}
