use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::Mutex;

use crate::{IoError, Result};

/// The open file of a volume, shared with the requests in flight on it.
#[derive(Debug)]
pub struct VolumeFile {
    file: File,
    path: PathBuf,
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
}

/// One directory with a preallocated file in it.
#[derive(Debug)]
pub struct Volume {
    directory: PathBuf,
    file: Arc<VolumeFile>,
    direct: bool,
    notice: Option<String>,
    reserved_bytes: Mutex<u64>,
}

impl Volume {
    /// Name of the preallocated file.
    pub const FILE_NAME: &'static str = "memascend.volume";

    /// Creates (or empties) the volume's file in `directory`, which must exist. Transfers bypass the page
    /// cache (O_DIRECT) where the filesystem allows it and `direct` is wanted; [`Volume::notice`] says when
    /// it was refused.
    pub fn create(directory: &Path, direct: bool) -> Result<Self> {
        let path = directory.join(Self::FILE_NAME);
        let open = |flags: i32| {
            OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(true)
                .mode(0o600)
                .custom_flags(flags)
                .open(&path)
        };
        let mut notice = None;
        let (file, is_direct) = if direct {
            match open(libc::O_DIRECT) {
                Ok(file) => (file, true),
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                    notice = Some(format!(
                        "the filesystem of {} refuses O_DIRECT: using buffered I/O, slower and with the page cache on top",
                        directory.display()
                    ));
                    (open(0).map_err(|source| file_error("create", &path, source))?, false)
                }
                Err(source) => return Err(file_error("create", &path, source)),
            }
        } else {
            (open(0).map_err(|source| file_error("create", &path, source))?, false)
        };
        Ok(Self {
            directory: directory.to_owned(),
            file: Arc::new(VolumeFile { file, path }),
            direct: is_direct,
            notice,
            reserved_bytes: Mutex::new(0),
        })
    }

    /// The file to transfer on.
    pub fn file(&self) -> &Arc<VolumeFile> {
        &self.file
    }

    /// The directory given.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Whether transfers bypass the page cache.
    pub fn is_direct(&self) -> bool {
        self.direct
    }

    /// What the user should know about this volume.
    pub fn notice(&self) -> Option<&str> {
        self.notice.as_deref()
    }

    /// Makes the file at least `bytes` long with every block allocated, so that no later write can run out of
    /// space. Fails with [`IoError::NoSpace`] before anything is changed when the filesystem has not the room.
    pub fn reserve(&self, bytes: u64) -> Result<()> {
        let mut reserved = self.reserved_bytes.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if bytes <= *reserved {
            return Ok(());
        }
        let needed_bytes = bytes - *reserved;
        let free_bytes = self.free_bytes()?;
        let no_space = || IoError::NoSpace { path: self.directory.clone(), needed_bytes, free_bytes };
        if needed_bytes > free_bytes {
            return Err(no_space());
        }
        let offset = i64::try_from(*reserved).expect("a volume is smaller than 8 EiB");
        let length = i64::try_from(needed_bytes).expect("a volume is smaller than 8 EiB");
        loop {
            // SAFETY: a plain system call on a descriptor that self owns.
            if unsafe { libc::fallocate(self.file.fd(), 0, offset, length) } == 0 {
                break;
            }
            let source = io::Error::last_os_error();
            match source.raw_os_error() {
                Some(libc::EINTR) => continue,
                Some(libc::ENOSPC) => return Err(no_space()),
                // A filesystem without fallocate: the size alone is set, space is found when written.
                Some(libc::EOPNOTSUPP) => {
                    self.file
                        .file
                        .set_len(bytes)
                        .map_err(|source| file_error("extend", &self.file.path, source))?;
                    break;
                }
                _ => return Err(file_error("preallocate", &self.file.path, source)),
            }
        }
        *reserved = bytes;
        Ok(())
    }

    /// Bytes that the filesystem would still give to this user; `u64::MAX` where it does not tell.
    pub fn free_bytes(&self) -> Result<u64> {
        let path = CString::new(self.directory.as_os_str().as_bytes()).expect("an opened path holds no NUL");
        let mut stat = std::mem::MaybeUninit::<libc::statvfs>::zeroed();
        // SAFETY: `path` is NUL-terminated and `stat` is writable.
        if unsafe { libc::statvfs(path.as_ptr(), stat.as_mut_ptr()) } != 0 {
            return Err(file_error("measure the free space of", &self.directory, io::Error::last_os_error()));
        }
        // SAFETY: statvfs succeeded and filled it.
        let stat = unsafe { stat.assume_init() };
        // A filesystem that counts no blocks (ramfs, some FUSE ones) does not tell.
        Ok(if stat.f_blocks == 0 { u64::MAX } else { stat.f_bavail * stat.f_frsize })
    }

    /// Waits until everything written is on the medium.
    pub fn sync(&self) -> Result<()> {
        self.file.file.sync_data().map_err(|source| file_error("sync", &self.file.path, source))
    }
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
    fn a_missing_directory_is_named() {
        let error = Volume::create(Path::new("/nonexistent/memascend"), true).unwrap_err();
        assert!(error.to_string().contains("/nonexistent/memascend"), "{error}");
    }
}
