//! Opens a formatted device, by its path or by its UUID, for one owner at a time.
//!
//! `O_EXCL` keeps mounts out, and a lock keeps udev out.

use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};

use memascend_mem::LockExt;

use crate::block_device::format::{Standing, described, described_unformatted};
use crate::block_device::node::{self, Node};
use crate::block_device::notes::{FoundNote, Notes, PutError};
use crate::block_device::signatures::Blkid;
use crate::block_device::superblock::{Superblock, VERSION};
use crate::block_device::uuid::parse_uuid;
use crate::unforked::Unforked;
use crate::{BLOCK_BYTES, BlockDeviceError, BlockDeviceResult, Uuid};

/// Prefix of a path that names a device by its UUID.
const BY_UUID: &str = "UUID=";

/// A formatted block device, open for this owner alone: it cannot be mounted, formatted or opened
/// as a store by another process. The kernel ends the exclusive use when the process ends in any
/// way.
#[derive(Debug)]
pub struct Device {
    _unforked: Unforked,
    file: File,
    path: PathBuf,
    superblock: Superblock,
    logical_block_bytes: u32,
    notice: Option<String>,
    /// Writing a note reads the slots first.
    notes: Mutex<Notes>,
}

impl Device {
    /// Opens the device at `path`, or the one that `path` names by its UUID:
    /// `UUID=01234567-89ab-…`. Transfers bypass the page cache.
    ///
    /// # Errors
    /// If the device is not there, in use, not formatted, or not as it was when it was formatted.
    pub fn open(path: impl AsRef<Path>) -> BlockDeviceResult<Self> {
        let path = path.as_ref();
        let Some(uuid) = path.as_os_str().as_bytes().strip_prefix(BY_UUID.as_bytes()) else {
            return Self::open_node(&Node::of(path)?);
        };
        let id = parse_uuid(&String::from_utf8_lossy(uuid))?;
        let device = Self::open_node(&Node::of(&find_device(id)?)?)?;
        // The device may have been formatted again in between.
        if device.id() == id {
            Ok(device)
        } else {
            Err(BlockDeviceError::NotFound { id, looked_at: 1, denied: Vec::new() })
        }
    }

    fn open_node(node: &Node) -> BlockDeviceResult<Self> {
        let path = node.path.clone();
        let failed = |source| BlockDeviceError::io("read", &node.path, source);
        let file = node.claim(libc::O_DIRECT)?;
        let logical_block_bytes = node::logical_block_bytes(&file, &path)?;
        let device_bytes = node::sufficient_bytes(&file, &path)?;
        // libblkid cannot read with O_DIRECT.
        let cached = node.open(libc::O_RDONLY).map_err(failed)?;
        node::forget_cached(&cached);
        let superblock = match Standing::read(&file, device_bytes).map_err(failed)? {
            Standing::Whole(superblock) => superblock,
            Standing::FirstBlockLost(superblock) => {
                let found = described(&cached, &path);
                return Err(first_block_lost(path, &superblock, found));
            }
            Standing::Foreign => {
                let found = described_unformatted(&cached, &path, device_bytes);
                return Err(BlockDeviceError::Unformatted { path, found });
            }
            Standing::Damaged => return Err(BlockDeviceError::Damaged { path }),
            Standing::Newer(version) => {
                return Err(BlockDeviceError::NewerVersion { path, version, supported: VERSION });
            }
        };
        if superblock.device_bytes > device_bytes {
            let formatted_bytes = superblock.device_bytes;
            return Err(BlockDeviceError::Shrunk { path, bytes: device_bytes, formatted_bytes });
        }
        // Some programs write their signature behind the first block, so the superblock stays
        // whole. Without libblkid this is not noticed.
        let signatures = Blkid::load().map_or(Ok(Vec::new()), |blkid| blkid.signatures(&cached, &path))?;
        if !signatures.is_empty() {
            return Err(BlockDeviceError::Overwritten { path, id: superblock.id, found: signatures });
        }
        let notice = (superblock.device_bytes < device_bytes).then(|| {
            format!(
                "{} has grown from {} bytes to {device_bytes} since it was formatted; format it again to use all of it",
                path.display(),
                superblock.device_bytes
            )
        });
        let notes = Mutex::new(Notes::of(&superblock));
        let _unforked = Unforked::of(&file);
        Ok(Self { _unforked, file, path, superblock, logical_block_bytes, notice, notes })
    }

    /// The file to transfer on, open with O_DIRECT.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// The device's path: the one given, or that at which its UUID was found.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The UUID.
    pub fn id(&self) -> Uuid {
        self.superblock.id
    }

    /// Where a store's data begins.
    pub fn data_offset(&self) -> u64 {
        self.superblock.data_offset
    }

    /// How many bytes a store can use from there on.
    pub fn data_bytes(&self) -> u64 {
        self.superblock.data_bytes
    }

    /// The device's logical block size. Every offset and length has to be a multiple of it.
    pub fn logical_block_bytes(&self) -> u32 {
        self.logical_block_bytes
    }

    /// A notice about this device for the user, if any.
    pub fn notice(&self) -> Option<&str> {
        self.notice.as_deref()
    }

