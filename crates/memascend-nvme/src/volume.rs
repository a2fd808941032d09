//! Volumes: where a store's bytes lie, a directory with a preallocated file or a raw block device.

mod directory;
pub(crate) mod file;
mod folder;
pub(crate) mod geometry;
mod lock;
mod names;
pub(crate) mod notes;
#[cfg(test)]
mod tests;

use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use memascend_mem::{LockExt, Origin};

use crate::error::file_error;
use crate::unforked::Unforked;
use crate::volume::directory::{HeldDirectory, write_in_place};
use crate::volume::file::VolumeFile;
use crate::volume::lock::FileLock;
use crate::volume::names::name_of;
pub use crate::volume::names::path_of;
use crate::{BlockDeviceError, Device, FoundNote, Geometry, IoError, NoteKeeper, Result, find_device};

/// One directory with a preallocated file in it, or one raw block device formatted for memascend.
/// It is held exclusively. A directory's file is removed on drop unless [`Volume::keep`] was
/// called.
#[derive(Debug)]
pub struct Volume {
    path: PathBuf,
    kind: VolumeKind,
    file: Arc<VolumeFile>,
    direct: bool,
    notice: Option<String>,
    reserved_bytes: Mutex<u64>,
    keep: AtomicBool,
    origin: Origin,
    /// Of the file in a directory; a device is opened exclusively.
    lock: Option<FileLock>,
}

#[derive(Debug)]
enum VolumeKind {
    Directory(HeldDirectory),
    Device(Device),
}

impl Volume {
    /// Name of the preallocated file in a directory.
    pub const FILE_NAME: &'static str = "memascend.volume";
    /// Name of the file that marks a directory whose volume was kept.
    pub const NOTE_NAME: &'static str = "memascend.json";

    /// Makes an empty volume of `path`: a directory (made if missing), a block device or `UUID=…` of a
    /// device, which must have been formatted. The remains of a killed run are overwritten; a volume that was
    /// kept is refused.
    ///
    /// Transfers bypass the page cache (O_DIRECT) where that is possible and `direct` is wanted;
    /// [`Volume::notice`] says when it was refused.
    pub fn create(path: &Path, direct: bool) -> Result<Self> {
        let volume = Self::take(path, direct)?;
        if volume.read_note()?.is_some() {
            return Err(volume.kept_error());
        }
        volume.empty()?;
        Ok(volume)
    }

    /// As [`Volume::create`], for a volume with any content, which stays until [`Volume::empty`] is called.
    pub fn take(path: &Path, direct: bool) -> Result<Self> {
        let volume = Self::open_place(path, direct, true)?;
        // Until the volume is known to hold nothing that is wanted, an error must not remove the
        // file.
        volume.keep.store(true, Ordering::Release);
        Ok(volume)
    }

    /// Removes the data of a volume that has no note. Later writes go on drop, unless the volume is kept.
    pub fn empty(&self) -> Result<()> {
        self.keep.store(false, Ordering::Release);
        if let VolumeKind::Directory(_) = self.kind {
            let file = &self.file;
            file.file.set_len(0).map_err(|source| file_error("empty", &file.path, source))?;
            write_in_place(&file.file);
        }
        Ok(())
    }

    /// Opens a volume that was kept, for reading and writing. [`Volume::read_note`] returns its
    /// note.
    pub fn open(path: &Path, direct: bool) -> Result<Self> {
        let volume = Self::attach(path, direct)?;
        if volume.read_note()?.is_none() {
            return Err(IoError::not_kept(path));
        }
        Ok(volume)
    }

    /// As [`Volume::open`], also where there is no note: the volume may belong to a store whose
    /// note is on another one.
    pub fn attach(path: &Path, direct: bool) -> Result<Self> {
        let volume = Self::open_place(path, direct, false)?;
        volume.keep.store(true, Ordering::Release);
        Ok(volume)
    }

