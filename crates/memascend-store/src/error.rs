use std::fmt;
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
    /// Bytes are not those that were written.
    #[error(transparent)]
    Damaged(#[from] Damage),
    /// A file that weights are read from is not what it was.
    #[error(
        "{path} has changed since the model was opened: its weights are read as the model computes, so it must stay as it \
         is; open the model again, or copy the weights to the store (frozen='store')"
    )]
    Changed {
        /// The file.
        path: PathBuf,
    },
    /// Names of tensors are unique.
    #[error("the store has a tensor {name} already")]
    TensorExists {
        /// The name.
        name: String,
    },
    /// Names of snapshots are unique.
    #[error("the store has a snapshot {tag} already: delete it first, or choose another name")]
    SnapshotExists {
        /// The name.
        tag: String,
    },
    /// There is no snapshot of that name.
    #[error("the store has no snapshot {tag}{}", in_words(existing))]
    NoSnapshot {
        /// The name.
        tag: String,
        /// Those that there are.
        existing: Vec<String>,
    },
    /// A snapshot cannot have that name.
    #[error(
        "{tag:?} cannot be the name of a snapshot: up to 128 characters, no slash and no control characters, the first one \
         neither - nor ."
    )]
    SnapshotName {
        /// The name.
        tag: String,
    },
    /// There is no generation of which a snapshot could be.
    #[error("nothing was committed to the store yet: there is nothing that a snapshot could keep")]
    NothingCommitted,
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
            Self::Duplicate { path } | Self::Manifest { path, .. } | Self::Changed { path } => Some(path),
            Self::Damaged(damage) => damage.places.first().map(|(path, _)| path.as_path()),
            _ => self.io().and_then(IoError::path),
        }
    }

    /// The errno behind the error, where there is one.
    pub fn errno(&self) -> Option<i32> {
        match self {
            // What filesystems answer whose own checksum is wrong.
            Self::Damaged(_) => Some(libc::EBADMSG),
            _ => self.io().and_then(IoError::errno),
        }
    }
}

/// Bytes of a tensor that are not those that were written, or that cannot be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Damage {
    /// Name of the tensor.
    pub tensor: String,
    /// First byte within it.
    pub offset: u64,
    /// How many: a MiB, or what is known to be of one piece.
    pub bytes: u64,
    /// The files or devices where they lie, and the positions there.
    pub places: Vec<(PathBuf, u64)>,
}

impl fmt::Display for Damage {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { tensor, offset, bytes, places } = self;
        write!(out, "{tensor}: {bytes} bytes at offset {offset} are not those that were written (")?;
        for (index, (path, position)) in places.iter().enumerate() {
            let comma = if index > 0 { ", " } else { "" };
            write!(out, "{comma}{} at {position}", path.display())?;
        }
        out.write_str(
            "): the drive has changed, lost or misplaced them. `memascend verify` lists all that is damaged; restore a \
             snapshot, or begin anew with a model that is whole",
        )
    }
}

impl std::error::Error for Damage {}

fn in_words(existing: &[String]) -> String {
    if existing.is_empty() { "; it has none".into() } else { format!("; it has {}", existing.join(", ")) }
}

/// Result of a store operation.
pub type Result<T> = std::result::Result<T, StoreError>;