    /// The longest note that fits.
    pub fn note_limit_bytes(&self) -> u64 {
        self.notes().limit_bytes()
    }

    /// The note that was written last, unless it was cleared.
    ///
    /// # Errors
    /// If the device cannot be read.
    pub fn read_note(&self) -> BlockDeviceResult<Option<Vec<u8>>> {
        Ok(self.find_note()?.note)
    }

    /// As [`Device::read_note`], and whether there may have been a newer note. The note found is on
    /// the medium when this returns.
    ///
    /// # Errors
    /// If the device cannot be read.
    pub fn find_note(&self) -> BlockDeviceResult<FoundNote> {
        let found = self.notes().find(&self.file);
        found.map_err(|source| BlockDeviceError::io("read the note of", &self.path, source))
    }

    /// Replaces the note. If writing is interrupted, the note before stays. Returns once the note
    /// is on the medium.
    ///
    /// # Errors
    /// If the note is too long or cannot be written.
    pub fn write_note(&self, note: &[u8]) -> BlockDeviceResult<()> {
        let notes = self.notes();
        let (bytes, limit_bytes) = (note.len() as u64, notes.limit_bytes());
        if bytes > limit_bytes {
            return Err(BlockDeviceError::NoteTooLong { path: self.path.clone(), bytes, limit_bytes });
        }
        notes.write(&self.file, note).map_err(|error| self.not_put("write the note of", error))
    }

    /// Removes the note. Returns once the removal is on the medium.
    ///
    /// # Errors
    /// If the device cannot be written.
    pub fn clear_note(&self) -> BlockDeviceResult<()> {
        self.notes().clear(&self.file).map_err(|error| self.not_put("clear the note of", error))
    }

    fn not_put(&self, action: &'static str, error: PutError) -> BlockDeviceError {
        match error {
            PutError::Transfer(source) => BlockDeviceError::io(action, &self.path, source),
            PutError::Flush(source) => BlockDeviceError::Flush { path: self.path.clone(), source },
        }
    }

    fn notes(&self) -> MutexGuard<'_, Notes> {
        self.notes.locked()
    }
}

/// The UUID of the formatted device at `path`, which is not opened for use. `None` if the device is
/// not formatted, or the path names no block device.
///
/// # Errors
/// If there is nothing at the path, or it cannot be read.
pub fn device_uuid(path: &Path) -> BlockDeviceResult<Option<Uuid>> {
    let node = match Node::of(path) {
        Err(BlockDeviceError::NotBlockDevice { .. }) => return Ok(None),
        node => node?,
    };
    let standing = standing_of(&node).map_err(|source| BlockDeviceError::io("read", path, source))?;
    Ok(if let Standing::Whole(superblock) = standing { Some(superblock.id) } else { None })
}

/// The current path of the device with UUID `id`.
///
/// # Errors
/// If there is none, or more than one: a clone has the UUID of its original.
pub fn find_device(id: Uuid) -> BlockDeviceResult<PathBuf> {
    let mut whole = Vec::new();
    let mut lost = None;
    let mut looked_at = 0;
    let mut denied = Vec::new();
    for node in node::all_devices() {
        match standing_of(&node) {
            Ok(standing) => {
                looked_at += 1;
                match standing {
                    // Under RAID or multipath the user means the device on top.
                    Standing::Whole(superblock) if superblock.id == id && node.holders().is_empty() => {
                        whole.push(node.path);
                    }
                    Standing::FirstBlockLost(superblock) if superblock.id == id => {
                        lost = Some((node, superblock));
                    }
                    _ => {}
                }
            }
            Err(error) if matches!(error.raw_os_error(), Some(libc::EACCES | libc::EPERM)) => {
                denied.push(node.path)
            }
            // A drive without a medium, or a device that is being removed.
            Err(_) => {}
        }
    }
    let mut whole = whole.into_iter();
    match (whole.next(), whole.next(), lost) {
        (Some(first), Some(second), _) => Err(BlockDeviceError::Clone { id, first, second }),
        (Some(path), None, _) => Ok(path),
        (None, _, Some((node, superblock))) => {
            let found =
                node.open(libc::O_RDONLY).map(|file| described(&file, &node.path)).unwrap_or_default();
            Err(first_block_lost(node.path, &superblock, found))
        }
        (None, _, None) => Err(BlockDeviceError::NotFound { id, looked_at, denied }),
    }
}

/// Reads the superblocks from the medium, since the kernel's cache of a device can be outdated.
fn standing_of(node: &Node) -> io::Result<Standing> {
    // O_NONBLOCK: do not wait for a drive without a medium.
    let file = node.open(libc::O_RDONLY | libc::O_DIRECT | libc::O_NONBLOCK)?;
    let bytes = node::size_bytes(&file, &node.path).map_err(|_| io::Error::from_raw_os_error(libc::EIO))?;
    if bytes < BLOCK_BYTES as u64 { Ok(Standing::Foreign) } else { Standing::read(&file, bytes) }
}

fn first_block_lost(path: PathBuf, superblock: &Superblock, found: String) -> BlockDeviceError {
    let copy_block = Superblock::copy_offset(superblock.device_bytes) / BLOCK_BYTES as u64;
    BlockDeviceError::FirstBlockLost { path, id: superblock.id, copy_block, found }
}
