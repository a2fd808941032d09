//! Errors of raw block devices.

use std::io;
use std::path::{Path, PathBuf};

use memascend_mem::Size;

use crate::{Content, Signature, UnknownData, Uuid};

/// Errors of raw devices. Every message names the device and the remedy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BlockDeviceError {
    /// There is nothing at the path.
    #[error("{path} does not exist; `lsblk` lists the block devices of this machine")]
    Missing {
        /// The path given.
        path: PathBuf,
    },
    /// The path names something other than a block device, for example a directory.
    #[error("{path} is {kind}, not a block device; {remedy}")]
    NotBlockDevice {
        /// The path given.
        path: PathBuf,
        /// Kind of file at the path.
        kind: &'static str,
        /// Remedy.
        remedy: &'static str,
    },
    /// The user may not open the device.
    #[error(
        "no permission to open {path}: run as root, or give this user read and write access to it \
         (`chown` it, or join its group)"
    )]
    Permission {
        /// The device.
        path: PathBuf,
    },
    /// The device takes no writes.
    #[error("{path} is read-only; make it writable (`blockdev --setrw {path}`) or use another device")]
    ReadOnly {
        /// The device.
        path: PathBuf,
    },
    /// The device, or a partition of it, is mounted.
    #[error(
        "{path} is mounted: {device} at {mount_point}; unmount it (`umount {mount_point}`) or use another device"
    )]
    Mounted {
        /// The device asked for.
        path: PathBuf,
        /// The device itself or its partition that is mounted.
        device: PathBuf,
        /// Where.
        mount_point: PathBuf,
    },
    /// The device, or a partition of it, is swap space in use.
    #[error("{path} is in use as swap: {device}; switch it off (`swapoff {device}`) or use another device")]
    Swap {
        /// The device asked for.
        path: PathBuf,
        /// The device itself or its partition that is swap space.
        device: PathBuf,
    },
    /// LVM, RAID or dm-crypt is built on the device.
    #[error(
        "{path} is a part of {}; take that apart first (vgchange -an, mdadm --stop, cryptsetup close) \
         or use another device", holders.join(", ")
    )]
    Held {
        /// The device.
        path: PathBuf,
        /// The devices on top of it.
        holders: Vec<String>,
    },
    /// Another process or the kernel has the device open, exclusively or with a lock.
    #[error("{path} is in use {}; end that use and try again", by(processes))]
    Busy {
        /// The device.
        path: PathBuf,
        /// Processes that have it open, as far as this user may see them.
        processes: Vec<String>,
    },
    /// The device has partitions, as far as the kernel knows.
    #[error(
        "{path} has partitions: {}; name the partition to use instead, or, to lose all that is on them, \
         name this device to be destroyed: `memascend format {path} --destroy {path}`", partitions.join(", ")
    )]
    Partitioned {
        /// The device.
        path: PathBuf,
        /// Names of the partitions.
        partitions: Vec<String>,
    },
    /// Something is on the device.
    #[error(
        "{path} is not empty; it holds {}; use another device, or, to lose all that, name this device to be \
         destroyed: `memascend format {path} --destroy {path}`",
        list(found)
    )]
    NotEmpty {
        /// The device.
        path: PathBuf,
        /// Signatures found.
        found: Vec<Signature>,
    },
    /// There is data of an unknown kind on the device.
    #[error(
        "{path} is not blank: it holds {data}; use another device, or, to lose all that is on this one, name it to be \
         destroyed: `memascend format {path} --destroy {path}`"
    )]
    NotBlank {
        /// The device.
        path: PathBuf,
        /// The data and where it lies.
        data: UnknownData,
    },
    /// The device belongs to a store.
    #[error(
        "{path} holds {content}; use another device, or, to lose that store, name this device to be destroyed: \
         `memascend format {path} --destroy {path}`"
    )]
    BelongsToStore {
        /// The device.
        path: PathBuf,
        /// The store.
        content: Content,
    },
    /// The device named to be destroyed is not the one to be formatted.
    #[error(
        "told to destroy {destroy}, but to format {path}, which is another device; name the same device twice"
    )]
    OtherDevice {
        /// The device to be formatted.
        path: PathBuf,
        /// The device named to be destroyed.
        destroy: PathBuf,
    },
    /// Signatures are left after they were overwritten.
    #[error(
        "{path} still shows {} after it was overwritten; remove that with its own tools (`wipefs --all {path}`) \
         and format again",
        list(found)
    )]
    NotDestroyed {
        /// The device.
        path: PathBuf,
        /// The remaining signature.
        found: Vec<Signature>,
    },
    /// libblkid could not be loaded, so the device's content is unknown.
    #[error(
        "cannot tell whether {path} is empty: libblkid is missing ({reason}); install it (package libblkid1, \
         libblkid or util-linux-libs), or, to lose whatever is on it: `memascend format {path} --destroy {path}`"
    )]
    NoLibblkid {
        /// The device.
        path: PathBuf,
        /// The dynamic loader's error.
        reason: String,
    },
    /// libblkid failed on the device.
    #[error(
        "cannot tell what is on {path}: libblkid failed ({reason}); check that the device can be read (dmesg)"
    )]
    Probe {
        /// The device.
        path: PathBuf,
        /// The call, and the system's error.
        reason: String,
    },
    /// The device is too small.
    #[error("{path} has {}, and memascend needs at least {}; use a larger device", Size(*bytes), Size(*minimum_bytes))]
    TooSmall {
        /// The device.
        path: PathBuf,
        /// Its size.
        bytes: u64,
        /// The smallest size.
        minimum_bytes: u64,
    },
    /// The device's logical blocks are larger than memascend's.
    #[error(
        "{path} has logical blocks of {bytes} bytes, and memascend can use 4096 at most; use another device"
    )]
    BlockSize {
        /// The device.
        path: PathBuf,
        /// Its logical block size.
        bytes: u64,
    },
    /// There is no superblock on the device.
    #[error(
        "{path} is not formatted for memascend and holds {found}; format it first: `memascend format {path}`"
    )]
    Unformatted {
        /// The device.
        path: PathBuf,
        /// Content of the device, as text.
        found: String,
    },
    /// The superblock is of a later version.
    #[error(
        "{path} was formatted by a newer memascend: its format version is {version}, and this one reads up to \
         {supported}; upgrade memascend, or format the device again"
    )]
    NewerVersion {
        /// The device.
        path: PathBuf,
        /// The version on the device.
        version: u32,
        /// The latest that is known here.
        supported: u32,
    },
    /// Both superblocks are damaged.
    #[error(
        "the superblock of {path} is damaged, and so is its copy at the end; format the device again: \
         `memascend format {path} --destroy {path}`"
    )]
    Damaged {
        /// The device.
        path: PathBuf,
    },
    /// The first block was overwritten; the copy at the end is whole.
    #[error(
        "the first block of {path} was overwritten, which now holds {found}; the copy of the superblock at the end \
         of the device is whole (UUID {id}). Find out who wrote there; if the device is still memascend's, restore \
         the block: `dd if={path} of={path} bs=4096 skip={copy_block} count=1 conv=notrunc,fsync`"
    )]
    FirstBlockLost {
        /// The device.
        path: PathBuf,
        /// The device's UUID.
        id: Uuid,
        /// Number of the copy's block, in blocks of 4096 bytes.
        copy_block: u64,
        /// Other content of the device, as text.
        found: String,
    },
    /// The superblock is whole, but another program has written to the device since.
    #[error(
        "{path} was formatted for memascend (UUID {id}), but now holds {}; use another device if that content is wanted, \
         or remove the content with its own tools",
        list(found)
    )]
    Overwritten {
        /// The device.
        path: PathBuf,
        /// The device's UUID.
        id: Uuid,
        /// The content found.
        found: Vec<Signature>,
    },
    /// The device is smaller than it was.
    #[error(
        "{path} has {} and had {} when it was formatted; give it its size back, or format it again",
        Size(*bytes),
        Size(*formatted_bytes)
    )]
    Shrunk {
        /// The device.
        path: PathBuf,
        /// Its size now.
        bytes: u64,
        /// Its size when it was formatted.
        formatted_bytes: u64,
    },
    /// No device has the UUID.
    #[error(
        "no device with UUID {id} was found among {looked_at} block devices{}; check that it is attached (`lsblk`)",
        unreadable(denied)
    )]
    NotFound {
        /// The UUID looked for.
        id: Uuid,
        /// How many devices were read.
        looked_at: usize,
        /// Devices that this user may not read.
        denied: Vec<PathBuf>,
    },
    /// Several devices have the UUID: one is a clone.
    #[error(
        "{first} and {second} both have the UUID {id}: one is a copy of the other; detach one of them, or open \
         the right one by its path and format the other"
    )]
    Clone {
        /// The UUID.
        id: Uuid,
        /// One device.
        first: PathBuf,
        /// Another.
        second: PathBuf,
    },
    /// A text is no UUID.
    #[error(
        "{text:?} is not a UUID; write UUID= and 32 hexadecimal digits as in 01234567-89ab-4cde-8f01-23456789abcd"
    )]
    NotUuid {
        /// The text.
        text: String,
    },
    /// A note does not fit.
    #[error(
        "a note of {bytes} bytes does not fit into the {limit_bytes} bytes that {path} has for it; use a larger device"
    )]
    NoteTooLong {
        /// The device.
        path: PathBuf,
        /// Length of the note.
        bytes: u64,
        /// The longest.
        limit_bytes: u64,
    },
    /// A flush failed: writes since the flush before may be lost.
    #[error("cannot flush {path}: {source}{}", hint(source))]
    Flush {
        /// The device.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The operating system refused something.
    #[error("cannot {action} {path}: {source}{}", hint(source))]
    Io {
        /// The operation that failed.
        action: &'static str,
        /// The device.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

impl BlockDeviceError {
    /// The errno behind the error, or the one that fits it.
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Io { source, .. } | Self::Flush { source, .. } => source.raw_os_error(),
            Self::Missing { .. } => Some(libc::ENOENT),
            Self::NotFound { .. } => Some(libc::ENODEV),
            Self::NotBlockDevice { .. } => Some(libc::ENOTBLK),
            Self::Permission { .. } => Some(libc::EACCES),
            Self::ReadOnly { .. } => Some(libc::EROFS),
            Self::Mounted { .. } | Self::Swap { .. } | Self::Held { .. } | Self::Busy { .. } => {
                Some(libc::EBUSY)
            }
            Self::NoteTooLong { .. } => Some(libc::ENOSPC),
            _ => None,
        }
    }

    /// The device, where the error is of one.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::Missing { path }
            | Self::NotBlockDevice { path, .. }
            | Self::Permission { path }
            | Self::ReadOnly { path }
            | Self::Mounted { path, .. }
            | Self::Swap { path, .. }
            | Self::Held { path, .. }
            | Self::Busy { path, .. }
            | Self::Partitioned { path, .. }
            | Self::NotEmpty { path, .. }
            | Self::NotBlank { path, .. }
            | Self::BelongsToStore { path, .. }
            | Self::OtherDevice { path, .. }
            | Self::NotDestroyed { path, .. }
            | Self::NoLibblkid { path, .. }
            | Self::Probe { path, .. }
            | Self::TooSmall { path, .. }
            | Self::BlockSize { path, .. }
            | Self::Unformatted { path, .. }
            | Self::NewerVersion { path, .. }
            | Self::Damaged { path }
            | Self::FirstBlockLost { path, .. }
            | Self::Overwritten { path, .. }
            | Self::Shrunk { path, .. }
            | Self::NoteTooLong { path, .. }
            | Self::Flush { path, .. }
            | Self::Io { path, .. } => Some(path),
            Self::NotFound { .. } | Self::Clone { .. } | Self::NotUuid { .. } => None,
        }
    }

    /// An error of the operating system on `path`, by kind.
    pub(crate) fn io(action: &'static str, path: &Path, source: io::Error) -> Self {
        let path = path.to_owned();
        match source.raw_os_error() {
            Some(libc::ENOENT | libc::ENOTDIR) => Self::Missing { path },
            Some(libc::EACCES | libc::EPERM) => Self::Permission { path },
            Some(libc::EROFS) => Self::ReadOnly { path },
            _ => Self::Io { action, path, source },
        }
    }
}

/// Items as text, divided by commas.
pub(crate) fn list<T: ToString>(items: &[T]) -> String {
    items.iter().map(T::to_string).collect::<Vec<_>>().join(", ")
}

fn by(processes: &[String]) -> String {
    if processes.is_empty() {
        return "by a process that this user may not see, or by the kernel (a filesystem, RAID or LVM on it)"
            .to_owned();
    }
    format!("by {}", processes.join(", "))
}

fn unreadable(denied: &[PathBuf]) -> String {
    if denied.is_empty() {
        return String::new();
    }
    let names: Vec<_> = denied.iter().map(|path| path.display().to_string()).collect();
    format!("; this user may not read {} (run as root)", names.join(", "))
}

fn hint(source: &io::Error) -> &'static str {
    match source.raw_os_error() {
        Some(libc::EIO) => " (the drive reports a hardware error: check dmesg and the drive's health)",
        Some(libc::ENOSPC) => " (the request passes the end of the device)",
        Some(libc::ENOMEDIUM | libc::ENXIO) => " (there is no medium, or the device is gone: check `lsblk`)",
        _ => " (check dmesg)",
    }
}

/// Result of an operation on a device.
pub type BlockDeviceResult<T> = std::result::Result<T, BlockDeviceError>;
