//! A directory by its descriptor: a volume's operations on names there, even if its path changes.

use std::ffi::CString;
use std::fs::{File, Metadata};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::memory::with_room;

/// What notes and volumes do with the names of a directory. A simulated one loses power in tests.
pub(crate) trait Names {
    /// A file that was opened by its name.
    type File: NamedFile;

    /// Opens a file for reading, or, made if it is missing, for writing too. A link is refused.
    fn open(&self, name: &str, writing: bool) -> io::Result<Self::File>;

    /// Exchanges the names of two files atomically.
    fn exchange(&self, one: &str, other: &str) -> io::Result<()>;

    /// Gives a file another name, whose file loses it.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;

    /// Removes a name.
    fn remove(&self, name: &str) -> io::Result<()>;

    /// Waits until all names are on the medium.
    fn sync(&self) -> io::Result<()>;
}

/// A file of a note.
pub(crate) trait NamedFile {
    /// Its length in bytes.
    fn length(&self) -> io::Result<u64>;

    /// All of its bytes.
    fn read(&self) -> io::Result<Vec<u8>>;

    /// Overwrites its bytes from the first one on.
    fn write(&self, bytes: &[u8]) -> io::Result<()>;

    /// Waits until all of it is on the medium.
    fn sync(&self) -> io::Result<()>;

    /// Has a copy-on-write filesystem overwrite its blocks in place; it is empty.
    fn write_in_place(&self);
}

/// An open directory.
#[derive(Debug)]
pub(crate) struct Folder {
    directory: File,
    path: PathBuf,
    identity: (u64, u64),
}

/// Identity of a file or directory: device and inode.
pub(crate) fn identity_of(metadata: &Metadata) -> (u64, u64) {
    (metadata.dev(), metadata.ino())
}

