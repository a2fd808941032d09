//! A directory as a volume: made, locked, and its file opened.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use memascend_mem::Origin;

use crate::error::file_error;
use crate::volume::folder::{Folder, Names};
use crate::volume::lock::{DirectoryLock, FileLock};
use crate::volume::notes::DirectoryNotes;
use crate::{BLOCK_BYTES, Geometry, IoError, Result, Volume};

/// A directory that this process alone uses. Dropping the value removes the lock file, and the
/// directory too if this process made the directory and nothing else lies in it.
#[derive(Debug)]
pub(super) struct HeldDirectory {
    /// Opened by an absolute path: the process may change its working directory before the volume
    /// is closed.
    folder: Folder,
    /// Whether the directory did not exist before.
    made: bool,
    /// None on a filesystem that is mounted read-only, where nothing can be made. Its volume's file is
    /// locked all the same.
    lock: Option<DirectoryLock>,
    origin: Origin,
}

/// The file of a volume in a directory.
pub(super) struct OpenedFile {
    pub(super) file: File,
    pub(super) path: PathBuf,
    pub(super) geometry: Geometry,
    /// Whether transfers bypass the page cache.
    pub(super) is_direct: bool,
    /// Whether it lies on a filesystem that is mounted read-only.
    pub(super) is_read_only: bool,
    /// Keeps other processes from opening it.
    pub(super) lock: FileLock,
}

impl HeldDirectory {
    /// Locks the directory `given`, which is made first if it is missing and `create` is set.
    pub(super) fn take(given: &Path, create: bool) -> Result<Self> {
        let failed = |action| move |source| IoError::Directory { action, path: given.to_owned(), source };
        let directory = std::path::absolute(given).map_err(failed("find"))?;
        let mut made = false;
        if create && !directory.exists() {
            // Only the last part of the path: a missing parent is a typing error or a drive that is
            // not mounted.
            let missing = directory.ancestors().skip(1).take_while(|above| !above.exists()).last();
            if let Some(missing) = missing {
                return Err(IoError::NoParent { path: given.to_owned(), missing: missing.to_owned() });
            }
            std::fs::DirBuilder::new().mode(0o700).create(&directory).map_err(failed("create"))?;
            made = true;
            // A crash must not lose the directory's name with the commits in it. A
            // failure is ignored: a user may have the right to write to the parent and not the
            // right to read the parent.
            let _ = directory.parent().map(|above| Folder::open(above).and_then(|above| above.sync()));
        }
        if !create && !directory.join(Volume::FILE_NAME).exists() {
            return Err(IoError::not_kept(given));
        }
        let folder = Folder::open(&directory).map_err(failed("open"))?;
        let mut held = Self { folder, made, lock: None, origin: Origin::here() };
        held.lock = match DirectoryLock::take(&held.folder) {
            // A store can be read there: a snapshot, or a drive with errors.
            Err(error) if !create && error.errno() == Some(libc::EROFS) => None,
            taken => Some(taken?),
        };
        Ok(held)
    }

    /// The absolute path.
    pub(super) fn path(&self) -> &Path {
        self.folder.path()
    }

    /// The note in the directory.
    pub(super) fn notes(&self) -> DirectoryNotes<'_, Folder> {
        DirectoryNotes { names: &self.folder, path: self.folder.path() }
    }

    /// Whether the directory is still at its path, and `file` the volume's file in it.
    pub(super) fn is_in_place(&self, file: &File) -> bool {
        let named = file.metadata().is_ok_and(|metadata| self.folder.leads_to(Volume::FILE_NAME, &metadata));
        named && self.folder.is_in_place()
    }

    /// Removes the volume's file and the room for the next note.
    pub(super) fn remove_files(&self) {
        let _ = self.folder.remove(Volume::FILE_NAME);
        self.notes().remove_spare();
    }

    /// Opens the volume's file, with O_DIRECT if `direct` is set and the filesystem allows that.
    pub(super) fn open_file(&self, direct: bool, create: bool) -> Result<OpenedFile> {
        let path = self.path().join(Volume::FILE_NAME);
        let action = if create { "create" } else { "open" };
        let failed = |source: io::Error| match source.raw_os_error() {
            Some(libc::EWOULDBLOCK) => {
                IoError::InUse { path: self.path().to_owned(), owner: "unknown".to_owned() }
            }
            _ => file_error(action, &path, source),
        };
        let is_read_only = self.lock.is_none();
        let access = if is_read_only { libc::O_RDONLY } else { libc::O_RDWR };
        let create = if create { libc::O_CREAT } else { 0 };
        let lock = FileLock::take(&self.folder, Volume::FILE_NAME, access | create).map_err(failed)?;
        // A link to another file in this place is not followed: writing would destroy that file.
        let open = |flags: i32| self.folder.open_regular(Volume::FILE_NAME, access | flags);
        if direct {
            match open(libc::O_DIRECT) {
                Ok(file) => {
                    // Extents are multiples of BLOCK_BYTES, which a larger block would not divide.
                    let geometry =
                        Geometry::direct(&file).filter(|geometry| geometry.block_bytes <= BLOCK_BYTES);
                    if let Some(geometry) = geometry {
                        return Ok(OpenedFile { file, path, geometry, is_direct: true, is_read_only, lock });
                    }
                }
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
                Err(source) => return Err(failed(source)),
            }
        }
        let file = open(0).map_err(failed)?;
        Ok(OpenedFile { file, path, geometry: Geometry::buffered(), is_direct: false, is_read_only, lock })
    }
}

impl Drop for HeldDirectory {
    fn drop(&mut self) {
        // The files belong to the process that made them, not to a forked DataLoader worker.
        if !self.origin.is_here() {
            return;
        }
        if let Some(lock) = &self.lock {
            lock.remove_file(&self.folder);
        }
        if self.made && self.folder.is_in_place() {
            let _ = std::fs::remove_dir(self.folder.path());
        }
    }
}

/// Makes a copy-on-write filesystem (Btrfs) overwrite the blocks of an empty file in place.
/// Otherwise allocating blocks beforehand does not help when the drive is full. Other filesystems
/// refuse the flag and do not need it.
pub(super) fn write_in_place(file: &File) {
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
