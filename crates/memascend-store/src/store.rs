//! A store: its volumes, how they are opened, and what is said of them.

use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard};

use memascend_mem::{LockExt, Pool};
use memascend_nvme::{CountersSnapshot, EngineOptions, IoError, Volume, open_engine};

use crate::id::StoreId;
use crate::map::Map;
use crate::member::{Member, OpenEngine};
use crate::table::Table;
use crate::{Extent, Layout, Result, StoreError};

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
    pub(crate) checksums: bool,
    pub(crate) in_place: bool,
    pub(crate) notices: Vec<String>,
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
        self.table.locked()
    }
}

#[cfg(test)]
mod tests;
