//! Raw block devices: what the kernel tells of them, what is on them, and the format that makes one a store's.

pub(crate) mod blocks;
pub(crate) mod content;
pub(crate) mod crc;
pub(crate) mod device;
pub(crate) mod error;
pub(crate) mod format;
pub(crate) mod node;
pub(crate) mod notes;
pub(crate) mod signatures;
pub(crate) mod superblock;
pub(crate) mod uuid;
