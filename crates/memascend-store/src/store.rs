use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};

use memascend_mem::{LeaseSlice, Pool};
use memascend_nvme::{
    BLOCK_BYTES, Completion, CountersSnapshot, DeviceId, Engine, EngineOptions, IoError, OpenedEngine,
    Operation, Request, Volume, VolumeFile, open_engine,
};
use serde::{Deserialize, Serialize};

use crate::layout::Piece;
use crate::{Extent, ExtentAllocator, Layout, Result, StoreError};

/// Called once when a transfer has ended.
pub type Transferred = Box<dyn FnOnce(Result<()>) + Send>;

/// How to open a store.
#[derive(Debug, Clone)]
pub struct StoreOptions {
    /// Which engine, and how.
    pub engine: EngineOptions,
    /// Bypass the page cache where the filesystem allows it.
    pub direct: bool,
    /// Bytes per second of each volume, which decide on its share of every tensor; empty for equal shares.
    pub rates: Vec<f64>,
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self { engine: EngineOptions::default(), direct: true, rates: Vec::new() }
    }
}

/// The tensors of one run on one or more volumes. Files are removed on drop unless [`Store::keep`] was called.
pub struct Store {
    members: Vec<Member>,
    layout: Layout,
    id: DeviceId,
    table: Mutex<Table>,
    notices: Vec<String>,
}

/// A volume of the store with its engine.
struct Member {
    // Declared first: the engine drains before the volume closes and others may have it.
    engine: Arc<dyn Engine>,
    volume: Volume,
}

#[derive(Default)]
struct Table {
    allocator: ExtentAllocator,
    /// By the offset of a tensor's first range, which is its handle's.
    tensors: BTreeMap<u64, Tensor>,
}

/// A tensor's name and the ranges of the address space in which its bytes lie, in order.
#[derive(Clone)]
struct Tensor {
    name: Arc<str>,
    ranges: Arc<[Extent]>,
}

/// What a kept store leaves with each of its volumes.
#[derive(Serialize, Deserialize)]
struct Manifest {
    format: u32,
    /// The same on every volume of a store, and on no other.
    store: String,
    /// Which of the volumes this one is.
    volume: usize,
    /// What finds each of them again.
    volumes: Vec<String>,
    /// Stripes of each volume in every pattern of the layout.
    stripes: Vec<u32>,
    tensors: Vec<ManifestTensor>,
}

#[derive(Serialize, Deserialize)]
struct ManifestTensor {
    name: String,
    ranges: Vec<(u64, u64)>,
}

/// One volume of a store, as it works here.
#[derive(Debug, Clone)]
pub struct VolumeReport {
    /// The path given.
    pub path: PathBuf,
    /// Name of its engine.
    pub engine: &'static str,
    /// What of the system's optional features the engine uses.
    pub features: Vec<String>,
    /// Whether transfers bypass the page cache.
    pub direct: bool,
    /// Its part of the stripes.
    pub share: f64,
    /// What was moved so far.
    pub counters: CountersSnapshot,
}

impl Store {
    /// The format of the manifest.
    const FORMAT: u32 = 2;

    /// Creates an empty store on `paths`: directories, which are made if missing, and formatted devices. What a killed run
    /// left there is overwritten; a store that was kept is refused.
    pub fn create(paths: &[PathBuf], options: &StoreOptions) -> Result<Self> {
        Self::create_with(paths, options, &|file| open_engine(file, options.engine))
    }

    /// As [`Store::create`], with engines of the caller's.
    pub fn create_with(
        paths: &[PathBuf],
        options: &StoreOptions,
        open: &dyn Fn(&Arc<VolumeFile>) -> memascend_nvme::Result<OpenedEngine>,
    ) -> Result<Self> {
        let mut seen = Vec::new();
        let mut volumes = Vec::new();
        for path in paths {
            volumes.push(Volume::create(path, options.direct).map_err(|error| {
                // Held by ourselves: say what is wrong rather than who is at fault.
                let twice = path.canonicalize().is_ok_and(|path| seen.contains(&path));
                if twice { StoreError::Duplicate { path: path.clone() } } else { error.into() }
            })?);
            seen.extend(path.canonicalize().ok());
        }
        let layout = if options.rates.is_empty() {
            Layout::even(volumes.len().max(1))
        } else {
            Layout::by_rates(&options.rates)
        };
        let id = DeviceId::random().map_err(|source| IoError::File {
            action: "read random numbers from",
            path: "/dev/urandom".into(),
            source,
        })?;
        Self::of(volumes, layout, id, open)
    }

