//! The content found on a block device, and its text for reports and errors.

use std::fmt;

use crate::{UnknownData, Uuid};

/// Former content of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Content {
    /// Partitions that the kernel knows, by name.
    Partitions(Vec<String>),
    /// A signature that libblkid recognises.
    Signature(Signature),
    /// A memascend store.
    Store {
        /// The device's UUID.
        id: Uuid,
        /// Length of the note that a kept store leaves.
        note_bytes: Option<u64>,
    },
    /// A memascend superblock whose checksum is wrong.
    DamagedStore,
    /// A store of a later version.
    NewerStore {
        /// The format's version.
        version: u32,
    },
    /// Data without a signature.
    Unknown(UnknownData),
}

impl fmt::Display for Content {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Partitions(names) => write!(out, "partitions {}", names.join(", ")),
            Self::Signature(signature) => signature.fmt(out),
            Self::Store { id, note_bytes: Some(bytes) } => {
                write!(out, "a kept memascend store (UUID {id}, with a note of {bytes} bytes)")
            }
            Self::Store { id, note_bytes: None } => {
                write!(out, "a memascend store (UUID {id}) that is not kept")
            }
            Self::DamagedStore => out.write_str("a damaged memascend superblock"),
            Self::NewerStore { version } => {
                write!(out, "a store of a newer memascend (format version {version})")
            }
            Self::Unknown(data) => data.fmt(out),
        }
    }
}

/// A filesystem, RAID, LVM, swap or partition table on a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Signature {
    /// Name of the kind, as `blkid` and `wipefs` show it: `ext4`, `linux_raid_member`, `gpt`.
    pub kind: String,
    /// The label, if there is one.
    pub label: Option<String>,
    /// The UUID, if there is one.
    pub uuid: Option<String>,
    /// The category of the kind: `a filesystem`, `a partition table`.
    pub sort: &'static str,
}

impl fmt::Display for Signature {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} ({}", self.sort, self.kind)?;
        if let Some(label) = &self.label {
            write!(out, ", label {label:?}")?;
        }
        if let Some(uuid) = &self.uuid {
            write!(out, ", UUID {uuid}")?;
        }
        out.write_str(")")
    }
}
