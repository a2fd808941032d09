//! The lock file that gives one process a directory.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::unforked::Unforked;
use crate::{IoError, Result};

/// Exclusive use of a directory. The kernel releases the lock when the process ends in any way, so
/// the lock file of a killed process does not block other processes. Forked children have no part in
/// it.
#[derive(Debug)]
pub(crate) struct DirectoryLock {
    _unforked: Unforked,
    _file: File,
    path: PathBuf,
}

impl DirectoryLock {
    const FILE_NAME: &'static str = "memascend.lock";

    pub(crate) fn take(directory: &Path) -> Result<Self> {
        let path = directory.join(Self::FILE_NAME);
        let failed = |action| {
            let path = path.clone();
            move |source| IoError::Directory { action, path, source }
        };
        loop {
            let mut file = OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .mode(0o600)
                .custom_flags(libc::O_NOFOLLOW)
                .open(&path)
                .map_err(failed("create"))?;
            // SAFETY: a plain system call on a descriptor that lives.
            if unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } != 0 {
                let source = std::io::Error::last_os_error();
                if source.raw_os_error() != Some(libc::EWOULDBLOCK) {
                    return Err(failed("lock")(source));
                }
                let mut owner = String::new();
                let _ = file.read_to_string(&mut owner);
                let owner = if owner.trim().is_empty() { "unknown".into() } else { owner.trim().to_owned() };
                return Err(IoError::InUse { path: directory.to_owned(), owner });
            }
            // The last owner may have removed the file between opening and locking. Then the locked
            // file is not the one at the path, and the loop tries again.
            let inode = |metadata: std::fs::Metadata| (metadata.dev(), metadata.ino());
            if file.metadata().map(inode).ok() != std::fs::metadata(&path).map(inode).ok() {
                continue;
            }
            let written = file
                .set_len(0)
                .and_then(|()| file.rewind())
                .and_then(|()| write!(file, "{}", std::process::id()));
            let lock = Self { _unforked: Unforked::of(&file), _file: file, path: path.clone() };
            return match written {
                Ok(()) => Ok(lock),
                Err(source) => {
                    lock.remove_file();
                    Err(failed("write")(source))
                }
            };
        }
    }

    /// Removes the lock file. Dropping the value releases the lock.
    pub(crate) fn remove_file(&self) {
        let _ = std::fs::remove_file(&self.path);
    }
}
