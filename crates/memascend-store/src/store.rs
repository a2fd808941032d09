use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};

use memascend_mem::{LeaseSlice, Pool};
use memascend_nvme::{
    BLOCK_BYTES, Completion, CountersSnapshot, Engine, EngineOptions, FoundNote, IoError, NoteKeeper,
    OpenedEngine, Operation, Request, Volume, VolumeFile, open_engine,
};

use crate::checksums::{sum_pieces, sum_writes};
use crate::id::StoreId;
use crate::layout::Piece;
use crate::table::{Bytes, Table};
use crate::{Damage, Extent, Layout, Result, Rewrite, StoreError, TensorId};

/// Called once when a transfer has ended.
pub type Transferred = Box<dyn FnOnce(Result<()>) + Send>;

/// Opens the engine of a volume.
pub(crate) type OpenEngine<'a> = &'a dyn Fn(&Arc<VolumeFile>) -> memascend_nvme::Result<OpenedEngine>;

/// How to open a store.
#[derive(Debug, Clone)]
pub struct StoreOptions {
    /// Which engine, and how.
    pub engine: EngineOptions,
    /// Bypass the page cache where the filesystem allows it.
    pub direct: bool,
    /// Bytes per second of each volume, which decide on its share of every tensor; empty for equal shares.
    pub rates: Vec<f64>,
    /// Compare what is read with what was written.
    pub checksums: bool,
    /// Overwrite tensors where they are: half the room, but a generation is gone with the first rewrite after it.
    pub in_place: bool,
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self {
            engine: EngineOptions::default(),
            direct: true,
            rates: Vec::new(),
            checksums: true,
            in_place: false,
        }
    }
}

/// The tensors of one run on one or more volumes. Files are removed on drop unless something was committed.
pub struct Store {
    pub(crate) members: Vec<Member>,
    pub(crate) map: Arc<Map>,
    pub(crate) id: StoreId,
    pub(crate) table: Mutex<Table>,
    /// Whoever writes manifests has this: one at a time.
    pub(crate) writer: Mutex<()>,
    /// Of the last manifest that anybody wrote, or tried to.
    pub(crate) sequence: AtomicU64,
    checksums: bool,
    pub(crate) in_place: bool,
    pub(crate) notices: Vec<String>,
}

/// A volume of the store with its engine.
pub(crate) struct Member {
    // Declared first: the engine drains before the volume closes and others may have it.
    pub engine: Arc<dyn Engine>,
    pub volume: Volume,
    /// Where its notes are, if not with the volume.
    notes: Option<Arc<dyn NoteKeeper>>,
    /// Written before this store was opened.
    pub life_before: u64,
    note_bytes: AtomicU64,
}

impl Member {
    pub(crate) fn open(volume: Volume, open: OpenEngine<'_>) -> Result<(Self, Option<String>)> {
        let OpenedEngine { engine, notice } = open(volume.file())?;
        let notes = engine.notes();
        Ok((Self { engine, volume, notes, life_before: 0, note_bytes: AtomicU64::new(0) }, notice))
    }

    fn notes(&self) -> &dyn NoteKeeper {
        self.notes.as_deref().unwrap_or(&self.volume)
    }

    pub(crate) fn find_note(&self) -> Result<FoundNote> {
        Ok(self.notes().find_note()?)
    }

    pub(crate) fn write_note(&self, note: &[u8]) -> Result<()> {
        self.note_bytes.fetch_add(note.len() as u64, Ordering::Relaxed);
        Ok(self.notes().write_note(note)?)
    }

    pub(crate) fn clear_note(&self) -> Result<()> {
        Ok(self.notes().clear_note()?)
    }

    /// Bytes written to it over the store's whole life.
    pub(crate) fn life_bytes(&self) -> u64 {
        let written = self.engine.counters().writes.bytes + self.note_bytes.load(Ordering::Relaxed);
        self.life_before.saturating_add(written)
    }
}

