use std::io;
use std::path::PathBuf;

use crate::Operation;

/// Errors of the I/O engines.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IoError {
    /// A transfer failed.
    #[error("{operation} of {bytes} bytes at offset {offset} of {path} failed: {source}{}", hint(source))]
    Transfer {
        /// Read or write.
        operation: Operation,
        /// The volume's file or device.
        path: PathBuf,
        /// Byte offset of the request.
        offset: u64,
        /// Length of the request.
        bytes: usize,
        /// What the operating system said.
        source: io::Error,
    },
    /// A file operation other than a transfer failed.
    #[error("cannot {action} {path}: {source}{}", hint(source))]
    File {
        /// What was tried: `open`, `create`, `preallocate`, `sync`.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// What the operating system said.
        source: io::Error,
    },
    /// The directory's filesystem has not the room.
    #[error(
        "not enough space in {path}: {needed_bytes} bytes needed, {free_bytes} free; \
         free some space or add a second --store directory on another drive"
    )]
    NoSpace {
        /// The directory.
        path: PathBuf,
        /// Bytes to be preallocated.
        needed_bytes: u64,
        /// Bytes free for this user.
        free_bytes: u64,
    },
    /// io_uring cannot be used here.
    #[error("io_uring is not available: {source}")]
    RingUnavailable {
        /// What the operating system said.
        source: io::Error,
    },
    /// The engine was closed while the request waited.
    #[error("the I/O engine was closed")]
    Closed,
}

impl IoError {
    /// The errno behind the error, where there is one.
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Transfer { source, .. } | Self::File { source, .. } | Self::RingUnavailable { source } => {
                source.raw_os_error()
            }
            Self::NoSpace { .. } => Some(libc::ENOSPC),
            Self::Closed => None,
        }
    }
}

fn hint(source: &io::Error) -> &'static str {
    match source.raw_os_error() {
        Some(libc::ENOSPC) => " (the filesystem is full: free some space)",
        Some(libc::EIO) => " (the drive reports a hardware error: check dmesg and the drive's health)",
        Some(libc::EACCES | libc::EPERM) => " (check the directory's owner and permissions)",
        Some(libc::EROFS) => " (the filesystem is mounted read-only)",
        _ => "",
    }
}

/// Result of an I/O operation.
pub type Result<T> = std::result::Result<T, IoError>;
