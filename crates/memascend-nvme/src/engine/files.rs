//! Transfers between the caller's memory and any files: one ring, or a few threads, for all of them.
//!
//! A [`Volume`](crate::Volume) is one file that memascend made. Another program's files (DeepSpeed's
//! swap files) are many, lie anywhere, and are read and written at any offset.

use std::collections::HashMap;
use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use memascend_mem::{LeaseSlice, LockExt, Origin, PAGE_BYTES};

use crate::engine::ring::Ring;
use crate::engine::threads::Threads;
use crate::error::file_error;
use crate::volume::file::MADE_SHORTER;
use crate::{
    Completion, EngineChoice, EngineOptions, Geometry, IoError, Operation, Request, Result, ThreadsEngine,
    VolumeFile,
};

/// Called once, on an engine thread, when a transfer has ended. It must be short and must never wait.
pub type OnEnd = Box<dyn FnOnce(Result<()>) + Send>;

/// Files that stay open for the next transfer. Each takes up to two descriptors, and a process often has no
/// more than 1,024.
const OPEN_FILES: usize = 192;

/// Moves bytes between the caller's memory and any files, at any offset and of any length.
///
/// Whole pages that lie in the file as they lie in memory bypass the page cache (O_DIRECT), where the
/// filesystem allows it. The remainder at either end, and unaligned transfers, go through the page cache. The
/// two never share a page of a file: a page in the cache that is written back later would undo a direct
/// write.
pub struct FileEngine {
    carrier: Carrier,
    files: Mutex<OpenFiles>,
    notice: Option<String>,
    origin: Origin,
}

enum Carrier {
    Ring(Ring),
    Threads(Threads),
}

#[derive(Default)]
struct OpenFiles {
    by_path: HashMap<PathBuf, Opened>,
    /// Counts uses.
    clock: u64,
}

/// An open file.
struct Opened {
    device_and_inode: (u64, u64),
    writable: bool,
    direct: Option<Arc<VolumeFile>>,
    buffered: OnceLock<Arc<VolumeFile>>,
    /// The largest length that it was seen to have.
    longest: u64,
    used: u64,
}

/// The descriptors and limits that a transfer needs of a file.
struct Descriptors {
    direct: Option<Arc<VolumeFile>>,
    buffered: Option<Arc<VolumeFile>>,
}

/// The parts of one transfer: each on the descriptor that suits it.
#[derive(Debug, PartialEq, Eq)]
struct Cut {
    /// Bytes before the pages that move directly, and bytes of these pages.
    before: usize,
    pages: usize,
}

impl Cut {
    /// Cuts `bytes` bytes between `address` and `offset`.
    fn of(offset: u64, address: usize, bytes: usize, geometry: Option<Geometry>) -> Self {
        let none = Self { before: bytes, pages: 0 };
        let Some(geometry) = geometry else { return none };
        let page = PAGE_BYTES as u64;
        let before = (offset.next_multiple_of(page) - offset) as usize;
        if before >= bytes || !(address + before).is_multiple_of(geometry.memory_bytes) {
            return none;
        }
        match (bytes - before) / PAGE_BYTES * PAGE_BYTES {
            0 => none,
            pages => Self { before, pages },
        }
    }
}

impl FileEngine {
    /// Starts the engine: a ring where the system allows it, else threads, unless `options` names one.
    ///
    /// # Errors
    /// If the ring that was asked for is refused, or no thread can be started.
    pub fn new(options: EngineOptions) -> Result<Self> {
        let threads = || Threads::new(ThreadsEngine::DEFAULT_THREADS).map(Carrier::Threads);
        let mut notice = None;
        let carrier = match options.choice {
            EngineChoice::Threads => threads()?,
            EngineChoice::Ring => Carrier::Ring(Ring::new(None, options)?),
            _ => match Ring::new(None, options) {
                Ok(ring) => Carrier::Ring(ring),
                Err(error @ IoError::RingUnavailable { .. }) => {
                    notice = Some(format!(
                        "{error}; using {} I/O threads instead",
                        ThreadsEngine::DEFAULT_THREADS
                    ));
                    threads()?
                }
                Err(error) => return Err(error),
            },
        };
        Ok(Self { carrier, files: Mutex::default(), notice, origin: Origin::here() })
    }

