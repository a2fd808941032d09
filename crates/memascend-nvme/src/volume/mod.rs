//! Volumes: where a store's bytes lie, a directory with a preallocated file or a raw block device.

pub(crate) mod geometry;
mod lock;

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, FileExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use memascend_mem::{LeaseSlice, LockExt, Origin};

use crate::volume::lock::DirectoryLock;
use crate::{BLOCK_BYTES, Device, FoundNote, Geometry, IoError, NoteKeeper, Result};

/// The open file or device of a volume, shared with the engine that transfers on it.
#[derive(Debug)]
pub struct VolumeFile {
    file: File,
    path: PathBuf,
    geometry: Geometry,
    /// Where the volume's data begins: behind the superblock of a device.
    base: u64,
    /// How many bytes of data a device has; None for a file, which grows.
    data_bytes: Option<u64>,
    /// How long a file is at least, unless somebody else makes it shorter.
    least_bytes: AtomicU64,
}

impl VolumeFile {
    /// The descriptor to transfer on.
    pub fn fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    /// The path, for messages.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What transfers have to look like.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Where byte `offset` of the volume's data lies in the file or device.
    pub fn position(&self, offset: u64) -> u64 {
        self.base + offset
    }

    /// Whether its drive can be polled for completions.
    pub(crate) fn polls(&self) -> bool {
        crate::volume::geometry::has_poll_queues(&self.file)
    }

    /// Waits until everything written is on the medium.
    pub fn sync(&self) -> Result<()> {
        self.file.sync_data().map_err(|source| file_error("sync", &self.path, source))
    }

    /// Whether the volume can carry out a transfer between `buffer` and `offset`; if not, an errno and why.
    pub(crate) fn check(
        &self,
        offset: u64,
        buffer: &LeaseSlice,
    ) -> std::result::Result<(), (i32, &'static str)> {
        let (bytes, address) = (buffer.bytes() as u64, buffer.address().as_ptr() as usize);
        let Geometry { block_bytes, memory_bytes, .. } = self.geometry;
        if bytes == 0 {
            return Err((libc::EINVAL, "a transfer of nothing"));
        }
        if !(offset | bytes).is_multiple_of(block_bytes as u64) {
            return Err((libc::EINVAL, "offset and length must be multiples of the drive's logical block"));
        }
        if !address.is_multiple_of(memory_bytes) {
            return Err((libc::EINVAL, "the buffer is not aligned as the drive asks for"));
        }
        let end = offset.checked_add(bytes).and_then(|end| end.checked_add(self.base));
        match (end, self.data_bytes) {
            (Some(end), Some(data)) if end > self.base + data => {
                return Err((libc::EINVAL, "it leaves the device's data area"));
            }
            (Some(end), _) if i64::try_from(end).is_ok() => {}
            _ => return Err((libc::EFBIG, "the offset is beyond what files can have")),
        }
        Ok(())
    }

    /// Whether the file is still as long as it was made. A read behind the end fails; but a write there would make the file
    /// long again, and what lies between would read as zeros from then on: so every write asks first.
    pub(crate) fn check_length(&self) -> io::Result<()> {
        let least_bytes = self.least_bytes.load(Ordering::Acquire);
        if least_bytes > 0 && self.file.metadata()?.len() < least_bytes {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(())
    }
}

/// What is wrong when a file ends before its time.
pub(crate) const MADE_SHORTER: &str = "the file or device was made shorter by somebody else while in use";

/// One directory with a preallocated file in it, or one raw block device formatted for memascend. It is held
/// exclusively. A directory's file is removed on drop unless [`Volume::keep`] was called.
#[derive(Debug)]
pub struct Volume {
    path: PathBuf,
    place: Place,
    file: Arc<VolumeFile>,
    direct: bool,
    notice: Option<String>,
    reserved_bytes: Mutex<u64>,
    keep: AtomicBool,
    origin: Origin,
}

#[derive(Debug)]
enum Place {
    Directory {
        directory: PathBuf,
        lock: DirectoryLock,
        /// Did not exist before: removed with the files when nothing else lies in it.
        made: bool,
    },
    Device(Device),
}

/// Undoes what was made of a directory when its volume cannot be.
struct Making {
    directory: PathBuf,
    made: bool,
    lock: Option<DirectoryLock>,
}

impl Drop for Making {
    fn drop(&mut self) {
        if let Some(lock) = &self.lock {
            lock.remove_file();
        }
        if self.made {
            let _ = std::fs::remove_dir(&self.directory);
        }
    }
}

impl Volume {
    /// Name of the preallocated file in a directory.
    pub const FILE_NAME: &'static str = "memascend.volume";
    /// Name of the file that marks a directory whose volume was kept.
    pub const NOTE_NAME: &'static str = "memascend.json";