    fn open_place(path: &Path, direct: bool, create: bool) -> Result<Self> {
        let is_device = path.as_os_str().as_bytes().starts_with(b"UUID=")
            || std::fs::metadata(path).is_ok_and(|metadata| metadata.file_type().is_block_device());
        if is_device { Self::open_device(path) } else { Self::open_directory(path, direct, create) }
    }

    fn open_directory(given: &Path, direct: bool, create: bool) -> Result<Self> {
        let held = HeldDirectory::take(given, create)?;
        let opened = held.open_file(direct, create)?;
        let notice = (direct && !opened.is_direct).then(|| {
            format!(
                "the filesystem of {} refuses O_DIRECT: using buffered I/O, slower and with the page cache on top",
                held.path().display()
            )
        });
        let reserved = if create { 0 } else { opened.file.metadata().map_or(0, |metadata| metadata.len()) };
        let file = VolumeFile {
            _unforked: Unforked::of(&opened.file),
            file: opened.file,
            path: opened.path,
            geometry: opened.geometry,
            base: 0,
            data_bytes: None,
            least_bytes: AtomicU64::new(reserved),
            read_only: opened.is_read_only,
        };
        let kind = VolumeKind::Directory(held);
        let mut volume = Self::of(given, kind, file, opened.is_direct, notice, reserved);
        volume.lock = Some(opened.lock);
        Ok(volume)
    }

    fn open_device(path: &Path) -> Result<Self> {
        let device = Device::open(path)?;
        let file = device.file().try_clone().map_err(|source| file_error("open", device.path(), source))?;
        let block_bytes = device.logical_block_bytes() as usize;
        let geometry = Geometry::direct(&file).unwrap_or(Geometry {
            block_bytes,
            memory_bytes: block_bytes,
            ..Geometry::buffered()
        });
        let file = VolumeFile {
            _unforked: Unforked::of(&file),
            file,
            path: device.path().to_owned(),
            geometry,
            base: device.data_offset(),
            data_bytes: Some(device.data_bytes()),
            least_bytes: AtomicU64::new(0),
            read_only: false,
        };
        let notice = device.notice().map(str::to_owned);
        Ok(Self::of(path, VolumeKind::Device(device), file, true, notice, 0))
    }

    fn of(
        path: &Path,
        kind: VolumeKind,
        file: VolumeFile,
        direct: bool,
        notice: Option<String>,
        reserved: u64,
    ) -> Self {
        Self {
            path: path.to_owned(),
            kind,
            file: Arc::new(file),
            direct,
            notice,
            reserved_bytes: Mutex::new(reserved),
            keep: AtomicBool::new(false),
            origin: Origin::here(),
            lock: None,
        }
    }

    /// The file or device to transfer on.
    pub fn file(&self) -> &Arc<VolumeFile> {
        &self.file
    }

    /// The path given: a directory, a device, or `UUID=…`.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A name that finds the volume again, by [`path_of`]: `UUID=…` for a device, the absolute path
    /// for a directory, in hexadecimal digits behind `BYTES=` if the path is not UTF-8.
    pub fn identity(&self) -> String {
        match &self.kind {
            VolumeKind::Device(device) => format!("UUID={}", device.id()),
            VolumeKind::Directory(directory) => {
                let path = directory.path();
                name_of(&path.canonicalize().unwrap_or_else(|_| path.to_owned()))
            }
        }
    }

    /// Refuses a device if a clone with the same identity is attached.
    pub fn refuse_clone(&self) -> Result<()> {
        let VolumeKind::Device(device) = &self.kind else { return Ok(()) };
        match find_device(device.id()) {
            Err(error @ BlockDeviceError::Clone { .. }) => Err(error.into()),
            // Whatever else is wrong was found when the device was opened.
            _ => Ok(()),
        }
    }

    /// Whether transfers bypass the page cache.
    pub fn is_direct(&self) -> bool {
        self.direct
    }

    /// Whether it lies on a filesystem that is mounted read-only, and is for reading alone.
    pub fn is_read_only(&self) -> bool {
        self.file.read_only
    }