/// Where the bytes of the address space are.
pub(crate) struct Map {
    pub layout: Layout,
    files: Vec<Arc<VolumeFile>>,
}

impl Map {
    /// The volume ranges behind `bytes` bytes at `offset` of what lies in `ranges`.
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

    /// What there is to say of bytes that are not right.
    pub(crate) fn damage(&self, of: &Bytes, offset: u64, bytes: u64) -> Damage {
        let place = |piece: Piece| {
            let file = &self.files[piece.volume];
            (file.path().to_owned(), file.position(piece.offset))
        };
        let places = self.pieces(&of.ranges, offset, bytes).into_iter().map(place).collect();
        Damage { tensor: of.name.to_string(), offset, bytes, places }
    }
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
    /// How many bytes of data it can ever hold; None for a directory, whose filesystem has what it has.
    pub capacity_bytes: Option<u64>,
    /// Bytes that could still be reserved; None where nobody tells.
    pub free_bytes: Option<u64>,
    /// Bytes that the store has taken for itself.
    pub reserved_bytes: u64,
}

impl Store {
    /// Creates an empty store on `paths`: directories, which are made if missing, and formatted devices. What a killed run
    /// left there is overwritten; a store to which something was committed is refused.
    pub fn create(paths: &[PathBuf], options: &StoreOptions) -> Result<Self> {
        Self::create_with(paths, options, &|file| open_engine(file, options.engine))
    }

    /// As [`Store::create`], with engines of the caller's.
    pub fn create_with(paths: &[PathBuf], options: &StoreOptions, open: OpenEngine<'_>) -> Result<Self> {
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
        let id = StoreId::random().map_err(|source| IoError::File {
            action: "read random numbers from",
            path: "/dev/urandom".into(),
            source,
        })?;
        let mut notices = Vec::new();
        let mut members = Vec::new();
        for volume in volumes {
            let (member, notice) = Member::open(volume, open)?;
            if member.find_note()?.note.is_some() {
                return Err(member.volume.kept_error().into());
            }
            // Once is enough: what refuses io_uring refuses it for every volume.
            notices.extend(notice.filter(|notice| !notices.contains(notice)));
            members.push(member);
        }
        Self::of(members, layout, id, options, notices)
    }

    pub(crate) fn of(
        members: Vec<Member>,
        layout: Layout,
        id: StoreId,
        options: &StoreOptions,
        more_notices: Vec<String>,
    ) -> Result<Self> {
        if members.is_empty() {
            return Err(StoreError::NoVolume);
        }
        assert_eq!(layout.counts().len(), members.len(), "one share for each volume");
        let notice = |member: &Member| member.volume.notice().map(str::to_owned);
        let notices = members.iter().filter_map(notice).chain(more_notices).collect();
        let files = members.iter().map(|member| Arc::clone(member.volume.file())).collect();
        // Nothing moves: what is read is not what was written.
        let moves = members.iter().all(|member| member.engine.moves_bytes());
        Ok(Self {
            members,
            map: Arc::new(Map { layout, files }),
            id,
            table: Mutex::default(),
            writer: Mutex::default(),
            sequence: AtomicU64::new(0),
            checksums: options.checksums && moves,
            in_place: options.in_place,
            notices,
        })
    }

    /// Makes an arena known to the engines: transfers of its buffers cost less then.
    pub fn register(&self, pool: &Pool) {
        self.members.iter().for_each(|member| member.engine.register(pool));
    }

    /// Room for `bytes` bytes that belong to no generation, preallocated on every volume (on none if the engine moves nothing).
    /// Only if free space and what the volumes can grow are too little together does it fail: no space is lost to fragmentation.
    pub fn allocate(&self, name: &str, bytes: u64) -> Result<Extent> {
        let mut table = self.table();
        let ranges = self.find_room(&table, bytes)?;
        Ok(table.insert(Bytes::new(name.into(), ranges, None), true))
    }

