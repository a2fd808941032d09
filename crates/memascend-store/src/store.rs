use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};

use memascend_mem::{LeaseSlice, Origin};
use memascend_nvme::{
    BLOCK_BYTES, Completion, CountersSnapshot, Engine, EngineChoice, IoError, Operation, Request, Volume,
    open_engine,
};
use serde::Serialize;

use crate::lock::DirectoryLock;
use crate::{Extent, ExtentAllocator, Result, StoreError};

/// File that marks a directory whose store was kept.
pub(crate) const MANIFEST_NAME: &str = "memascend.json";

/// Consecutive bytes that lie on one volume before the next takes over.
const STRIPE_BYTES: u64 = 1 << 20;

/// Called once when a transfer has ended.
pub type Transferred = Box<dyn FnOnce(Result<()>) + Send>;

/// How to open a store.
#[derive(Debug, Clone, Copy)]
pub struct StoreOptions {
    /// Which engine.
    pub engine: EngineChoice,
    /// Bypass the page cache where the filesystem allows it.
    pub direct: bool,
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self { engine: EngineChoice::Auto, direct: true }
    }
}

/// The tensors of one run on one or more volumes. Files are removed on drop unless [`Store::keep`] was called.
pub struct Store {
    // Declared before the locks: the engine drains and the files close while the directories are still ours.
    engine: Arc<dyn Engine>,
    volumes: Vec<Volume>,
    locks: Vec<DirectoryLock>,
    /// Directories that did not exist before: removed with the files when nothing else lies in them.
    made: Vec<PathBuf>,
    table: Mutex<Table>,
    notices: Vec<String>,
    keep: AtomicBool,
    origin: Origin,
}

#[derive(Default)]
struct Table {
    allocator: ExtentAllocator,
    names: BTreeMap<u64, (String, Extent)>,
}

#[derive(Serialize)]
struct Manifest<'a> {
    format: u32,
    volume: usize,
    volumes: Vec<&'a Path>,
    stripe_bytes: u64,
    tensors: BTreeMap<&'a str, Extent>,
}

impl Store {
    /// Creates an empty store on `directories`, which are made if missing. What a killed run left there is
    /// overwritten; a store that was kept is refused.
    pub fn create(directories: &[PathBuf], options: StoreOptions) -> Result<Self> {
        let (engine, notice) = open_engine(options.engine)?;
        Self::create_with(directories, engine, options.direct, notice.into_iter().collect())
    }

    /// As [`Store::create`], on a given engine.
    pub fn create_with(
        directories: &[PathBuf],
        engine: Arc<dyn Engine>,
        direct: bool,
        mut notices: Vec<String>,
    ) -> Result<Self> {
        if directories.is_empty() {
            return Err(StoreError::NoVolume);
        }
        // Built up step by step, so that a failure half-way drops, and so removes, what was made.
        let mut store = Self {
            engine,
            volumes: Vec::new(),
            locks: Vec::new(),
            made: Vec::new(),
            table: Mutex::default(),
            notices: Vec::new(),
            keep: AtomicBool::new(false),
            origin: Origin::here(),
        };
        let mut seen = Vec::new();
        for directory in directories {
            let failed =
                |action| move |source| StoreError::Directory { action, path: directory.clone(), source };
            if !directory.exists() {
                // Only the last part of the path: a missing parent is a typing error or a drive not mounted.
                std::fs::create_dir(directory).map_err(failed("create"))?;
                store.made.push(directory.clone());
            }
            let canonical = directory.canonicalize().map_err(failed("resolve"))?;
            if seen.contains(&canonical) {
                return Err(StoreError::Duplicate { path: directory.clone() });
            }
            seen.push(canonical);
            store.locks.push(DirectoryLock::take(directory)?);
            if directory.join(MANIFEST_NAME).exists() {
                return Err(StoreError::Kept { path: directory.clone() });
            }
            let volume = Volume::create(directory, direct)?;
            notices.extend(volume.notice().map(str::to_owned));
            store.volumes.push(volume);
        }
        store.notices = notices;
        Ok(store)
    }

    /// Room for a tensor of `bytes` bytes, preallocated on every volume (on none if the engine moves nothing).
    pub fn allocate(&self, name: &str, bytes: u64) -> Result<Extent> {
        let mut table = self.table();
        let extent = table.allocator.preview(bytes);
        let end = extent.end().max(table.allocator.end());
        if self.engine.needs_room() {
            for (index, volume) in self.volumes.iter().enumerate() {
                volume.reserve(self.share_bytes(index, end))?;
            }
        }
        table.allocator.take(extent);
        table.names.insert(extent.offset, (name.to_owned(), extent));
        Ok(extent)
    }

    /// Gives a tensor's room back.
    pub fn free(&self, extent: Extent) {
        let mut table = self.table();
        table.names.remove(&extent.offset);
        table.allocator.free(extent);
    }

