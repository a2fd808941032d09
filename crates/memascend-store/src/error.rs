use std::io;
use std::path::PathBuf;

use memascend_nvme::IoError;

/// Errors of the store.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// Moving bytes failed; `tensor` says whose.
    #[error("{tensor}: {source}")]
    Tensor {
        /// Name of the tensor in the store.
        tensor: String,
        /// The failed transfer.
        source: IoError,
    },
    /// A volume could not be used.
    #[error(transparent)]
    Volume(#[from] IoError),
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
    /// The directory could not be prepared.
    #[error("cannot {action} {path}: {source} (a store needs a directory that you may write to)")]
    Directory {
        /// What was tried.
        action: &'static str,
        /// The directory or file.
        path: PathBuf,
        /// What the operating system said.
        source: io::Error,
    },
    /// The directory holds a store that somebody asked to keep.
    #[error(
        "{path} holds a store that was kept (keep_store); delete {manifest} and {volume} there, or choose \
         another directory",
        manifest = crate::store::MANIFEST_NAME,
        volume = memascend_nvme::Volume::FILE_NAME
    )]
    Kept {
        /// The directory.
        path: PathBuf,
    },
    /// The same directory was given twice.
    #[error("store directory {path} was given twice; each volume needs a directory of its own")]
    Duplicate {
        /// The directory.
        path: PathBuf,
    },
    /// No directory was given.
    #[error("a store needs at least one directory")]
    NoVolume,
}

impl StoreError {
    /// The errno behind the error, where there is one.
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Tensor { source, .. } | Self::Volume(source) => source.errno(),
            Self::Directory { source, .. } => source.raw_os_error(),
            Self::InUse { .. } => Some(libc::EBUSY),
            _ => None,
        }
    }
}

/// Result of a store operation.
pub type Result<T> = std::result::Result<T, StoreError>;