    /// Gives back what was allocated.
    ///
    /// # Panics
    /// If it was given back before, or belongs to generations.
    pub fn free(&self, extent: Extent) {
        self.table().free_plain(extent);
    }

    /// Ranges for `bytes` bytes, reserved on the volumes.
    fn find_room(&self, table: &Table, bytes: u64) -> Result<Vec<Extent>> {
        let room = self.room()?;
        let Some(ranges) = table.allocator.find(bytes, self.map.layout.capacity(&room)) else {
            let needed = bytes.next_multiple_of(BLOCK_BYTES as u64);
            let full = self.no_room(table, needed, &room).expect("a volume is what limits the address space");
            return Err(full.into());
        };
        let last = ranges.last().expect("a tensor has a range");
        let end = last.end().max(table.allocator.end());
        for (index, member) in self.members.iter().enumerate() {
            if member.engine.needs_room() {
                member.volume.reserve(self.map.layout.share_bytes(index, end))?;
            }
        }
        Ok(ranges)
    }

    /// A tensor whose values belong to generations; the first lies in its extent by [`Store::current`]. Names are unique.
    pub fn create_tensor(&self, name: &str, bytes: u64) -> Result<TensorId> {
        let mut table = self.table();
        if table.find_tensor(name).is_some() {
            return Err(StoreError::TensorExists { name: name.to_owned() });
        }
        let name: Arc<str> = name.into();
        let ranges = self.find_room(&table, bytes)?;
        let extent = table.insert(Bytes::new(Arc::clone(&name), ranges, None), false);
        Ok(table.create_tensor(name, extent.offset))
    }

    /// An extent for another value of a tensor.
    pub(crate) fn allocate_for(&self, table: &mut Table, id: TensorId) -> Result<u64> {
        let current = Arc::clone(table.current(id));
        let ranges = self.find_room(table, current.extent().bytes)?;
        Ok(table.insert(Bytes::new(Arc::clone(&current.name), ranges, None), false).offset)
    }

    /// Makes room for the next generation of a tensor now, so that no step runs out of space. Nothing where it has it, or
    /// where tensors are overwritten in place.
    ///
    /// # Panics
    /// If the tensor was removed.
    pub fn make_spare(&self, id: TensorId) -> Result<()> {
        let mut table = self.table();
        if self.in_place {
            return Ok(());
        }
        for _ in 0..table.spares_lacking(id) {
            let key = self.allocate_for(&mut table, id)?;
            table.add_spare(id, key);
        }
        Ok(())
    }

    /// Bytes that [`Store::make_spare`] would still take.
    ///
    /// # Panics
    /// If the tensor was removed.
    pub fn spare_bytes(&self, id: TensorId) -> u64 {
        let table = self.table();
        let lacking = if self.in_place { 0 } else { table.spares_lacking(id) };
        table.current(id).extent().bytes * lacking as u64
    }

    /// Removes a tensor. Its extents are free at once where no generation has them, else when the last of those is gone: the
    /// next commit supersedes one, [`Store::delete_snapshot`] takes others away.
    ///
    /// # Panics
    /// If it was removed before.
    pub fn remove_tensor(&self, id: TensorId) {
        self.table().remove_tensor(id);
    }

    /// The tensor of that name.
    pub fn find_tensor(&self, name: &str) -> Option<TensorId> {
        self.table().find_tensor(name)
    }

    /// Where the present value of a tensor lies.
    ///
    /// # Panics
    /// If it was removed.
    pub fn current(&self, id: TensorId) -> Extent {
        self.table().current(id).extent()
    }