    /// `ring` or `threads`.
    pub fn name(&self) -> &'static str {
        match self.carrier {
            Carrier::Ring(_) => "ring",
            Carrier::Threads(_) => "threads",
        }
    }

    /// Why it is not a ring.
    pub fn notice(&self) -> Option<&str> {
        self.notice.as_deref()
    }

    /// Starts to transfer between `memory` and byte `offset` of the file at `path`. Calls `on_end` once,
    /// perhaps before this returns. Transfers end in any order.
    ///
    /// A write makes the file, and makes it longer, where that is needed; room for it is allocated first,
    /// so that a full drive is an error here. A read of bytes that the file does not have is an error.
    pub fn submit(&self, operation: Operation, path: &Path, offset: u64, memory: &LeaseSlice, on_end: OnEnd) {
        let (bytes, address) = (memory.bytes(), memory.address().addr().get());
        if !self.origin.is_here() {
            // The child has no thread that would carry it out.
            return on_end(Err(IoError::Closed));
        }
        if bytes == 0 {
            return on_end(Ok(()));
        }
        let transfer = (operation, offset, bytes);
        let (files, cut) = match self.descriptors(path, transfer, address) {
            Ok(found) => found,
            Err(error) => return on_end(Err(error)),
        };
        let after = bytes - cut.before - cut.pages;
        let (direct, buffered) = (files.direct.as_ref(), files.buffered.as_ref());
        let parts = [
            (buffered, 0, cut.before),
            (direct, cut.before, cut.pages),
            (buffered, cut.before + cut.pages, after),
        ];
        let parts = parts.into_iter().filter(|(.., bytes)| *bytes > 0);
        let parts: Vec<_> =
            parts.map(|(file, start, bytes)| (file.expect("is open"), start, bytes)).collect();
        let end =
            Arc::new(End { left: AtomicUsize::new(parts.len()), state: Mutex::new(Some((Ok(()), on_end))) });
        for (file, start, bytes) in parts {
            let end = Arc::clone(&end);
            let request = Request {
                operation,
                offset: offset + start as u64,
                buffer: memory.narrow(start, bytes),
                on_complete: Box::new(move |Completion { buffer, result }| {
                    drop(buffer);
                    end.part(result);
                }),
            };
            match &self.carrier {
                Carrier::Ring(ring) => ring.submit(file, request),
                Carrier::Threads(threads) => threads.submit(file, request),
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, OpenFiles> {
        self.files.locked()
    }

    /// The file, open, with room for a write, and how the transfer is cut.
    fn descriptors(
        &self,
        path: &Path,
        (operation, offset, bytes): (Operation, u64, usize),
        address: usize,
    ) -> Result<(Descriptors, Cut)> {
        let mut files = self.lock();
        let writes = operation == Operation::Write;
        let found = std::fs::metadata(path);
        let end = offset.saturating_add(bytes as u64);
        let known = files.by_path.get(path).is_some_and(|opened| {
            let same = found.as_ref().is_ok_and(|found| opened.device_and_inode == device_and_inode(found));
            same && (opened.writable || !writes)
        });
        if !known {
            files.by_path.remove(path);
            files.make_room();
            let opened = Opened::open(path, writes)?;
            files.by_path.insert(path.to_owned(), opened);
        }
        files.clock += 1;
        let clock = files.clock;
        let opened = files.by_path.get_mut(path).expect("was just opened");
        opened.used = clock;
        let length = match found {
            Ok(found) if known => found.len(),
            _ => opened.any().length()?,
        };
        let failed = |errno: i32, hint: &'static str| IoError::Transfer {
            operation,
            path: path.to_owned(),
            offset,
            bytes,
            source: io::Error::from_raw_os_error(errno),
            hint,
        };
        if !writes && end > length {
            let hint = if length < opened.longest { MADE_SHORTER } else { TOO_SHORT };
            return Err(failed(libc::EIO, hint));
        }
        if writes && length < opened.longest && offset > length {
            return Err(failed(libc::EIO, MADE_SHORTER));
        }
        if writes && end > length {
            allocate(opened.any(), length, end)?;
        }
        opened.longest = length.max(if writes { end } else { 0 });
        let cut = Cut::of(offset, address, bytes, opened.direct.as_ref().map(|file| file.geometry()));
        let all_direct = cut.before == 0 && cut.pages == bytes;
        let buffered = if all_direct { None } else { Some(opened.buffered()?) };
        Ok((Descriptors { direct: opened.direct.clone(), buffered }, cut))
    }
}

const TOO_SHORT: &str = "the file is shorter: it was cut off, or written by another run; remove it and start again from a checkpoint";

impl OpenFiles {
    /// Closes the files that were used least recently. Transfers under way keep theirs open.
    fn make_room(&mut self) {
        while self.by_path.len() >= OPEN_FILES {
            let oldest = self.by_path.iter().min_by_key(|(_, opened)| opened.used);
            let oldest = oldest.expect("there are some").0.clone();
            self.by_path.remove(&oldest);
        }
    }
}

impl Opened {
    fn open(path: &Path, writes: bool) -> Result<Self> {
        let (mut writable, mut opened) = (true, open(path, true, writes, libc::O_DIRECT));
        if !writes && opened.as_ref().is_err_and(|error| is_one_of(error, &[libc::EACCES, libc::EROFS])) {
            (writable, opened) = (false, open(path, false, false, libc::O_DIRECT));
        }
        let action = if writes { "create" } else { "open" };
        let failed = |source| file_error(action, path, source);
        let direct = match opened {
            Ok(file) => Geometry::direct(&file)
                .filter(|geometry| geometry.block_bytes <= PAGE_BYTES)
                .map(|geometry| Arc::new(VolumeFile::opened(file, path, geometry))),
            Err(error) if is_one_of(&error, &[libc::EINVAL]) => None,
            Err(error) => return Err(failed(error)),
        };
        let mut new = Self {
            device_and_inode: (0, 0),
            writable,
            direct,
            buffered: OnceLock::new(),
            longest: 0,
            used: 0,
        };
        if new.direct.is_none() {
            let file = open(path, writable, writes, 0).map_err(failed)?;
            let file = Arc::new(VolumeFile::opened(file, path, Geometry::buffered()));
            let _ = new.buffered.set(file);
        }
        let metadata = new.any().metadata()?;
        new.device_and_inode = device_and_inode(&metadata);
        new.longest = metadata.len();
        Ok(new)
    }

    fn any(&self) -> &Arc<VolumeFile> {
        self.direct.as_ref().or_else(|| self.buffered.get()).expect("one is open")
    }

    /// The descriptor through the page cache, opened when it is first needed.
    fn buffered(&self) -> Result<Arc<VolumeFile>> {
        if let Some(file) = self.buffered.get() {
            return Ok(Arc::clone(file));
        }
        let direct = self.any();
        // By the descriptor: the path may name another file by now.
        let link = PathBuf::from(format!("/proc/self/fd/{}", direct.fd()));
        let file =
            open(&link, self.writable, false, 0).map_err(|error| file_error("open", direct.path(), error))?;
        // The bytes around an end of a transfer are moved directly, and must not be read into the cache.
        // SAFETY: a plain system call on an open descriptor.
        unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_RANDOM) };
        let file = Arc::new(VolumeFile::opened(file, direct.path(), Geometry::buffered()));
        Ok(Arc::clone(self.buffered.get_or_init(|| file)))
    }
}

