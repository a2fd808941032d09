//! Errors of engines and volumes, each with its remedy.

use std::io;
use std::path::{Path, PathBuf};

use memascend_mem::Size;

use crate::{BlockDeviceError, Operation, Volume};

/// Errors of the I/O engines and volumes.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IoError {
    /// A transfer failed.
    #[error(
        "{operation} of {bytes} bytes at offset {offset} of {path} failed: {source}{}",
        in_parentheses(hint)
    )]
    Transfer {
        /// Read or write.
        operation: Operation,
        /// The volume's file or device.
        path: PathBuf,
        /// Byte offset of the request, from the beginning of the file or device.
        offset: u64,
        /// Length of the request.
        bytes: usize,
        /// The system's error.
        source: io::Error,
        /// The remedy; empty where none is known.
        hint: &'static str,
    },
    /// A file operation other than a transfer failed.
    #[error("cannot {action} {path}: {source}{}", in_parentheses(errno_hint(source)))]
    File {
        /// The failed operation: `open`, `create`, `preallocate`, `sync`.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A flush failed. Writes since the flush before may be lost, even if a later flush succeeds: the system
    /// drops pages that it could not write, and reports that once.
    #[error(
        "cannot flush {path}: {source}{}; what was written since the last durable step may be lost, so that no later step \
         can become durable: end this run, and resume it from its last durable step",
        in_parentheses(errno_hint(source))
    )]
    Flush {
        /// The file, directory or device.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The directory's filesystem or the device has not enough space.
    #[error(
        "not enough space in {path}: {} needed, {} free; \
         free some space or add a second --store on another drive",
        Size(*needed_bytes),
        Size(*free_bytes)
    )]
    NoSpace {
        /// The directory or device.
        path: PathBuf,
        /// Bytes to be preallocated.
        needed_bytes: u64,
        /// Bytes free for this user.
        free_bytes: u64,
    },
    /// The directory is locked by a running process.
    #[error(
        "store directory {path} is in use by process {owner}; wait for it to end or choose another directory"
    )]
    InUse {
        /// The directory.
        path: PathBuf,
        /// Process id of the holder as written in the lock file, or `unknown`.
        owner: String,
    },
    /// The directory of a volume in use, or the file in it, is not at its path any more.
    #[error(
        "the store in {path} was removed, moved or replaced while this run uses it: no step can become durable there any \
         more. End the run, put the store back, and resume it from its last durable step"
    )]
    Replaced {
        /// The directory.
        path: PathBuf,
    },
    /// The directory could not be prepared.
    #[error("cannot {action} {path}: {source}{}", in_parentheses(directory_hint(source)))]
    Directory {
        /// The operation that failed.
        action: &'static str,
        /// The directory or file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A directory above the one to be made does not exist.
    #[error(
        "cannot create {path}: {missing} does not exist; mount the drive that is to be there, or make the directory \
         above the store (`mkdir -p`)"
    )]
    NoParent {
        /// The directory to be made.
        path: PathBuf,
        /// The first directory of its path that is missing.
        missing: PathBuf,
    },
    /// A raw block device could not be used.
    #[error(transparent)]
    Device(Box<BlockDeviceError>),
    /// The volume holds a store that a run can resume from.
    #[error(
        "{path} holds the store of an earlier run: go on with it by `memascend.resume` or `memascend finetune --resume`; \
         or {remedy}; or choose another place"
    )]
    Kept {
        /// The directory or device.
        path: PathBuf,
        /// How to remove the store.
        remedy: String,
    },
    /// The volume to be opened holds no kept store.
    #[error("{path} holds no store that was kept: {why}")]
    NotKept {
        /// The directory or device.
        path: PathBuf,
        /// Why it may hold none.
        why: &'static str,
    },
    /// io_uring cannot be used here.
    #[error("io_uring is not available: {source}{}", in_parentheses(ring_hint(source)))]
    RingUnavailable {
        /// The system's error.
        source: io::Error,
    },
    /// The system starts no thread.
    #[error("cannot start an I/O thread: {source} (raise `ulimit -u` or the pids limit of the container)")]
    NoThread {
        /// The system's error.
        source: io::Error,
    },
    /// The engine was closed while the request waited.
    #[error("the I/O engine was closed")]
    Closed,
}

impl From<BlockDeviceError> for IoError {
    fn from(error: BlockDeviceError) -> Self {
        match error {
            BlockDeviceError::Flush { path, source } => Self::Flush { path, source },
            error => Self::Device(Box::new(error)),
        }
    }
}

