//! Formats a block device for memascend, and refuses a device whose content could be missed.
//!
//! A device is presumed to hold data until shown otherwise. Whatever libblkid knows, partitions, mounts,
//! swap, holders and other stores are refused before a byte is written; data without a signature is looked
//! for at both ends and in between (`blank.rs`).

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::block_device::blank::unknown_data;
use crate::block_device::blocks::Blocks;
use crate::block_device::error::list;
use crate::block_device::node::{self, Node};
use crate::block_device::notes::Notes;
use crate::block_device::signatures::Blkid;
use crate::block_device::superblock::{MIB, NotSuperblock, Superblock};
use crate::random_uuid;
use crate::{BLOCK_BYTES, BlockDeviceError, BlockDeviceResult, Content, Uuid};

/// A device that was formatted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Formatted {
    /// The device, by the path given.
    pub path: PathBuf,
    /// Its new UUID.
    pub id: Uuid,
    /// Bytes that a store can use.
    pub data_bytes: u64,
    /// The destroyed content of the device.
    pub destroyed: Vec<Content>,
}

/// Writes a superblock with a new UUID onto a block device. A device with any content is refused
/// unless `destroy` names the same device: with a signature, or with data at its beginning, its end
/// or at places in between. A device in use is always refused. Nothing is written before all checks
/// have passed.
///
/// # Errors
/// Each reason to refuse is a variant of [`BlockDeviceError`].
pub fn format_device(path: &Path, destroy: Option<&Path>) -> BlockDeviceResult<Formatted> {
    let node = Node::of(path)?;
    if let Some(destroy) = destroy
        && Node::of(destroy)?.number != node.number
    {
        return Err(BlockDeviceError::OtherDevice { path: path.to_owned(), destroy: destroy.to_owned() });
    }
    // Not O_DIRECT: libblkid reads through this file, and the device cannot be opened a second
    // time.
    let file = node.claim(0)?;
    let device_bytes = node::sufficient_bytes(&file, path)?;
    let logical_block_bytes = node::logical_block_bytes(&file, path)?;
    node::forget_cached(&file);
    let failed = |action| move |source| BlockDeviceError::io(action, path, source);

    let id = random_uuid().map_err(failed("choose a UUID for"))?;
    let superblock = Superblock::plan(id, device_bytes, logical_block_bytes);
    let partitions = node.partitions();
    let destroyed = if destroy.is_some() {
        contents(&node, &file, device_bytes)?
    } else {
        refuse_contents(&node, &file, device_bytes)?;
        Vec::new()
    };
    if !partitions.is_empty() {
        // This fails if a partition is open, before anything is overwritten.
        node::reread_partitions(&file, &node)?;
    }

    empty(&file, &superblock).map_err(failed("overwrite"))?;
    if destroy.is_some() {
        wipe_rest(&file, path)?;
    }
    let encoded = Blocks::from(superblock.encode());
    encoded
        .write(&file, 0)
        .and_then(|()| encoded.write(&file, Superblock::copy_offset(device_bytes)))
        .and_then(|()| file.sync_all())
        .map_err(failed("write the superblock of"))?;
    if !partitions.is_empty() {
        node::reread_partitions(&file, &node)?;
    }
    Ok(Formatted { path: path.to_owned(), id, data_bytes: superblock.data_bytes, destroyed })
}

/// Refuses a device that is not empty.
fn refuse_contents(node: &Node, file: &File, device_bytes: u64) -> BlockDeviceResult<()> {
    let path = node.path.clone();
    let partitions = node.partitions();
    if !partitions.is_empty() {
        return Err(BlockDeviceError::Partitioned { path, partitions });
    }
    if let Some(content) = store_content(file, &path, device_bytes)? {
        return Err(BlockDeviceError::BelongsToStore { path, content });
    }
    let blkid =
        Blkid::load().map_err(|reason| BlockDeviceError::NoLibblkid { path: path.clone(), reason })?;
    let signatures = blkid.signatures(file, &path)?;
    if !signatures.is_empty() {
        return Err(BlockDeviceError::NotEmpty { path, found: signatures });
    }
    match unknown_data(file, device_bytes) {
        Ok(None) => Ok(()),
        Ok(Some(data)) => Err(BlockDeviceError::NotBlank { path, data }),
        Err(source) => Err(BlockDeviceError::io("read", &path, source)),
    }
}

/// The content found on a device. Without libblkid, filesystems and the like are data of an unknown kind.
fn contents(node: &Node, file: &File, device_bytes: u64) -> BlockDeviceResult<Vec<Content>> {
    let mut contents = Vec::new();
    let partitions = node.partitions();
    if !partitions.is_empty() {
        contents.push(Content::Partitions(partitions));
    }
    contents.extend(store_content(file, &node.path, device_bytes)?);
    if let Ok(blkid) = Blkid::load() {
        contents.extend(blkid.signatures(file, &node.path)?.into_iter().map(Content::Signature));
    }
    if contents.is_empty() {
        // A block that cannot be read is no reason to keep a device that is to be destroyed.
        contents.extend(unknown_data(file, device_bytes).unwrap_or_default().map(Content::Unknown));
    }
    Ok(contents)
}