    /// Makes an empty volume of `path`: a directory (made if missing), a block device or `UUID=…` of a device, which must
    /// have been formatted. What a killed run left there is overwritten; a volume that was kept is refused.
    ///
    /// Transfers bypass the page cache (O_DIRECT) where that is possible and `direct` is wanted; [`Volume::notice`] says
    /// when it was refused.
    pub fn create(path: &Path, direct: bool) -> Result<Self> {
        let volume = Self::open_place(path, direct, true)?;
        // Until it is known not to be somebody else's, it is not ours to remove.
        volume.keep.store(true, Ordering::Release);
        if volume.read_note()?.is_some() {
            return Err(volume.kept_error());
        }
        volume.keep.store(false, Ordering::Release);
        if let Place::Directory { .. } = volume.place {
            let file = &volume.file;
            file.file.set_len(0).map_err(|source| file_error("empty", &file.path, source))?;
            write_in_place(&file.file);
        }
        Ok(volume)
    }

    /// Opens a volume that was kept, for reading and writing; its note is [`Volume::read_note`]'s.
    pub fn open(path: &Path, direct: bool) -> Result<Self> {
        let volume = Self::attach(path, direct)?;
        if volume.read_note()?.is_none() {
            return Err(IoError::NotKept { path: path.to_owned() });
        }
        Ok(volume)
    }