    /// Opens a store that was kept, whole: `paths` has one of its volumes at least, the others are found by what the
    /// manifest says of them.
    pub fn open(paths: &[PathBuf], options: &StoreOptions) -> Result<Self> {
        let mut found: BTreeMap<usize, Volume> = BTreeMap::new();
        let mut first: Option<Manifest> = None;
        let mut to_open = paths.to_vec();
        while let Some(path) = to_open.pop() {
            let failed = |reason: String| StoreError::Manifest { path: path.clone(), reason };
            let volume = Volume::open(&path, options.direct)?;
            let note = volume.read_note()?.unwrap_or_default();
            let manifest: Manifest = serde_json::from_slice(&note)
                .map_err(|error| failed(format!("its manifest is damaged: {error}")))?;
            if manifest.format != Self::FORMAT {
                return Err(failed(format!(
                    "its manifest has format {}, this version reads format {}",
                    manifest.format,
                    Self::FORMAT
                )));
            }
            if first.as_ref().is_some_and(|first| first.store != manifest.store) {
                return Err(failed("it belongs to another store than the volumes beside it".into()));
            }
            if found.insert(manifest.volume, volume).is_some() {
                return Err(StoreError::Duplicate { path });
            }
            let first = first.get_or_insert(manifest);
            if to_open.is_empty()
                && let Some(missing) = (0..first.volumes.len()).find(|index| !found.contains_key(index))
            {
                to_open.push(PathBuf::from(&first.volumes[missing]));
            }
        }
        let manifest = first.ok_or(StoreError::NoVolume)?;
        let broken =
            || StoreError::Manifest { path: paths[0].clone(), reason: "its manifest makes no sense".into() };
        let layout = Layout::from_counts(&manifest.stripes).ok_or_else(broken)?;
        let id = manifest.store.parse().map_err(|_| broken())?;
        if found.len() != manifest.stripes.len() || !found.keys().copied().eq(0..found.len()) {
            return Err(broken());
        }
        let volumes = found.into_values().collect();
        let store = Self::of(volumes, layout, id, &|file| open_engine(file, options.engine))?;
        store.restore(&manifest.tensors).ok_or_else(broken)?;
        Ok(store)
    }

    /// Fills the table from a manifest, if the volumes hold what it says and no byte of them twice.
    fn restore(&self, tensors: &[ManifestTensor]) -> Option<()> {
        let mut all: Vec<(u64, u64)> =
            tensors.iter().flat_map(|tensor| tensor.ranges.iter().copied()).collect();
        all.sort_unstable();
        let mut end = 0;
        for (offset, bytes) in all {
            let whole = (offset | bytes).is_multiple_of(BLOCK_BYTES as u64) && bytes > 0;
            if !whole || offset < end {
                return None;
            }
            end = offset.checked_add(bytes)?;
        }
        for (index, Member { volume, .. }) in self.members.iter().enumerate() {
            if self.layout.share_bytes(index, end)
                > volume.capacity().unwrap_or_else(|| volume.reserved_bytes())
            {
                return None;
            }
        }
        let mut table = self.table();
        for ManifestTensor { name, ranges } in tensors {
            let ranges: Arc<[Extent]> =
                ranges.iter().map(|&(offset, bytes)| Extent { offset, bytes }).collect();
            table.allocator.take(&ranges);
            table.tensors.insert(ranges.first()?.offset, Tensor { name: name.as_str().into(), ranges });
        }
        Some(())
    }

    fn of(
        volumes: Vec<Volume>,
        layout: Layout,
        id: DeviceId,
        open: &dyn Fn(&Arc<VolumeFile>) -> memascend_nvme::Result<OpenedEngine>,
    ) -> Result<Self> {
        if volumes.is_empty() {
            return Err(StoreError::NoVolume);
        }
        assert_eq!(layout.counts().len(), volumes.len(), "one share for each volume");
        let mut notices: Vec<String> =
            volumes.iter().filter_map(|volume| volume.notice().map(str::to_owned)).collect();
        let mut members = Vec::new();
        for volume in volumes {
            let OpenedEngine { engine, notice } = open(volume.file())?;
            // Once is enough: what refuses io_uring refuses it for every volume.
            notices.extend(notice.filter(|notice| !notices.contains(notice)));
            members.push(Member { engine, volume });
        }
        Ok(Self { members, layout, id, table: Mutex::default(), notices })
    }