fn store_content(file: &File, path: &Path, device_bytes: u64) -> BlockDeviceResult<Option<Content>> {
    let failed = |source| BlockDeviceError::io("read", path, source);
    Ok(match Standing::read(file, device_bytes).map_err(failed)? {
        Standing::Foreign => None,
        Standing::Whole(superblock) | Standing::FirstBlockLost(superblock) => {
            // A device that has shrunk may have lost a part of the note area.
            let note = Notes::of(&superblock).read(file).unwrap_or_default();
            Some(Content::Store { id: superblock.id, note_bytes: note.map(|note| note.len() as u64) })
        }
        Standing::Damaged => Some(Content::DamagedStore),
        Standing::Newer(version) => Some(Content::NewerStore { version }),
    })
}

/// Zeroes the areas that can hold a signature: the first MiB, the headers of the notes, and the last MiB.
fn empty(file: &File, superblock: &Superblock) -> io::Result<()> {
    let zeros = Blocks::zeroed(MIB as usize)?;
    let end = superblock.device_bytes - MIB;
    file.write_all_at(zeros.bytes(), 0)?;
    for slot in Notes::of(superblock).slot_offsets() {
        file.write_all_at(&zeros.bytes()[..BLOCK_BYTES], slot)?;
    }
    file.write_all_at(zeros.bytes(), end)?;
    file.sync_all()
}

/// Removes signatures that lie outside the zeroed areas, and checks that none is left.
fn wipe_rest(file: &File, path: &Path) -> BlockDeviceResult<()> {
    // Without libblkid the check is skipped: the user was told so, and named the device to be
    // destroyed.
    let Ok(blkid) = Blkid::load() else { return Ok(()) };
    if blkid.signatures(file, path)?.is_empty() {
        return Ok(());
    }
    blkid.wipe(file, path)?;
    file.sync_all().map_err(|source| BlockDeviceError::io("overwrite", path, source))?;
    let found = blkid.signatures(file, path)?;
    if found.is_empty() {
        Ok(())
    } else {
        Err(BlockDeviceError::NotDestroyed { path: path.to_owned(), found })
    }
}

/// The superblocks of a device.
#[derive(Debug)]
pub(crate) enum Standing {
    /// There is no memascend superblock.
    Foreign,
    /// The first superblock is whole.
    Whole(Superblock),
    /// Only the copy is whole.
    FirstBlockLost(Superblock),
    /// The superblock and its copy are damaged.
    Damaged,
    /// The superblock has a later version.
    Newer(u32),
}

impl Standing {
    pub(crate) fn read(file: &File, device_bytes: u64) -> io::Result<Self> {
        let primary = Superblock::decode(Blocks::read(file, 0, BLOCK_BYTES)?.first());
        if let Ok(superblock) = primary {
            return Ok(Self::Whole(superblock));
        }
        let copy = Superblock::decode(
            Blocks::read(file, Superblock::copy_offset(device_bytes), BLOCK_BYTES)?.first(),
        );
        Ok(match (primary, copy) {
            (Err(NotSuperblock::Newer(version)), _) | (_, Err(NotSuperblock::Newer(version))) => {
                Self::Newer(version)
            }
            // The end of a disk can be the end of its last partition, whose copy has another size.
            (_, Ok(superblock)) if superblock.device_bytes == device_bytes => {
                Self::FirstBlockLost(superblock)
            }
            (Err(NotSuperblock::Damaged), _) | (_, Err(NotSuperblock::Damaged)) => Self::Damaged,
            _ => Self::Foreign,
        })
    }
}

/// Content of a device without a superblock, as text.
pub(crate) fn described_unformatted(file: &File, path: &Path, device_bytes: u64) -> String {
    let signatures = Blkid::load().map(|blkid| blkid.signatures(file, path));
    if signatures.is_ok_and(|found| found.is_ok_and(|found| !found.is_empty())) {
        return described(file, path);
    }
    match unknown_data(file, device_bytes) {
        Ok(None) => "nothing where it was looked at".to_owned(),
        Ok(Some(data)) => data.to_string(),
        Err(error) => format!("what cannot be read ({error})"),
    }
}

/// Other content of a device, as text.
pub(crate) fn described(file: &File, path: &Path) -> String {
    match Blkid::load().map(|blkid| blkid.signatures(file, path)) {
        Ok(Ok(signatures)) if signatures.is_empty() => "nothing that libblkid knows".to_owned(),
        Ok(Ok(signatures)) => list(&signatures),
        Ok(Err(_)) | Err(_) => "unknown content (is libblkid installed?)".to_owned(),
    }
}