    /// As [`Volume::open`], also where there is no note: the volume may belong to a store whose note is on another one.
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
        let failed = |action| move |source| IoError::Directory { action, path: given.to_owned(), source };
        // The process may go elsewhere before the volume is closed.
        let directory = &std::path::absolute(given).map_err(failed("find"))?;
        let mut making = Making { directory: directory.to_owned(), made: false, lock: None };
        if create && !directory.exists() {
            // Only the last part of the path: a missing parent is a typing error or a drive not mounted.
            std::fs::DirBuilder::new().mode(0o700).create(directory).map_err(failed("create"))?;
            making.made = true;
            // What is committed there is not to be lost with the directory's name; but one may write where one may not read.
            let _ = directory.parent().map(|above| File::open(above).and_then(|above| above.sync_all()));
        }
        if !create && !directory.join(Self::FILE_NAME).exists() {
            return Err(IoError::NotKept { path: given.to_owned() });
        }
        making.lock = Some(DirectoryLock::take(directory)?);
        let path = directory.join(Self::FILE_NAME);
        let open = |flags: i32| {
            let mut options = OpenOptions::new();
            // Nobody may have put a link to another file in our place.
            let flags = flags | libc::O_NOFOLLOW;
            options.read(true).write(true).create(create).mode(0o600).custom_flags(flags).open(&path)
        };
        let action = if create { "create" } else { "open" };
        let mut found = None;
        if direct {
            match open(libc::O_DIRECT) {
                Ok(file) => found = Geometry::direct(&file).map(|geometry| (file, geometry)),
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
                Err(source) => return Err(file_error(action, &path, source)),
            }
            // Extents are multiples of no more.
            found = found.filter(|(_, geometry)| geometry.block_bytes <= BLOCK_BYTES);
        }
        let is_direct = found.is_some();
        let (file, geometry) = match found {
            Some(found) => found,
            None => (open(0).map_err(|source| file_error(action, &path, source))?, Geometry::buffered()),
        };
        let notice = (direct && !is_direct).then(|| {
            format!(
                "the filesystem of {} refuses O_DIRECT: using buffered I/O, slower and with the page cache on top",
                directory.display()
            )
        });
        let reserved = if create { 0 } else { file.metadata().map_or(0, |metadata| metadata.len()) };
        let place = Place::Directory {
            directory: directory.to_owned(),
            lock: making.lock.take().expect("taken above"),
            made: std::mem::take(&mut making.made),
        };
        let least_bytes = AtomicU64::new(reserved);
        let file = VolumeFile { file, path, geometry, base: 0, data_bytes: None, least_bytes };
        Ok(Self::of(given, place, file, is_direct, notice, reserved))
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
            file,
            path: device.path().to_owned(),
            geometry,
            base: device.data_offset(),
            data_bytes: Some(device.data_bytes()),
            least_bytes: AtomicU64::new(0),
        };
        let notice = device.notice().map(str::to_owned);
        Ok(Self::of(path, Place::Device(device), file, true, notice, 0))
    }

    fn of(
        path: &Path,
        place: Place,
        file: VolumeFile,
        direct: bool,
        notice: Option<String>,
        reserved: u64,
    ) -> Self {
        Self {
            path: path.to_owned(),
            place,
            file: Arc::new(file),
            direct,
            notice,
            reserved_bytes: Mutex::new(reserved),
            keep: AtomicBool::new(false),
            origin: Origin::here(),
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

    /// What finds the volume again: the UUID of a device (`UUID=…`), the absolute path of a directory.
    pub fn identity(&self) -> String {
        match &self.place {
            Place::Device(device) => format!("UUID={}", device.id()),
            Place::Directory { directory, .. } => {
                directory.canonicalize().unwrap_or_else(|_| directory.clone()).display().to_string()
            }
        }
    }

    /// Whether transfers bypass the page cache.
    pub fn is_direct(&self) -> bool {
        self.direct
    }

    /// What the user should know about this volume.
    pub fn notice(&self) -> Option<&str> {
        self.notice.as_deref()
    }

    /// How many bytes of data it can ever hold: a device's size. None for a directory, whose filesystem has what it has.
    pub fn capacity(&self) -> Option<u64> {
        self.file.data_bytes
    }

    /// Has room for `bytes` bytes from the beginning, with every block allocated, so that no later write can run out of
    /// space. Fails with [`IoError::NoSpace`] before anything is changed when there is not the room.
    pub fn reserve(&self, bytes: u64) -> Result<()> {
        let mut reserved = self.reserved_bytes.locked();
        if bytes <= *reserved {
            return Ok(());
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
                // A filesystem without fallocate: the size alone is set, space is found when written.
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

    /// Bytes that could still be reserved; `u64::MAX` where nobody tells.
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
        // A filesystem that counts no blocks (ramfs, some FUSE ones) does not tell.
        Ok(if stat.f_blocks == 0 { u64::MAX } else { stat.f_bavail * stat.f_frsize })
    }

    /// The note left with the data, durable and whole or not there at all.
    pub fn read_note(&self) -> Result<Option<Vec<u8>>> {
        Ok(self.find_note()?.note)
    }

    /// Leaves `note` with the data, and leaves the data in place on drop.
    pub fn keep(&self, note: &[u8]) -> Result<()> {
        self.write_note(note)?;
        self.leave_in_place(true);
        Ok(())
    }

    /// Whether the data stays in place on drop.
    pub fn leave_in_place(&self, leave: bool) {
        self.keep.store(leave, Ordering::Release);
    }

    /// Takes back what [`Volume::keep`] did.
    ///
    /// # Errors
    /// If the note cannot be removed.
    pub fn forget(&self) -> Result<()> {
        self.leave_in_place(false);
        self.clear_note()
    }

    /// What says that a store is in the way.
    pub fn kept_error(&self) -> IoError {
        let remedy = match &self.place {
            Place::Directory { .. } => format!("delete {} and {} there", Self::NOTE_NAME, Self::FILE_NAME),
            Place::Device(device) => {
                let path = device.path().display();
                format!("empty it with `memascend format {path} --destroy {path}`")
            }
        };
        IoError::Kept { path: self.path.clone(), remedy }
    }
}

impl NoteKeeper for Volume {
    fn find_note(&self) -> Result<FoundNote> {
        match &self.place {
            Place::Device(device) => Ok(device.find_note()?),
            Place::Directory { directory, .. } => {
                let path = directory.join(Self::NOTE_NAME);
                let synced = |note| File::open(directory)?.sync_all().map(|()| note);
                match read_no_link(&path).and_then(synced) {
                    Ok(mut note) => {
                        // The room that it has beyond its end; no note ends in zeros.
                        note.truncate(note.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1));
                        Ok(FoundNote { note: Some(note), damaged: false })
                    }
                    Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(FoundNote::default()),
                    Err(source) => Err(file_error("read", &path, source)),
                }
            }
        }
    }

    fn write_note(&self, note: &[u8]) -> Result<()> {
        match &self.place {
            Place::Device(device) => Ok(device.write_note(note)?),
            Place::Directory { directory, .. } => write_whole(directory, Self::NOTE_NAME, note),
        }
    }

    fn clear_note(&self) -> Result<()> {
        match &self.place {
            Place::Device(device) => Ok(device.clear_note()?),
            Place::Directory { directory, .. } => {
                let path = directory.join(Self::NOTE_NAME);
                let _ = std::fs::remove_file(spare_of(directory, Self::NOTE_NAME));
                let removed = match std::fs::remove_file(&path) {
                    Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
                    removed => removed,
                };
                // Who takes a note back is about to change what it speaks of.
                removed
                    .and_then(|()| File::open(directory)?.sync_all())
                    .map_err(|source| file_error("remove", &path, source))
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
        let Place::Directory { directory, lock, made } = &self.place else { return };
        if !self.keep.load(Ordering::Acquire) {
            let _ = std::fs::remove_file(&self.file.path);
            let _ = std::fs::remove_file(spare_of(directory, Self::NOTE_NAME));
        }
        lock.remove_file();
        if *made {
            let _ = std::fs::remove_dir(directory);
        }
    }
}

/// The longest note that is read from a directory: far above what any store writes, and no danger to the memory.
const NOTE_BYTES_MAX: u64 = 256 << 20;

/// The contents of a note that is no symbolic link.
fn read_no_link(path: &Path) -> io::Result<Vec<u8>> {
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW).open(path)?;
    if file.metadata()?.len() > NOTE_BYTES_MAX {
        return Err(io::Error::from_raw_os_error(libc::EFBIG));
    }
    file.sync_all()?;
    let mut bytes = Vec::new();
    file.take(NOTE_BYTES_MAX).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Has a copy-on-write filesystem (Btrfs) overwrite the blocks of an empty file where they are: else room for them that was
/// allocated beforehand does not help when the drive is full. Others refuse it, and need not be asked.
fn write_in_place(file: &File) {
    const FS_NOCOW_FL: libc::c_int = 0x0080_0000;
    let mut flags: libc::c_int = 0;
    // SAFETY: the first request writes an int, the second reads one; both get a live one.
    unsafe {
        if libc::ioctl(file.as_raw_fd(), libc::FS_IOC_GETFLAGS, &raw mut flags) == 0 {
            flags |= FS_NOCOW_FL;
            libc::ioctl(file.as_raw_fd(), libc::FS_IOC_SETFLAGS, &raw const flags);
        }
    }
}

/// Writes a file that appears whole and durably, or not at all, with zeros behind it.
///
/// Two files take it by turns: the one that is written is not the one that is there, and has its blocks already. So a note
/// that is about as long as the one before can be written when the filesystem is full.
fn write_whole(directory: &Path, name: &str, bytes: &[u8]) -> Result<()> {
    let (path, spare) = (directory.join(name), spare_of(directory, name));
    let write = || {
        let length = fill_spare(&spare, bytes, 0)?;
        if exchange(&spare, &path).is_err() {
            // There was none before, or the filesystem cannot.
            std::fs::rename(&spare, &path)?;
            // The next one's room, as long as there is some; without, the next write says so.
            let _ = fill_spare(&spare, &[], length);
        }
        File::open(directory)?.sync_all()
    };
    write().map_err(|source| file_error("write", &path, source))
}

fn spare_of(directory: &Path, name: &str) -> PathBuf {
    directory.join(format!("{name}.new"))
}

/// Writes `bytes` and zeros, over all that the file has, and `least` bytes at least; returns how long it is then.
fn fill_spare(spare: &Path, bytes: &[u8], least: u64) -> io::Result<u64> {
    let open = || {
        let mut options = OpenOptions::new();
        options
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW)
            .open(spare)
    };
    let file = match open() {
        // Somebody's link, which is in the way and not followed.
        Err(error) if error.raw_os_error() == Some(libc::ELOOP) => {
            std::fs::remove_file(spare)?;
            open()?
        }
        opened => opened?,
    };
    let had = file.metadata()?.len();
    if had == 0 {
        write_in_place(&file);
    }
    // A little more than it takes: the next one may be longer.
    let wanted = (bytes.len() as u64 + bytes.len() as u64 / 8).next_multiple_of(4 * BLOCK_BYTES as u64);
    let length = if bytes.len() as u64 <= had { had } else { wanted }.max(least);
    let mut padded = bytes.to_vec();
    padded.resize(usize::try_from(length).expect("a note fits into memory"), 0);
    file.write_all_at(&padded, 0)?;
    file.sync_all()?;
    Ok(length)
}

/// Has two files change their names, in one go.
fn exchange(one: &Path, other: &Path) -> io::Result<()> {
    let path = |path: &Path| std::ffi::CString::new(path.as_os_str().as_bytes()).map_err(io::Error::other);
    let (one, other) = (path(one)?, path(other)?);
    // SAFETY: both are C strings that live through the call.
    let done = unsafe {
        libc::syscall(
            libc::SYS_renameat2,
            libc::AT_FDCWD,
            one.as_ptr(),
            libc::AT_FDCWD,
            other.as_ptr(),
            libc::RENAME_EXCHANGE,
        )
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn file_error(action: &'static str, path: &Path, source: io::Error) -> IoError {
    IoError::File { action, path: path.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reserving_more_than_the_disk_has_changes_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let volume = Volume::create(directory.path(), true).unwrap();
        volume.reserve(8192).unwrap();
        let error = volume.reserve(1 << 60).unwrap_err();
        assert!(matches!(error, IoError::NoSpace { .. }));
        assert_eq!(error.errno(), Some(libc::ENOSPC));
        assert_eq!(std::fs::metadata(volume.file().path()).unwrap().len(), 8192);
    }

    #[test]
    fn a_store_is_its_owners_alone() {
        use std::os::unix::fs::PermissionsExt;
        let root = tempfile::tempdir().unwrap();
        let directory = root.path().join("volume");
        let volume = Volume::create(&directory, true).unwrap();
        volume.keep(b"a note").unwrap();
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&directory), 0o700);
        let mut files = 0;
        for entry in std::fs::read_dir(&directory).unwrap() {
            let path = entry.unwrap().path();
            assert_eq!(mode(&path), 0o600, "{}", path.display());
            files += 1;
        }
        assert_eq!(files, 4, "data, lock, note and the room for the next");
    }

    /// Whoever can write to the directory could otherwise have any file of ours written over.
    #[test]
    fn links_in_the_place_of_its_files_are_not_followed() {
        let names = [Volume::FILE_NAME, "memascend.lock", Volume::NOTE_NAME];
        for (name, direct) in names.into_iter().flat_map(|name| [(name, false), (name, true)]) {
            let root = tempfile::tempdir().unwrap();
            let (victim, directory) = (root.path().join("victim"), root.path().join("volume"));
            std::fs::write(&victim, "precious").unwrap();
            std::fs::create_dir(&directory).unwrap();
            std::os::unix::fs::symlink(&victim, directory.join(name)).unwrap();
            let error = Volume::create(&directory, direct).unwrap_err();
            assert_eq!(error.errno(), Some(libc::ELOOP), "{name}: {error}");
            assert!(error.to_string().contains("symbolic link"), "{error}");
            assert_eq!(std::fs::read_to_string(&victim).unwrap(), "precious");
        }
        // The directory itself may well be a link to where the drive is.
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir(root.path().join("drive")).unwrap();
        std::os::unix::fs::symlink(root.path().join("drive"), root.path().join("link")).unwrap();
        let volume = Volume::create(&root.path().join("link"), true).unwrap();
        // Nor is a link that waits for the note.
        let victim = root.path().join("victim");
        std::fs::write(&victim, "precious").unwrap();
        let unfinished = root.path().join("drive").join(format!("{}.new", Volume::NOTE_NAME));
        std::os::unix::fs::symlink(&victim, unfinished).unwrap();
        volume.keep(b"a note").unwrap();
        assert_eq!(volume.read_note().unwrap(), Some(b"a note".to_vec()));
        assert_eq!(std::fs::read_to_string(&victim).unwrap(), "precious");
    }

    #[test]
    fn a_missing_directory_is_named() {
        let error = Volume::create(Path::new("/nonexistent/memascend"), true).unwrap_err();
        assert!(error.to_string().contains("/nonexistent/memascend"), "{error}");
    }

    #[test]
    fn a_directory_in_use_is_refused_and_free_again_after() {
        let root = tempfile::tempdir().unwrap();
        let directory = root.path().join("volume");
        let first = Volume::create(&directory, true).unwrap();
        let error = Volume::create(&directory, true).unwrap_err();
        assert!(error.to_string().contains(&std::process::id().to_string()), "{error}");
        assert_eq!(error.errno(), Some(libc::EBUSY));
        drop(first);
        assert!(!directory.exists(), "nothing is left behind");
        Volume::create(&directory, true).unwrap();
    }

    #[test]
    fn what_was_kept_is_opened_again_and_not_overwritten() {
        let root = tempfile::tempdir().unwrap();
        let directory = root.path().join("volume");
        assert!(matches!(Volume::open(&directory, true).unwrap_err(), IoError::NotKept { .. }));
        let first = Volume::create(&directory, true).unwrap();
        first.reserve(8192).unwrap();
        first.keep(b"note").unwrap();
        drop(first);
        for _ in 0..2 {
            let error = Volume::create(&directory, true).unwrap_err();
            assert!(matches!(error, IoError::Kept { .. }), "{error}");
        }
        for _ in 0..2 {
            let again = Volume::open(&directory, true).unwrap();
            assert_eq!(again.read_note().unwrap().unwrap(), b"note");
            assert_eq!(std::fs::metadata(again.file().path()).unwrap().len(), 8192);
        }
        let left: Vec<_> =
            std::fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left.len(), 3, "data, note and the room for the next: {left:?}");
    }
}