    /// Fails with the volume that lacks the room if `bytes` more bytes could not be allocated now.
    pub fn check_room(&self, bytes: u64) -> Result<()> {
        if !self.engine.needs_room() {
            return Ok(());
        }
        let table = self.table();
        let end = table.allocator.end() + bytes.saturating_sub(table.allocator.free_bytes());
        for (index, volume) in self.volumes.iter().enumerate() {
            let needed_bytes = self.share_bytes(index, end) - self.share_bytes(index, table.allocator.end());
            let free_bytes = volume.free_bytes()?;
            if needed_bytes > free_bytes {
                let path = volume.directory().to_owned();
                return Err(IoError::NoSpace { path, needed_bytes, free_bytes }.into());
            }
        }
        Ok(())
    }

    /// Moves `buffer.bytes()` bytes between `buffer` and `extent` at `offset` within it, then calls `done`
    /// on an engine thread.
    ///
    /// # Panics
    /// If the range leaves the extent or is not aligned to blocks.
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
        let parts = self.parts(extent.offset + offset, bytes);
        let join = Arc::new(Join {
            left: AtomicUsize::new(parts.len()),
            outcome: Mutex::new((None, Some(done))),
            tensor: self.name_of(extent),
        });
        // Cut before the first is submitted: from then on only the requests hold the buffer.
        let slices: Vec<_> = parts.iter().map(|part| buffer.narrow(part.start, part.bytes)).collect();
        drop(buffer);
        for (part, slice) in parts.into_iter().zip(slices) {
            let join = Arc::clone(&join);
            self.engine.submit(Request {
                operation,
                file: Arc::clone(self.volumes[part.volume].file()),
                offset: part.offset,
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

    /// Waits until everything written is on the media.
    pub fn sync(&self) -> Result<()> {
        self.volumes.iter().try_for_each(|volume| volume.sync().map_err(StoreError::from))
    }

    /// Leaves the files in place on drop, with a manifest of the tensors beside each.
    pub fn keep(&self) -> Result<()> {
        self.sync()?;
        let table = self.table();
        let volumes: Vec<&Path> = self.volumes.iter().map(Volume::directory).collect();
        let tensors: BTreeMap<&str, Extent> =
            table.names.values().map(|(name, extent)| (name.as_str(), *extent)).collect();
        let mut manifest = Manifest { format: 1, volume: 0, volumes, stripe_bytes: STRIPE_BYTES, tensors };
        for (index, volume) in self.volumes.iter().enumerate() {
            manifest.volume = index;
            let path = volume.directory().join(MANIFEST_NAME);
            let text = serde_json::to_vec_pretty(&manifest).expect("a manifest is plain data");
            std::fs::write(&path, text).map_err(|source| StoreError::Directory {
                action: "write",
                path,
                source,
            })?;
        }
        self.keep.store(true, Ordering::Release);
        Ok(())
    }

    /// What the user should know: a refused O_DIRECT, a refused io_uring.
    pub fn notices(&self) -> &[String] {
        &self.notices
    }

    /// Name of the engine in use.
    pub fn engine_name(&self) -> &'static str {
        self.engine.name()
    }

    /// Whether every volume bypasses the page cache.
    pub fn is_direct(&self) -> bool {
        self.volumes.iter().all(Volume::is_direct)
    }

    /// Bytes moved so far.
    pub fn counters(&self) -> CountersSnapshot {
        self.engine.counters()
    }

    /// Bytes in use by tensors.
    pub fn used_bytes(&self) -> u64 {
        let table = self.table();
        table.allocator.end() - table.allocator.free_bytes()
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn name_of(&self, extent: Extent) -> String {
        self.table()
            .names
            .get(&extent.offset)
            .map_or_else(|| "unnamed tensor".to_owned(), |(name, _)| name.clone())
    }

    /// Bytes of volume `index` that an address space of `end` bytes needs.
    fn share_bytes(&self, index: usize, end: u64) -> u64 {
        let count = self.volumes.len() as u64;
        let (whole, rest) = (end / STRIPE_BYTES, end % STRIPE_BYTES);
        let index = index as u64;
        let full = whole / count + u64::from(whole % count > index);
        let partial = if whole % count == index { rest } else { 0 };
        full * STRIPE_BYTES + partial
    }

    /// The volume ranges behind `bytes` bytes at address `address`.
    fn parts(&self, address: u64, bytes: u64) -> Vec<VolumePart> {
        let count = self.volumes.len() as u64;
        if count == 1 {
            return vec![VolumePart { volume: 0, offset: address, start: 0, bytes: bytes as usize }];
        }
        let mut parts = Vec::new();
        let mut done = 0;
        while done < bytes {
            let position = address + done;
            let (stripe, inside) = (position / STRIPE_BYTES, position % STRIPE_BYTES);
            let length = (STRIPE_BYTES - inside).min(bytes - done);
            parts.push(VolumePart {
                volume: (stripe % count) as usize,
                offset: stripe / count * STRIPE_BYTES + inside,
                start: done as usize,
                bytes: length as usize,
            });
            done += length;
        }
        parts
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        // The files belong to the process that made them, not to a forked DataLoader worker.
        if !self.origin.is_here() {
            return;
        }
        if !self.keep.load(Ordering::Acquire) {
            for volume in &self.volumes {
                let _ = std::fs::remove_file(volume.file().path());
            }
        }
        for lock in &self.locks {
            lock.remove_file();
        }
        for directory in &self.made {
            let _ = std::fs::remove_dir(directory);
        }
    }
}

struct VolumePart {
    volume: usize,
    offset: u64,
    start: usize,
    bytes: usize,
}

/// Collects the parts of one transfer.
struct Join {
    left: AtomicUsize,
    outcome: Mutex<(Option<IoError>, Option<Transferred>)>,
    tensor: String,
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
            Some(source) => Err(StoreError::Tensor { tensor: self.tensor.clone(), source }),
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memascend_mem::{PageableAllocator, Pool, SizeClass};

    fn buffer(bytes: usize) -> LeaseSlice {
        let class = SizeClass { consumer: "test".into(), bytes, count: 1 };
        let pool = Pool::new(&PageableAllocator, &[class]).unwrap();
        LeaseSlice::new(Arc::new(pool.try_lease(bytes).unwrap().unwrap()), 0, bytes)
    }

    fn store(root: &Path, volumes: usize) -> Store {
        let directories: Vec<PathBuf> = (0..volumes).map(|index| root.join(index.to_string())).collect();
        Store::create(&directories, StoreOptions::default()).unwrap()
    }

    #[test]
    fn tensors_survive_on_one_two_and_three_volumes() {
        for volumes in 1..=3 {
            let root = tempfile::tempdir().unwrap();
            let store = store(root.path(), volumes);
            let sizes = [4096, 5 << 20, (1 << 20) + 4096, 12_288];
            let extents: Vec<_> = sizes.iter().map(|bytes| store.allocate("t", *bytes).unwrap()).collect();
            for (seed, extent) in extents.iter().enumerate() {
                let source = buffer(extent.bytes as usize);
                // SAFETY: the only handle to the buffer.
                unsafe { source.as_mut_slice() }
                    .iter_mut()
                    .enumerate()
                    .for_each(|(i, b)| *b = (i / 5 + seed) as u8);
                store.transfer_wait(Operation::Write, *extent, 0, source).unwrap();
            }
            for (seed, extent) in extents.iter().enumerate() {
                let target = buffer(extent.bytes as usize);
                store.transfer_wait(Operation::Read, *extent, 0, target.clone()).unwrap();
                // SAFETY: the transfer has ended.
                let bytes = unsafe { target.as_slice() };
                assert!(
                    bytes.iter().enumerate().all(|(i, b)| *b == (i / 5 + seed) as u8),
                    "{volumes} volumes"
                );
            }
        }
    }

    #[test]
    fn an_engine_that_moves_nothing_takes_no_room() {
        let root = tempfile::tempdir().unwrap();
        let options = StoreOptions { engine: EngineChoice::Null, direct: true };
        let store = Store::create(&[root.path().to_owned()], options).unwrap();
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
    fn every_byte_of_the_address_space_has_one_place() {
        let root = tempfile::tempdir().unwrap();
        let store = store(root.path(), 3);
        let end = 10 * STRIPE_BYTES + 8192;
        let mut used = [0_u64; 3];
        for part in store.parts(0, end) {
            assert_eq!(part.offset, used[part.volume], "stripes of a volume follow one another");
            used[part.volume] += part.bytes as u64;
        }
        for (index, bytes) in used.iter().enumerate() {
            assert_eq!(store.share_bytes(index, end), *bytes);
        }
    }

    #[test]
    fn a_directory_in_use_is_refused_and_free_again_after() {
        let root = tempfile::tempdir().unwrap();
        let first = store(root.path(), 1);
        let error = Store::create(&[root.path().join("0")], StoreOptions::default()).err().unwrap();
        assert!(error.to_string().contains(&std::process::id().to_string()), "{error}");
        drop(first);
        assert!(!root.path().join("0").exists(), "nothing is left behind");
        store(root.path(), 1);
    }

    #[test]
    fn a_kept_store_is_not_overwritten() {
        let root = tempfile::tempdir().unwrap();
        let first = store(root.path(), 1);
        first.allocate("weight", 8192).unwrap();
        first.keep().unwrap();
        drop(first);
        assert!(root.path().join("0").join(Volume::FILE_NAME).exists());
        let error = Store::create(&[root.path().join("0")], StoreOptions::default()).err().unwrap();
        assert!(matches!(error, StoreError::Kept { .. }));
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
        let error = Store::create(&[directory.clone(), directory], StoreOptions::default()).err().unwrap();
        assert!(matches!(error, StoreError::Duplicate { .. }), "{error}");
    }
}
