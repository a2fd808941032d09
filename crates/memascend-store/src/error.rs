//! Errors of the store: the failure, its tensor or path, and the remedy.

use std::fmt;
use std::path::{Path, PathBuf};

use memascend_nvme::IoError;

/// Errors of the store.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// A transfer of a tensor failed.
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
    /// Bytes that were read differ from those that were written.
    #[error(transparent)]
    Damaged(#[from] Damage),
    /// A file from which weights are read has changed.
    #[error(
        "{path} has changed since the model was opened: its weights are read as the model computes, so it must stay as it \
         is; open the model again, or copy the weights to the store (frozen='store')"
    )]
    Changed {
        /// The file.
        path: PathBuf,
    },
    /// Bytes of a file beside the store differ from those that were written.
    #[error(
        "{path}: {bytes} bytes at offset {offset} are not those of the quantised weights that were written: the drive has \
         changed, lost or misplaced them. Open the model again, which quantises them anew",
        bytes = memascend_nvme::BLOCK_BYTES
    )]
    DamagedBeside {
        /// The file.
        path: PathBuf,
        /// The first of the bytes.
        offset: u64,
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
        /// The names of the snapshots.
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
    /// There is no generation to take a snapshot of.
    #[error("nothing was committed to the store yet: there is nothing that a snapshot could keep")]
    NothingCommitted,
    /// The manifest would not fit, and nothing was written.
    #[error(
        "the store's manifest would take {bytes} bytes, and {path} holds one of {limit_bytes}: the states that its \
         generation and its snapshots keep take {state_bytes} bytes of it. What was durable before stays: keep less with \
         a step, or delete snapshots"
    )]
    ManifestTooLong {
        /// The volume.
        path: PathBuf,
        /// Length of the manifest.
        bytes: u64,
        /// The longest one.
        limit_bytes: u64,
        /// How much of it the callers' states take.
        state_bytes: u64,
    },
    /// There is no memory for the manifest, and no volume has it.
    #[error(
        "no memory for the {bytes} bytes of the store's manifest: what was durable before stays. Free memory, and commit \
         again"
    )]
    NoMemory {
        /// How many bytes, about.
        bytes: u64,
    },
    /// A volume was found to be another one than the store has.
    #[error(
        "{path} holds a volume that its store has in {recorded}: it is a copy, or was moved. Opened alone it would be \
         combined with {others}, where the original's other volumes are. Name every volume of the store, and for a copy \
         those that were copied with it"
    )]
    Copied {
        /// The volume that was given.
        path: PathBuf,
        /// Where the store has it.
        recorded: String,
        /// Where the store has its other volumes.
        others: String,
    },
    /// A volume of the store is not there.
    #[error(
        "{of} holds a part of a store whose other part is in {path}, and that is not there: mount its drive, or name where it \
         is now ({source})"
    )]
    Missing {
        /// The volume that is missing.
        path: PathBuf,
        /// A volume that was given.
        of: PathBuf,
        /// Why it cannot be opened.
        source: Box<IoError>,
    },
    /// The manifest on a volume cannot be used.
    #[error("the store kept in {path} cannot be opened: {reason}")]
    Manifest {
        /// The volume.
        path: PathBuf,
        /// Why.
        reason: String,
    },
}

impl StoreError {
    /// The volume's error that caused this one, if there is one.
    pub fn io(&self) -> Option<&IoError> {
        match self {
            Self::Tensor { source, .. } | Self::Volume(source) => Some(source),
            _ => None,
        }
    }

    /// The file, directory or device that the error concerns, if there is one.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::Duplicate { path }
            | Self::Missing { path, .. }
            | Self::Manifest { path, .. }
            | Self::ManifestTooLong { path, .. }
            | Self::Copied { path, .. }
            | Self::DamagedBeside { path, .. }
            | Self::Changed { path } => Some(path),
            Self::Damaged(damage) => damage.places.first().map(|(path, _)| path.as_path()),
            _ => self.io().and_then(IoError::path),
        }
    }

    /// The errno of the error, if there is one.
    pub fn errno(&self) -> Option<i32> {
        match self {
            // The errno that filesystems return when one of their own checksums does not match.
            Self::Damaged(_) | Self::DamagedBeside { .. } => Some(libc::EBADMSG),
            Self::ManifestTooLong { .. } => Some(libc::EFBIG),
            Self::NoMemory { .. } => Some(libc::ENOMEM),
            Self::Missing { .. } => Some(libc::ENOENT),
            _ => self.io().and_then(IoError::errno),
        }
    }
}

/// Bytes of a tensor that differ from those that were written, or that cannot be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Damage {
    /// Name of the tensor.
    pub tensor: String,
    /// First byte within it.
    pub offset: u64,
    /// Number of bytes: a MiB, or as many as were written together.
    pub bytes: u64,
    /// The files or devices that hold them, and the positions there.
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