    /// A notice about this volume for the user, if any.
    pub fn notice(&self) -> Option<&str> {
        self.notice.as_deref()
    }

    /// How many bytes of data the volume can hold: a device's data area. `None` for a directory,
    /// whose file grows.
    pub fn capacity(&self) -> Option<u64> {
        self.file.data_bytes
    }

    /// Reserves the first `bytes` bytes, with every block allocated, so that no later write runs
    /// out of space. Fails with [`IoError::NoSpace`] before changing anything if there is not
    /// enough space.
    pub fn reserve(&self, bytes: u64) -> Result<()> {
        let mut reserved = self.reserved_bytes.locked();
        if bytes <= *reserved {
            return Ok(());
        }
        if self.file.read_only {
            let source = io::Error::from_raw_os_error(libc::EROFS);
            return Err(file_error("write to", &self.file.path, source));
        }
        let needed_bytes = bytes - *reserved;
        let free_bytes = match self.file.data_bytes {
            Some(data) => data - *reserved,
            None => self.filesystem_free()?,
        };
        let no_space = || IoError::NoSpace { path: self.path.clone(), needed_bytes, free_bytes };
        if needed_bytes > free_bytes {
            return Err(no_space());
        }
        if self.file.data_bytes.is_none() {
            self.preallocate(*reserved, needed_bytes, &no_space)?;
            self.file.least_bytes.store(bytes, Ordering::Release);
        }
        *reserved = bytes;
        Ok(())
    }

    /// Allocates the blocks that a copied file lacks: copying leaves out zeros, and a write there
    /// could find no space.
    pub fn fill_holes(&self) -> Result<()> {
        let (VolumeKind::Directory(_), false) = (&self.kind, self.file.read_only) else { return Ok(()) };
        let metadata = self.file.metadata()?;
        let needed_bytes = metadata.len().saturating_sub(metadata.blocks() * 512);
        if needed_bytes == 0 {
            return Ok(());
        }
        let free_bytes = self.filesystem_free()?;
        let no_space = || IoError::NoSpace { path: self.path.clone(), needed_bytes, free_bytes };
        self.preallocate(0, metadata.len(), &no_space)
    }

    fn preallocate(&self, offset: u64, bytes: u64, no_space: &dyn Fn() -> IoError) -> Result<()> {
        let file = &self.file;
        let signed = |value: u64| i64::try_from(value).expect("a volume is smaller than 8 EiB");
        loop {
            // SAFETY: a plain system call on a descriptor that self owns.
            if unsafe { libc::fallocate(file.fd(), 0, signed(offset), signed(bytes)) } == 0 {
                return Ok(());
            }
            let source = io::Error::last_os_error();
            match source.raw_os_error() {
                Some(libc::EINTR) => continue,
                Some(libc::ENOSPC) => return Err(no_space()),
                // A filesystem without fallocate: only the length is set, and blocks are allocated
                // by writes.
                Some(libc::EOPNOTSUPP) => {
                    return file
                        .file
                        .set_len(offset + bytes)
                        .map_err(|source| file_error("extend", &file.path, source));
                }
                _ => return Err(file_error("preallocate", &file.path, source)),
            }
        }
    }

    /// Bytes reserved so far.
    pub fn reserved_bytes(&self) -> u64 {
        *self.reserved_bytes.locked()
    }

    /// Bytes that could still be reserved; `u64::MAX` where the filesystem does not report them.
    pub fn free_bytes(&self) -> Result<u64> {
        match self.file.data_bytes {
            Some(data) => Ok(data - self.reserved_bytes()),
            None => self.filesystem_free(),
        }
    }

    fn filesystem_free(&self) -> Result<u64> {
        let mut stat = std::mem::MaybeUninit::<libc::statvfs>::zeroed();
        // SAFETY: the descriptor is open and `stat` is writable.
        if unsafe { libc::fstatvfs(self.file.fd(), stat.as_mut_ptr()) } != 0 {
            return Err(file_error("measure the free space of", &self.path, io::Error::last_os_error()));
        }
        // SAFETY: statvfs succeeded and filled it.
        let stat = unsafe { stat.assume_init() };
        // A filesystem that counts no blocks (ramfs, some FUSE filesystems) does not report free
        // space.
        Ok(if stat.f_blocks == 0 { u64::MAX } else { stat.f_bavail * stat.f_frsize })
    }

