//! The lock file that gives one process a directory.

use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::fd::AsRawFd;

use crate::unforked::Unforked;
use crate::volume::folder::{Folder, Names};
use crate::{IoError, Result};

/// An exclusive lock of a file, which another file of a directory cannot take the place of: the lock
/// file beside it may be removed by a cleaner of temporary files.
///
/// The file is opened for the lock alone. A ring keeps the files that it transfers on open, in forked
/// children too, and a lock lasts until every copy of its descriptor is closed.
#[derive(Debug)]
pub(crate) struct FileLock {
    _unforked: Unforked,
    _file: File,
}

impl FileLock {
    /// Locks the file `name`, opened with `flags`. EWOULDBLOCK where another process has it.
    pub(crate) fn take(folder: &Folder, name: &str, flags: i32) -> io::Result<Self> {
        loop {
            let file = folder.open_regular(name, flags)?;
            lock(&file)?;
            // The last owner may have removed the file between opening and locking. Then the locked
            // file is not the one of that name, and the loop tries again.
            if folder.leads_to(name, &file.metadata()?) {
                return Ok(Self { _unforked: Unforked::of(&file), _file: file });
            }
        }
    }
}

/// Locks an open file for this process, or fails with EWOULDBLOCK.
fn lock(file: &File) -> io::Result<()> {
    // SAFETY: a plain system call on a descriptor that lives.
    if unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Exclusive use of a directory. The kernel releases the lock when the process ends in any way, so
/// the lock file of a killed process does not block other processes. Forked children have no part in
/// it.
#[derive(Debug)]
pub(crate) struct DirectoryLock {
    _unforked: Unforked,
    file: File,
}

impl DirectoryLock {
    const FILE_NAME: &'static str = "memascend.lock";

    pub(crate) fn take(folder: &Folder) -> Result<Self> {
        let path = folder.path().join(Self::FILE_NAME);
        let failed = |action| {
            let path = path.clone();
            move |source| IoError::Directory { action, path, source }
        };
        loop {
            let flags = libc::O_RDWR | libc::O_CREAT;
            let mut file = folder.open_regular(Self::FILE_NAME, flags).map_err(failed("create"))?;
            if let Err(source) = lock(&file) {
                if source.raw_os_error() != Some(libc::EWOULDBLOCK) {
                    return Err(failed("lock")(source));
                }
                let mut owner = String::new();
                let _ = file.read_to_string(&mut owner);
                let owner = if owner.trim().is_empty() { "unknown".into() } else { owner.trim().to_owned() };
                return Err(IoError::InUse { path: folder.path().to_owned(), owner });
            }
            // The last owner may have removed the file between opening and locking. Then the locked
            // file is not the one at the path, and the loop tries again.
            if !file.metadata().is_ok_and(|metadata| folder.leads_to(Self::FILE_NAME, &metadata)) {
                continue;
            }
            let written = file
                .set_len(0)
                .and_then(|()| file.rewind())
                .and_then(|()| write!(file, "{}", std::process::id()));
            let lock = Self { _unforked: Unforked::of(&file), file };
            return match written {
                Ok(()) => Ok(lock),
                Err(source) => {
                    lock.remove_file(folder);
                    Err(failed("write")(source))
                }
            };
        }
    }

    /// Removes the lock file. Dropping the value releases the lock.
    pub(crate) fn remove_file(&self, folder: &Folder) {
        if self.file.metadata().is_ok_and(|metadata| folder.leads_to(Self::FILE_NAME, &metadata)) {
            let _ = folder.remove(Self::FILE_NAME);
        }
    }
}