impl IoError {
    /// The error of a volume that holds no kept store.
    pub fn not_kept(path: &Path) -> Self {
        let first = std::fs::read_dir(path).map(|mut entries| entries.next().is_some());
        let has = |name: &str| path.join(name).exists();
        let why = match first.map_err(|error| error.kind()) {
            Err(io::ErrorKind::NotFound) => "it does not exist; mount its drive, if it lies on another",
            Err(io::ErrorKind::NotADirectory) => {
                "it is a file; give the directory of a store, or a raw device"
            }
            Err(io::ErrorKind::PermissionDenied) => "this user may not look into it",
            Ok(false) => "it is empty; mount its drive, if it lies on another",
            Ok(true) if has(Volume::NOTE_NAME) && !has(Volume::FILE_NAME) => {
                "its manifest is there, but the file memascend.volume beside it is gone; put that back"
            }
            Ok(true) if has(Volume::FILE_NAME) && !has(Volume::NOTE_NAME) => {
                "memascend.volume is there, but no manifest (memascend.json); its run ended before a step was durable, or \
                 the manifest was lost"
            }
            _ => "none was ever committed there (durability, keep_store, --keep-store)",
        };
        Self::NotKept { path: path.to_owned(), why }
    }

    /// Whether it says that there is no such volume.
    pub fn is_absence(&self) -> bool {
        match self {
            Self::Device(error) => matches!(**error, BlockDeviceError::NotFound { .. }),
            _ => self.errno() == Some(libc::ENOENT),
        }
    }

    /// The errno behind the error, where there is one.
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Transfer { source, .. }
            | Self::File { source, .. }
            | Self::Flush { source, .. }
            | Self::RingUnavailable { source }
            | Self::NoThread { source } => source.raw_os_error(),
            Self::Directory { source, .. } => source.raw_os_error(),
            Self::Device(error) => error.errno(),
            Self::NoSpace { .. } => Some(libc::ENOSPC),
            Self::InUse { .. } => Some(libc::EBUSY),
            Self::Replaced { .. } => Some(libc::ESTALE),
            Self::Kept { .. } => Some(libc::EEXIST),
            Self::NotKept { .. } | Self::NoParent { .. } => Some(libc::ENOENT),
            Self::Closed => None,
        }
    }

    /// The file, directory or device, where the error is of one.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::Transfer { path, .. }
            | Self::File { path, .. }
            | Self::Flush { path, .. }
            | Self::Directory { path, .. }
            | Self::InUse { path, .. }
            | Self::Replaced { path }
            | Self::Kept { path, .. }
            | Self::NotKept { path, .. }
            | Self::NoParent { path, .. }
            | Self::NoSpace { path, .. } => Some(path),
            Self::Device(error) => error.path(),
            Self::RingUnavailable { .. } | Self::NoThread { .. } | Self::Closed => None,
        }
    }

    /// The remedy; empty where none is known.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::Transfer { hint, .. } => hint,
            Self::File { source, .. } | Self::Flush { source, .. } => errno_hint(source),
            Self::Directory { source, .. } => directory_hint(source),
            Self::RingUnavailable { source } => ring_hint(source),
            Self::NoSpace { .. } => "free some space or add a second --store on another drive",
            _ => "",
        }
    }
}

fn in_parentheses(hint: &str) -> String {
    if hint.is_empty() { String::new() } else { format!(" ({hint})") }
}

fn directory_hint(source: &io::Error) -> &'static str {
    match source.raw_os_error() {
        Some(libc::ENOSPC | libc::EDQUOT | libc::EROFS | libc::EIO | libc::ELOOP) => errno_hint(source),
        _ => "a store needs a directory that you may write to, or a formatted device",
    }
}

/// An error of the operating system on a file.
pub(crate) fn file_error(action: &'static str, path: &Path, source: io::Error) -> IoError {
    IoError::File { action, path: path.to_owned(), source }
}

/// An error of flushing a file or directory.
pub(crate) fn flush_error(path: &Path, source: io::Error) -> IoError {
    IoError::Flush { path: path.to_owned(), source }
}

/// Remedies for the errors of files and drives.
pub(crate) fn errno_hint(source: &io::Error) -> &'static str {
    match source.raw_os_error() {
        Some(libc::ENOSPC) => "the filesystem is full: free some space",
        Some(libc::EDQUOT) => "the disk quota is used up: free some space or raise the quota",
        Some(libc::EFBIG) => {
            "larger than a file may be here: raise the limit with `ulimit -f`, or use a filesystem that holds larger files"
        }
        Some(libc::EIO) => "the drive reports an error: check dmesg and the drive's health",
        Some(libc::ENODEV | libc::ENXIO) => "the drive is gone: check its connection and dmesg",
        Some(libc::EINVAL) => "the file or device refuses transfers of this alignment",
        Some(libc::EACCES | libc::EPERM) => "check the owner and the permissions",
        Some(libc::EROFS) => {
            "the filesystem is mounted read-only: mount it writable, or copy what lies there to another"
        }
        Some(libc::ELOOP) => "a symbolic link is in its place, and links are not followed: remove the link",
        Some(libc::EBADF | libc::ESTALE) => "the file was closed or replaced underneath",
        _ => "",
    }
}

fn ring_hint(source: &io::Error) -> &'static str {
    match source.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => {
            "the sysctl kernel.io_uring_disabled or a seccomp profile such as Docker's forbids it"
        }
        Some(libc::ENOSYS) => "the kernel does not have io_uring",
        Some(libc::ENOMEM) => "RLIMIT_MEMLOCK is too low: raise `ulimit -l`",
        _ => "",
    }
}

/// Result of an I/O operation.
pub type Result<T> = std::result::Result<T, IoError>;
