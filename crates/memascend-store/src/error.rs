use std::path::{Path, PathBuf};

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
    /// The same directory was given twice.
    #[error("store directory {path} was given twice; each volume needs a directory of its own")]
    Duplicate {
        /// The directory.
        path: PathBuf,
    },
    /// No volume was given.
    #[error("a store needs at least one directory or device")]
    NoVolume,
    /// What a kept store left with a volume cannot be used.
    #[error("the store kept in {path} cannot be opened: {reason}")]
    Manifest {
        /// The volume.
        path: PathBuf,
        /// Why.
        reason: String,
    },
}

impl StoreError {
    /// The error of a volume behind this one, where there is one.
    pub fn io(&self) -> Option<&IoError> {
        match self {
            Self::Tensor { source, .. } | Self::Volume(source) => Some(source),
            _ => None,
        }
    }

    /// The volume's file, directory or device, where the error is of one.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::Duplicate { path } | Self::Manifest { path, .. } => Some(path),
            _ => self.io().and_then(IoError::path),
        }
    }

    /// The errno behind the error, where there is one.
    pub fn errno(&self) -> Option<i32> {
        self.io().and_then(IoError::errno)
    }
}

/// Result of a store operation.
pub type Result<T> = std::result::Result<T, StoreError>;