    /// A tensor gets a new value: from now on it is what [`Rewrite::target`] holds, all of which is to be written before the
    /// next commit. What a generation or a snapshot has is never the target; with `in_place` the generation goes
    /// instead.
    ///
    /// # Panics
    /// If the tensor was removed.
    pub fn rewrite(&self, id: TensorId) -> Result<Rewrite> {
        loop {
            let mut table = self.table();
            let source = table.current(id).extent();
            if !table.is_pinned(id) {
                return Ok(Rewrite { source, target: source });
            }
            if self.in_place && !table.in_snapshot(id) {
                drop(table);
                self.withdraw()?;
                continue;
            }
            let key = match table.take_spare(id) {
                Some(key) => key,
                None => self.allocate_for(&mut table, id)?,
            };
            table.set_current(id, key);
            let target = table.current(id);
            // Nothing of what it held before is right any more once a part of it is written.
            target.sums().clear();
            return Ok(Rewrite { source, target: target.extent() });
        }
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
            let used_bytes = self.map.layout.share_bytes(index, table.allocator.end());
            // A volume that has become smaller than what lies on it lets nothing grow, wherever the growth would be.
            let lost_bytes = if end > table.allocator.end() { used_bytes.saturating_sub(*room) } else { 0 };
            let needed_bytes = self.map.layout.share_bytes(index, end) - used_bytes + lost_bytes;
            let free_bytes = room.saturating_sub(used_bytes);
            let path = member.volume.path().to_owned();
            (needed_bytes > free_bytes).then_some(IoError::NoSpace { path, needed_bytes, free_bytes })
        })
    }

    /// How many bytes each volume can have, with those it has.
    fn room(&self) -> Result<Vec<u64>> {
        let room = |member: &Member| match member.engine.needs_room() {
            true => Ok(member.volume.free_bytes()?.saturating_add(member.volume.reserved_bytes())),
            false => Ok(member.engine.room_bytes().unwrap_or(u64::MAX)),
        };
        self.members.iter().map(room).collect()
    }

    /// Moves `buffer.bytes()` bytes between `buffer` and `extent` at `offset` within it, then calls `done`
    /// on an engine thread. What is read is compared with what was written as soon as all of what was written together (a MiB,
    /// counted from the extent's begin) was read, by this transfer or by this and others: then the last one fails. Nothing
    /// may be read or written while it is being written.
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
        let of = self.table().bytes(extent.offset).cloned();
        let of = of.expect("the handle is of a tensor that was not freed");
        self.submit(operation, of, offset, buffer, self.checksums, done);
    }

    /// As [`Store::transfer`], with or without comparing.
    pub(crate) fn submit(
        &self,
        operation: Operation,
        of: Arc<Bytes>,
        offset: u64,
        buffer: LeaseSlice,
        compare: bool,
        done: Transferred,
    ) {
        let pieces = self.map.pieces(&of.ranges, offset, buffer.bytes() as u64);
        let bytes = buffer.bytes() as u64;
        let after = match operation {
            Operation::Write => {
                if compare {
                    // SAFETY: until the transfer has ended nobody changes what is written.
                    let sums = sum_writes(offset, unsafe { buffer.as_slice() });
                    of.sums().write(&sums);
                } else {
                    of.sums().forget(offset, bytes);
                }
                After::Written { offset, bytes }
            }
            Operation::Read if compare => {
                After::Compare { offset, buffer: buffer.clone(), map: Arc::clone(&self.map) }
            }
            Operation::Read => After::Nothing,
        };
        let join = Arc::new(Join {
            left: AtomicUsize::new(pieces.len()),
            outcome: Mutex::new((None, Some((after, done)))),
            of,
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

    /// The names and handles of the present values of all tensors, and of all other extents, in the order of their places.
    pub fn tensors(&self) -> Vec<(String, Extent)> {
        self.table().values()
    }

    /// What the user should know: a refused O_DIRECT, a refused io_uring.
    pub fn notices(&self) -> &[String] {
        &self.notices
    }

    /// How each volume works here, and what it has done.
    pub fn volumes(&self) -> Vec<VolumeReport> {
        let stripes: u32 = self.map.layout.counts().iter().sum();
        let report = |(member, count): (&Member, &u32)| VolumeReport {
            path: member.volume.path().to_owned(),
            engine: member.engine.name(),
            features: member.engine.features(),
            direct: member.volume.is_direct(),
            share: f64::from(*count) / f64::from(stripes),
            counters: member.engine.counters(),
            capacity_bytes: member.volume.capacity(),
            free_bytes: member.volume.free_bytes().ok().filter(|bytes| *bytes < u64::MAX),
            reserved_bytes: member.volume.reserved_bytes(),
        };
        self.members.iter().zip(self.map.layout.counts()).map(report).collect()
    }

    /// Bytes in use by tensors.
    pub fn used_bytes(&self) -> u64 {
        let table = self.table();
        table.allocator.end() - table.allocator.free_bytes()
    }

    pub(crate) fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What there is to do when a transfer has ended.
enum After {
    Nothing,
    /// What a failed write has left nobody knows.
    Written {
        offset: u64,
        bytes: u64,
    },
    Compare {
        offset: u64,
        buffer: LeaseSlice,
        map: Arc<Map>,
    },
}

impl After {
    fn ended(self, of: &Bytes, moved: bool) -> Result<()> {
        match self {
            Self::Written { offset, bytes } if !moved => of.sums().forget(offset, bytes),
            Self::Compare { offset, buffer, map } if moved => {
                let pieces = of.sums().cut(offset, buffer.bytes() as u64);
                // SAFETY: the transfer has moved its bytes, and until its end is told nobody else uses them.
                let sums = sum_pieces(pieces, unsafe { buffer.as_slice() });
                let damage = of.sums().read(&sums);
                if let Some((offset, bytes)) = damage {
                    return Err(map.damage(of, offset, bytes).into());
                }
            }
            _ => {}
        }
        Ok(())
    }
}

/// The first error of a transfer, and what there is to do at its end.
type Outcome = (Option<IoError>, Option<(After, Transferred)>);

/// Collects the parts of one transfer.
struct Join {
    left: AtomicUsize,
    outcome: Mutex<Outcome>,
    of: Arc<Bytes>,
}

impl Join {
    fn finish(&self, error: Option<IoError>) {
        if let Some(error) = error {
            self.outcome.lock().unwrap_or_else(PoisonError::into_inner).0.get_or_insert(error);
        }
        if self.left.fetch_sub(1, Ordering::AcqRel) != 1 {
            return;
        }
        let (error, end) = {
            let mut outcome = self.outcome.lock().unwrap_or_else(PoisonError::into_inner);
            (outcome.0.take(), outcome.1.take())
        };
        let (after, done) = end.expect("the last part finishes once");
        // The buffer goes with it, so that who waited finds it free.
        let compared = after.ended(&self.of, error.is_none());
        done(match error {
            None => compared,
            Some(source) => Err(StoreError::Tensor { tensor: self.of.name.to_string(), source }),
        });
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::os::unix::fs::FileExt;
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
            let id = first.create_tensor(&format!("tensor {seed}"), bytes).unwrap();
            fill(&first, first.current(id), seed);
        }
        assert_eq!(first.commit("the state").unwrap(), 1);
        drop(first);
        let error = Store::create(&directories[1..2], &StoreOptions::default()).err().unwrap();
        assert!(error.to_string().contains("memascend.resume"), "{error}");
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
        let store = open(&directories);
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
        // What a snapshot has is not overwritten.
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
        let damage = Damage {
            tensor: "weights".into(),
            offset: 3 << 20,
            bytes: 1 << 20,
            places: vec![(path, 1 << 20)],
        };
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
        // A volume that cannot grow: what its limit would be on a device.
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

    #[test]
    fn a_directory_given_twice_is_refused() {
        let root = tempfile::tempdir().unwrap();
        let directory = root.path().to_owned();
        let error = Store::create(&[directory.clone(), directory], &StoreOptions::default()).err().unwrap();
        assert!(matches!(error, StoreError::Duplicate { .. }), "{error}");
    }
}