    /// The note kept with the data: whole and durable, or `None`.
    pub fn read_note(&self) -> Result<Option<Vec<u8>>> {
        Ok(self.find_note()?.note)
    }

    /// Writes `note`, and keeps the data in place on drop.
    pub fn keep(&self, note: &[u8]) -> Result<()> {
        self.write_note(note)?;
        self.leave_in_place(true);
        Ok(())
    }

    /// Whether the data stays in place on drop.
    pub fn leave_in_place(&self, leave: bool) {
        self.keep.store(leave, Ordering::Release);
    }

    /// Undoes [`Volume::keep`]: removes the note, and the data on drop.
    ///
    /// # Errors
    /// If the note cannot be removed.
    pub fn forget(&self) -> Result<()> {
        self.leave_in_place(false);
        self.clear_note()
    }

    /// Checks that a manifest committed here will be found here.
    fn check_in_place(&self, directory: &HeldDirectory) -> Result<()> {
        if directory.is_in_place(&self.file.file) {
            return Ok(());
        }
        Err(IoError::Replaced { path: directory.path().to_owned() })
    }

    /// The error that refuses to overwrite the kept store on this volume.
    pub fn kept_error(&self) -> IoError {
        let remedy = match &self.kind {
            VolumeKind::Directory(_) => format!("delete {} and {} there", Self::NOTE_NAME, Self::FILE_NAME),
            VolumeKind::Device(device) => {
                let path = device.path().display();
                format!("empty it with `memascend format {path} --destroy {path}`")
            }
        };
        IoError::Kept { path: self.path.clone(), remedy }
    }
}

impl NoteKeeper for Volume {
    fn find_note(&self) -> Result<FoundNote> {
        match &self.kind {
            VolumeKind::Device(device) => Ok(device.find_note()?),
            VolumeKind::Directory(directory) => directory.notes().find(),
        }
    }

    fn limit_bytes(&self) -> u64 {
        match &self.kind {
            VolumeKind::Device(device) => device.note_limit_bytes(),
            VolumeKind::Directory(_) => notes::NOTE_BYTES_MAX,
        }
    }

    fn write_note(&self, note: &[u8]) -> Result<()> {
        match &self.kind {
            VolumeKind::Device(device) => Ok(device.write_note(note)?),
            VolumeKind::Directory(directory) => {
                self.check_in_place(directory)?;
                directory.notes().write(note)
            }
        }
    }

    fn clear_note(&self) -> Result<()> {
        match &self.kind {
            VolumeKind::Device(device) => Ok(device.clear_note()?),
            VolumeKind::Directory(directory) => {
                self.check_in_place(directory)?;
                directory.notes().clear()
            }
        }
    }

    fn find_note_before(&self) -> Option<Vec<u8>> {
        match &self.kind {
            // A device's slots have checksums of their own: the last whole one was found.
            VolumeKind::Device(_) => None,
            VolumeKind::Directory(directory) => directory.notes().find_before(),
        }
    }

    fn put_note_before_in_place(&self) -> Result<()> {
        match &self.kind {
            VolumeKind::Device(_) => Ok(()),
            VolumeKind::Directory(directory) => {
                self.check_in_place(directory)?;
                directory.notes().put_before_in_place()
            }
        }
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        // The files belong to the process that made them, not to a forked DataLoader worker.
        if !self.origin.is_here() {
            return;
        }
        if let VolumeKind::Directory(directory) = &self.kind
            && !self.keep.load(Ordering::Acquire)
        {
            // Files at the path of a directory that was moved or removed may be another run's.
            if directory.is_in_place(&self.file.file) {
                directory.remove_files();
            }
        }
    }
}