impl Folder {
    /// Opens the directory at `path`.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let directory = File::open(path)?;
        let metadata = directory.metadata()?;
        if !metadata.is_dir() {
            return Err(io::Error::from_raw_os_error(libc::ENOTDIR));
        }
        Ok(Self { directory, path: path.to_owned(), identity: identity_of(&metadata) })
    }

    /// The path that the directory was opened by.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the path still leads to this directory.
    pub(crate) fn is_in_place(&self) -> bool {
        std::fs::metadata(&self.path).is_ok_and(|metadata| identity_of(&metadata) == self.identity)
    }

    /// Opens a file of the directory by `flags` of open(2), and makes it for its owner alone.
    pub(crate) fn open_file(&self, name: &str, flags: i32) -> io::Result<File> {
        let name = in_c(name)?;
        let flags = flags | libc::O_NOFOLLOW | libc::O_CLOEXEC;
        loop {
            // SAFETY: a C string that lives through the call, and a descriptor that self owns.
            let descriptor = unsafe { libc::openat(self.directory.as_raw_fd(), name.as_ptr(), flags, 0o600) };
            if descriptor >= 0 {
                // SAFETY: the call gave the descriptor, which nothing else owns.
                return Ok(unsafe { File::from_raw_fd(descriptor) });
            }
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
    }

    /// As [`Folder::open_file`], for regular files alone. A pipe that lies in the file's place does not
    /// have the opening wait for its other end.
    pub(crate) fn open_regular(&self, name: &str, flags: i32) -> io::Result<File> {
        let file = self.open_file(name, flags | libc::O_NONBLOCK)?;
        if !file.metadata()?.is_file() {
            return Err(io::Error::other("it is not a regular file: remove it"));
        }
        Ok(file)
    }

    /// Whether a name of the directory leads to the file that `metadata` is of. Links are not followed.
    pub(crate) fn leads_to(&self, name: &str, metadata: &Metadata) -> bool {
        let Ok(name) = in_c(name) else { return false };
        let mut found = std::mem::MaybeUninit::<libc::stat>::zeroed();
        // SAFETY: the string lives through the call, and `found` is writable.
        let done = unsafe {
            libc::fstatat(
                self.directory.as_raw_fd(),
                name.as_ptr(),
                found.as_mut_ptr(),
                libc::AT_SYMLINK_NOFOLLOW,
            )
        };
        // SAFETY: zeros are a valid stat, and the call has filled it where it succeeded.
        let found = unsafe { found.assume_init() };
        done == 0 && (found.st_dev, found.st_ino) == identity_of(metadata)
    }

    fn rename_by(&self, from: &str, to: &str, flags: libc::c_uint) -> io::Result<()> {
        let (from, to) = (in_c(from)?, in_c(to)?);
        let directory = self.directory.as_raw_fd();
        // SAFETY: both are C strings that live through the call.
        let done = unsafe {
            libc::syscall(libc::SYS_renameat2, directory, from.as_ptr(), directory, to.as_ptr(), flags)
        };
        if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

impl Names for Folder {
    type File = File;

    fn open(&self, name: &str, writing: bool) -> io::Result<File> {
        self.open_regular(name, if writing { libc::O_RDWR | libc::O_CREAT } else { libc::O_RDONLY })
    }

    fn exchange(&self, one: &str, other: &str) -> io::Result<()> {
        self.rename_by(one, other, libc::RENAME_EXCHANGE)
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let (from, to) = (in_c(from)?, in_c(to)?);
        let directory = self.directory.as_raw_fd();
        // SAFETY: both are C strings that live through the call. A filesystem without flags has this.
        let done = unsafe { libc::renameat(directory, from.as_ptr(), directory, to.as_ptr()) };
        if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        let name = in_c(name)?;
        // SAFETY: a C string that lives through the call.
        let done = unsafe { libc::unlinkat(self.directory.as_raw_fd(), name.as_ptr(), 0) };
        if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    fn sync(&self) -> io::Result<()> {
        #[cfg(test)]
        tests::note_flush(&self.path);
        self.directory.sync_all()
    }
}

impl NamedFile for File {
    fn length(&self) -> io::Result<u64> {
        self.metadata().map(|metadata| metadata.len())
    }

    fn read(&self) -> io::Result<Vec<u8>> {
        use std::os::unix::fs::FileExt;
        let length = usize::try_from(self.length()?).map_err(io::Error::other)?;
        let mut bytes = with_room(length)?;
        bytes.resize(length, 0);
        self.read_exact_at(&mut bytes, 0)?;
        Ok(bytes)
    }

    fn write(&self, bytes: &[u8]) -> io::Result<()> {
        std::os::unix::fs::FileExt::write_all_at(self, bytes, 0)
    }

    fn sync(&self) -> io::Result<()> {
        self.sync_all()
    }

    fn write_in_place(&self) {
        super::directory::write_in_place(self);
    }
}

fn in_c(name: &str) -> io::Result<CString> {
    CString::new(Path::new(name).as_os_str().as_bytes()).map_err(io::Error::other)
}

#[cfg(test)]
pub(super) mod tests {
    use std::cell::RefCell;
    use std::os::unix::fs::OpenOptionsExt;

    use super::*;

    thread_local! {
        /// The directories whose names this thread has flushed.
        static FLUSHED: RefCell<Vec<PathBuf>> = const { RefCell::new(Vec::new()) };
    }

    pub(super) fn note_flush(path: &Path) {
        FLUSHED.with_borrow_mut(|flushed| flushed.push(path.to_owned()));
    }

    /// Whether this thread has flushed the names in the directory at `path`.
    pub(in crate::volume) fn was_flushed(path: &Path) -> bool {
        FLUSHED.with_borrow(|flushed| flushed.iter().any(|one| one == path))
    }

    /// A descriptor that is for looking alone, and one without a medium, cannot be flushed: the system says so.
    #[test]
    fn flushes_reach_the_system() {
        let root = tempfile::tempdir().unwrap();
        let mut folder = Folder::open(root.path()).unwrap();
        Names::sync(&folder).unwrap();
        folder.directory = File::options().read(true).custom_flags(libc::O_PATH).open(root.path()).unwrap();
        assert_eq!(Names::sync(&folder).unwrap_err().raw_os_error(), Some(libc::EBADF));
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let file = File::from(std::os::fd::OwnedFd::from(socket));
        assert_eq!(NamedFile::sync(&file).unwrap_err().raw_os_error(), Some(libc::EINVAL));
    }
}