    /// Makes an arena known to the engines: transfers of its buffers cost less then.
    pub fn register(&self, pool: &Pool) {
        self.members.iter().for_each(|member| member.engine.register(pool));
    }

    /// Room for a tensor of `bytes` bytes, preallocated on every volume (on none if the engine moves nothing). Only if free
    /// space and what the volumes can grow are too little together does it fail: no space is lost to fragmentation.
    pub fn allocate(&self, name: &str, bytes: u64) -> Result<Extent> {
        let mut table = self.table();
        let room = self.room()?;
        let Some(ranges) = table.allocator.find(bytes, self.layout.capacity(&room)) else {
            let needed = bytes.next_multiple_of(BLOCK_BYTES as u64);
            let full =
                self.no_room(&table, needed, &room).expect("a volume is what limits the address space");
            return Err(full.into());
        };
        let last = ranges.last().expect("a tensor has a range");
        let end = last.end().max(table.allocator.end());
        for (index, member) in self.members.iter().enumerate() {
            if member.engine.needs_room() {
                member.volume.reserve(self.layout.share_bytes(index, end))?;
            }
        }
        table.allocator.take(&ranges);
        let extent = Extent { offset: ranges[0].offset, bytes: ranges.iter().map(|range| range.bytes).sum() };
        table.tensors.insert(extent.offset, Tensor { name: name.into(), ranges: ranges.into() });
        Ok(extent)
    }

    /// Gives a tensor's room back.
    ///
    /// # Panics
    /// If it was given back before.
    pub fn free(&self, extent: Extent) {
        let mut table = self.table();
        let tensor = table.tensors.remove(&extent.offset).expect("a tensor is freed once");
        table.allocator.free(&tensor.ranges);
    }

    /// Fails with the volume that lacks the room if `bytes` more bytes could not be allocated now.
    pub fn check_room(&self, bytes: u64) -> Result<()> {
        let room = self.room()?;
        self.no_room(&self.table(), bytes, &room).map_or(Ok(()), |error| Err(error.into()))
    }

    /// Which volume lacks how much for `bytes` more bytes, if one does.
    fn no_room(&self, table: &Table, bytes: u64, room: &[u64]) -> Option<IoError> {
        let end = table.allocator.end().saturating_add(bytes.saturating_sub(table.allocator.free_bytes()));
        self.members.iter().zip(room).enumerate().find_map(|(index, (member, room))| {
            let used_bytes = self.layout.share_bytes(index, table.allocator.end());
            let needed_bytes = self.layout.share_bytes(index, end) - used_bytes;
            let free_bytes = room.saturating_sub(used_bytes);
            let path = member.volume.path().to_owned();
            (needed_bytes > free_bytes).then_some(IoError::NoSpace { path, needed_bytes, free_bytes })
        })
    }

    /// How many bytes each volume can have, with those it has.
    fn room(&self) -> Result<Vec<u64>> {
        let room = |member: &Member| match member.engine.needs_room() {
            true => Ok(member.volume.free_bytes()?.saturating_add(member.volume.reserved_bytes())),
            false => Ok(u64::MAX),
        };
        self.members.iter().map(room).collect()
    }

    /// Moves `buffer.bytes()` bytes between `buffer` and `extent` at `offset` within it, then calls `done`
    /// on an engine thread.
    ///
    /// # Panics
    /// If the range leaves the extent or is not aligned to blocks, or the tensor was freed.
    pub fn transfer(
        &self,
        operation: Operation,
        extent: Extent,
        offset: u64,
        buffer: LeaseSlice,
        done: Transferred,
    ) {
        let bytes = buffer.bytes() as u64;
        assert!(offset + bytes <= extent.bytes, "{bytes} bytes at {offset} leave {extent:?}");
        assert!(
            (offset | bytes).is_multiple_of(BLOCK_BYTES as u64),
            "{bytes} bytes at {offset} are not aligned"
        );
        if bytes == 0 {
            return done(Ok(()));
        }
        let Tensor { name, ranges } = self.tensor(extent);
        let pieces = self.pieces(&ranges, offset, bytes);
        let join = Arc::new(Join {
            left: AtomicUsize::new(pieces.len()),
            outcome: Mutex::new((None, Some(done))),
            tensor: name,
        });
        // Cut before the first is submitted: from then on only the requests hold the buffer.
        let slices: Vec<_> = pieces.iter().map(|piece| buffer.narrow(piece.start, piece.bytes)).collect();
        drop(buffer);
        for (piece, slice) in pieces.into_iter().zip(slices) {
            let join = Arc::clone(&join);
            self.members[piece.volume].engine.submit(Request {
                operation,
                offset: piece.offset,
                buffer: slice,
                on_complete: Box::new(move |Completion { buffer, result }| {
                    // Returned before anybody hears of the end, so that who waited finds the buffer free.
                    drop(buffer);
                    join.finish(result.err());
                }),
            });
        }
    }