fn is_one_of(error: &io::Error, numbers: &[i32]) -> bool {
    error.raw_os_error().is_some_and(|number| numbers.contains(&number))
}

fn device_and_inode(metadata: &Metadata) -> (u64, u64) {
    (metadata.dev(), metadata.ino())
}

fn open(path: &Path, write: bool, create: bool, flags: i32) -> io::Result<File> {
    OpenOptions::new().read(true).write(write).create(create).custom_flags(flags).open(path)
}

/// Allocates the bytes from `length` to `end`, so that they can be written side by side and a drive
/// that is full is noticed before anything is written.
fn allocate(file: &VolumeFile, length: u64, end: u64) -> Result<()> {
    let failed = |source| file_error("allocate room for", file.path(), source);
    let signed = |value| i64::try_from(value).map_err(|_| failed(io::Error::from_raw_os_error(libc::EFBIG)));
    let (from, more) = (signed(length)?, signed(end - length)?);
    loop {
        // SAFETY: a plain system call on an open descriptor.
        if unsafe { libc::fallocate(file.fd(), 0, from, more) } == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::EINTR) => {}
            // Writes allocate.
            Some(libc::EOPNOTSUPP) => return Ok(()),
            _ => return Err(failed(error)),
        }
    }
}

/// Calls back after the last part.
struct End {
    left: AtomicUsize,
    /// The first failure, if there is one.
    state: Mutex<Option<(Result<()>, OnEnd)>>,
}

impl End {
    fn part(&self, result: Result<()>) {
        let mut state = self.state.locked();
        if let (Err(error), Some((outcome @ Ok(()), _))) = (result, state.as_mut()) {
            *outcome = Err(error);
        }
        if self.left.fetch_sub(1, Ordering::AcqRel) == 1 {
            let (outcome, on_end) = state.take().expect("ends once");
            drop(state);
            on_end(outcome);
        }
    }
}

#[cfg(test)]
mod tests;
