//! A store: its options, its creation, and its reports of volumes.

use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard};

use memascend_mem::{LockExt, Pool};
use memascend_nvme::{CountersSnapshot, EngineOptions, IoError, NoteKeeper, Recorder, Volume, open_engine};

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
    /// Bytes per second of each volume, which decide on its share of every tensor; empty for equal
    /// shares.
    pub rates: Vec<f64>,
    /// Compare reads with the checksums of writes.
    pub checksums: bool,
    /// Overwrite tensors where they are: half the room, but a generation is gone with the first
    /// rewrite after it.
    pub in_place: bool,
    /// Delete the store of an earlier run that is there, where a store is created.
    pub replace: bool,
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self {
            engine: EngineOptions::default(),
            direct: true,
            rates: Vec::new(),
            checksums: true,
            in_place: false,
            replace: false,
        }
    }
}

/// The tensors of one run on one or more volumes. Files are removed on drop unless something was
/// committed.
pub struct Store {
    pub(crate) members: Vec<Member>,
    pub(crate) map: Arc<Map>,
    pub(crate) id: StoreId,
    pub(crate) table: Mutex<Table>,
    /// Held while a manifest is written, so that manifests are written one at a time.
    pub(crate) writer: Mutex<()>,
    /// Sequence number of the last manifest that was written, or whose writing failed.
    pub(crate) sequence: AtomicU64,
    pub(crate) checksums: bool,
    pub(crate) in_place: bool,
    pub(crate) notices: Vec<String>,
    /// Files with damaged manifests.
    pub(crate) damaged_manifests: Vec<PathBuf>,
    /// Whether the manifest before a damaged one was taken.
    pub(crate) is_older: bool,
}

/// How one volume of a store works on this machine.
#[derive(Debug, Clone)]
pub struct VolumeReport {
    /// The path given.
    pub path: PathBuf,
    /// Name of its engine.
    pub engine: &'static str,
    /// Optional features of the kernel that the engine uses.
    pub features: Vec<String>,
    /// Whether transfers bypass the page cache.
    pub direct: bool,
    /// Its share of the stripes.
    pub share: f64,
    /// Transfers so far.
    pub counters: CountersSnapshot,
    /// Bytes of data that a device can hold; None for a directory.
    pub capacity_bytes: Option<u64>,
    /// Bytes that could still be reserved; None if the system does not say.
    pub free_bytes: Option<u64>,
    /// Bytes that the store has reserved.
    pub reserved_bytes: u64,
}

impl Store {
    /// Creates an empty store on `paths`: directories, which are made if missing, and formatted
    /// devices. The remains of a killed run are overwritten; a store with a commit is refused,
    /// unless it is to be replaced. It goes once all volumes are locked for this process.
    pub fn create(paths: &[PathBuf], options: &StoreOptions) -> Result<Self> {
        Self::create_with(paths, options, &|file| open_engine(file, options.engine))
    }

    /// As [`Store::create`], with engines that the caller opens.
    pub fn create_with(paths: &[PathBuf], options: &StoreOptions, open: OpenEngine<'_>) -> Result<Self> {
        let mut seen = Vec::new();
        let mut volumes = Vec::new();
        let make = if options.replace { Volume::take } else { Volume::create };
        for path in paths {
            volumes.push(make(path, options.direct).map_err(|error| {
                // This call holds its lock: report the duplicate path instead of a volume in use.
                let twice = path.canonicalize().is_ok_and(|path| seen.contains(&path));
                if twice { StoreError::Duplicate { path: path.clone() } } else { error.into() }
            })?);
            seen.extend(path.canonicalize().ok());
        }
        if options.replace {
            // First all manifests: one that is left after a crash must not name data that is gone.
            for volume in &volumes {
                if volume.read_note()?.is_some() {
                    volume.clear_note()?;
                }
            }
            volumes.iter().try_for_each(Volume::empty)?;
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
            // One notice is enough: a system that refuses io_uring refuses it for every volume.
            notices.extend(notice.filter(|notice| !notices.contains(notice)));
            members.push(member);
        }
        Self::of(members, layout, id, options, notices)
    }

    /// Puts a store together from opened volumes, its table empty.
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
        // An engine that moves no bytes reads other bytes than were written: there is nothing to
        // compare.
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
            damaged_manifests: Vec::new(),
            is_older: false,
        })
    }

    /// Registers an arena with the engines, which makes transfers of its buffers cheaper.
    pub fn register(&self, pool: &Pool) {
        self.members.iter().for_each(|member| member.engine.register(pool));
    }

    /// Has the drives keep room for all bytes of the volumes' files: a copy of one may lack blocks that
    /// were zeros.
    pub fn fill_holes(&self) -> Result<()> {
        self.members.iter().try_for_each(|member| Ok(member.volume.fill_holes()?))
    }

    /// Flushes every volume: every write that has ended is durable when this returns. Once a flush
    /// of a volume has failed, all later ones fail too.
    pub fn sync(&self) -> Result<()> {
        self.on_all(|_, member| member.flush())
    }

    /// Runs `work` for every volume at once, with its index; returns the first error.
    pub(crate) fn on_all(&self, work: impl Fn(usize, &Member) -> Result<()> + Sync) -> Result<()> {
        let [first, others @ ..] = &self.members[..] else { return Ok(()) };
        std::thread::scope(|scope| {
            let work = &work;
            let begin = |(index, member)| {
                let run = move || work(index + 1, member);
                // Where the system starts no thread, one volume comes after the other.
                std::thread::Builder::new().spawn_scoped(scope, run).map_err(|_| run())
            };
            let others: Vec<_> = others.iter().enumerate().map(begin).collect();
            let outcome = work(0, first);
            // All end before this returns, whatever fails.
            others.into_iter().fold(outcome, |outcome, other| {
                outcome.and(other.map_or_else(
                    |done| done,
                    |other| other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
                ))
            })
        })
    }

    /// Names and extents of the current values of all tensors and of all other allocations, in the
    /// order of their offsets.
    pub fn tensors(&self) -> Vec<(String, Extent)> {
        self.table().values()
    }

    /// Notices for the user, such as a refused O_DIRECT or a refused io_uring.
    pub fn notices(&self) -> &[String] {
        &self.notices
    }

    /// Files with manifests that were found damaged, and whether the manifest before was taken: the
    /// last commit is lost then.
    pub fn damaged_manifests(&self) -> (&[PathBuf], bool) {
        (&self.damaged_manifests, self.is_older)
    }

    /// How each volume works, and its counters.
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

    /// Recorder of the requests and flushes of each volume that has one.
    pub fn recorders(&self) -> impl Iterator<Item = (usize, &Recorder)> {
        let members = self.members.iter().enumerate();
        members.filter_map(|(index, member)| member.engine.recorder().map(|recorder| (index, recorder)))
    }

    /// Bytes in use by tensors.
    pub fn used_bytes(&self) -> u64 {
        let table = self.table();
        table.allocator.end() - table.allocator.free_bytes()
    }

    /// Locks the table.
    pub(crate) fn table(&self) -> MutexGuard<'_, Table> {
        self.table.locked()
    }
}

#[cfg(test)]
mod tests;