    /// As [`Store::transfer`], waiting for the end.
    pub fn transfer_wait(
        &self,
        operation: Operation,
        extent: Extent,
        offset: u64,
        buffer: LeaseSlice,
    ) -> Result<()> {
        let (sender, receiver) = mpsc::sync_channel(1);
        self.transfer(operation, extent, offset, buffer, Box::new(move |result| drop(sender.send(result))));
        receiver.recv().unwrap_or(Err(StoreError::Volume(IoError::Closed)))
    }

    /// Waits until every write that has ended is on the media.
    pub fn sync(&self) -> Result<()> {
        self.members.iter().try_for_each(|member| member.engine.flush().map_err(StoreError::from))
    }

    /// Leaves the data in place on drop, with a manifest on every volume by which [`Store::open`] finds it.
    pub fn keep(&self) -> Result<()> {
        self.sync()?;
        let table = self.table();
        let tensors = table.tensors.values().map(|tensor| ManifestTensor {
            name: tensor.name.to_string(),
            ranges: tensor.ranges.iter().map(|range| (range.offset, range.bytes)).collect(),
        });
        let mut manifest = Manifest {
            format: Self::FORMAT,
            store: self.id.to_string(),
            volume: 0,
            volumes: self.members.iter().map(|member| member.volume.identity()).collect(),
            stripes: self.layout.counts().to_vec(),
            tensors: tensors.collect(),
        };
        drop(table);
        for (index, member) in self.members.iter().enumerate() {
            manifest.volume = index;
            let kept = member.volume.keep(&serde_json::to_vec(&manifest).expect("a manifest is plain data"));
            if let Err(error) = kept {
                // All of them or none: a part of a store is of no use, and would be in the way.
                for member in &self.members[..index] {
                    let _ = member.volume.forget();
                }
                return Err(error.into());
            }
        }
        Ok(())
    }

    /// The names and handles of all tensors, in the order of their places.
    pub fn tensors(&self) -> Vec<(String, Extent)> {
        let bytes = |tensor: &Tensor| tensor.ranges.iter().map(|range| range.bytes).sum();
        let handle = |(offset, tensor): (&u64, &Tensor)| {
            (tensor.name.to_string(), Extent { offset: *offset, bytes: bytes(tensor) })
        };
        self.table().tensors.iter().map(handle).collect()
    }

    /// What the user should know: a refused O_DIRECT, a refused io_uring.
    pub fn notices(&self) -> &[String] {
        &self.notices
    }

    /// How each volume works here, and what it has done.
    pub fn volumes(&self) -> Vec<VolumeReport> {
        let stripes: u32 = self.layout.counts().iter().sum();
        let report = |(member, count): (&Member, &u32)| VolumeReport {
            path: member.volume.path().to_owned(),
            engine: member.engine.name(),
            features: member.engine.features(),
            direct: member.volume.is_direct(),
            share: f64::from(*count) / f64::from(stripes),
            counters: member.engine.counters(),
        };
        self.members.iter().zip(self.layout.counts()).map(report).collect()
    }

