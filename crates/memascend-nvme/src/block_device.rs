//! Raw block devices: the kernel's reports about them, their content, and memascend's format.

pub(crate) mod blank;
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