    /// Bytes in use by tensors.
    pub fn used_bytes(&self) -> u64 {
        let table = self.table();
        table.allocator.end() - table.allocator.free_bytes()
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tensor(&self, extent: Extent) -> Tensor {
        self.table()
            .tensors
            .get(&extent.offset)
            .cloned()
            .expect("the handle is of a tensor that was not freed")
    }

    /// The volume ranges behind `bytes` bytes at `offset` of a tensor in `ranges`.
    fn pieces(&self, ranges: &[Extent], offset: u64, bytes: u64) -> Vec<Piece> {
        let mut pieces = Vec::new();
        let (mut skipped, mut done) = (0, 0);
        for range in ranges {
            let from = offset.saturating_sub(skipped);
            if from < range.bytes && done < bytes {
                let length = (range.bytes - from).min(bytes - done);
                let found = self.layout.pieces(range.offset + from, length);
                let shifted =
                    found.into_iter().map(|piece| Piece { start: piece.start + done as usize, ..piece });
                pieces.extend(shifted);
                done += length;
            }
            skipped += range.bytes;
        }
        pieces
    }
}

/// Collects the parts of one transfer.
struct Join {
    left: AtomicUsize,
    outcome: Mutex<(Option<IoError>, Option<Transferred>)>,
    tensor: Arc<str>,
}

impl Join {
    fn finish(&self, error: Option<IoError>) {
        if let Some(error) = error {
            self.outcome.lock().unwrap_or_else(PoisonError::into_inner).0.get_or_insert(error);
        }
        if self.left.fetch_sub(1, Ordering::AcqRel) != 1 {
            return;
        }
        let (error, done) = {
            let mut outcome = self.outcome.lock().unwrap_or_else(PoisonError::into_inner);
            (outcome.0.take(), outcome.1.take())
        };
        let done = done.expect("the last part finishes once");
        done(match error {
            None => Ok(()),
            Some(source) => Err(StoreError::Tensor { tensor: self.tensor.to_string(), source }),
        });
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use memascend_mem::{PageableAllocator, SizeClass};
    use memascend_nvme::EngineChoice;

    fn buffer(bytes: usize) -> LeaseSlice {
        let class = SizeClass { consumer: "test".into(), bytes, count: 1 };
        let pool = Pool::new(&PageableAllocator, &[class]).unwrap();
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
            let class = SizeClass { consumer: "test".into(), bytes: 3 << 20, count: 1 };
            let pool = Pool::new(&PageableAllocator, &[class]).unwrap();
            for bytes in [0, 3 << 20, 4096].repeat(50) {
                let lease = pool.try_lease(3 << 20).unwrap().expect("returned before the end was told");
                let buffer = LeaseSlice::new(Arc::new(lease), 0, bytes);
                store.transfer_wait(Operation::Write, extent, 0, buffer).unwrap();
            }
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
            let extent = first.allocate(&format!("tensor {seed}"), bytes).unwrap();
            fill(&first, extent, seed);
        }
        first.keep().unwrap();
        drop(first);
        let error = Store::create(&directories[1..2], &StoreOptions::default()).err().unwrap();
        assert!(error.to_string().contains("keep_store"), "{error}");
        for given in &directories {
            let store = Store::open(std::slice::from_ref(given), &StoreOptions::default()).unwrap();
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
        other.keep().unwrap();
        drop(other);
        std::fs::remove_dir_all(&directories[2]).unwrap();
        std::fs::rename(root.path().join("other"), &directories[2]).unwrap();
        let error = Store::open(&directories[..1], &StoreOptions::default()).err().unwrap();
        assert!(error.to_string().contains("another store"), "{error}");
    }

    #[test]
    fn a_tensor_may_lie_in_several_ranges_when_only_they_have_the_room() {
        let root = tempfile::tempdir().unwrap();
        // A volume that cannot grow: what its limit would be on a device.
        let store = store(root.path(), 2);
        let extents: Vec<_> = (0..8).map(|_| store.allocate("small", 3 << 20).unwrap()).collect();
        extents.iter().step_by(2).for_each(|extent| store.free(*extent));
        let ranges = store.table().allocator.find(12 << 20, 0).unwrap();
        assert_eq!(ranges.len(), 4);
        let scattered = Extent { offset: ranges[0].offset, bytes: 12 << 20 };
        {
            let mut table = store.table();
            table.allocator.take(&ranges);
            table
                .tensors
                .insert(scattered.offset, Tensor { name: "scattered".into(), ranges: ranges.into() });
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

    #[test]
    fn a_directory_given_twice_is_refused() {
        let root = tempfile::tempdir().unwrap();
        let directory = root.path().to_owned();
        let error = Store::create(&[directory.clone(), directory], &StoreOptions::default()).err().unwrap();
        assert!(matches!(error, StoreError::Duplicate { .. }), "{error}");
    }
}
