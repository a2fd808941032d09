//! Block devices as the kernel shows them: numbers, sizes, partitions, and who uses them.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString, c_int};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use crate::block_device::superblock::DEVICE_BYTES_MIN;
use crate::{BLOCK_BYTES, BlockDeviceError, BlockDeviceResult};

/// Requests of `linux/fs.h` that the libc crate does not name. They are `_IO(0x12, n)`, which has
/// the bits of "no argument" in another place on a few architectures, as `BLKSSZGET` has.
const NO_ARGUMENT: libc::Ioctl = libc::BLKSSZGET & !0xffff;
const BLKROGET: libc::Ioctl = NO_ARGUMENT | 0x125e;
const BLKRRPART: libc::Ioctl = NO_ARGUMENT | 0x125f;
const BLKFLSBUF: libc::Ioctl = NO_ARGUMENT | 0x1261;

/// How often a lock is tried, and the pause in between: udev locks a device that was just closed
/// while it probes the device's content.
const LOCK_TRIES: u32 = 100;
const LOCK_PAUSE: Duration = Duration::from_millis(10);

/// The path of a block device and the number behind it.
#[derive(Debug, Clone)]
pub(crate) struct Node {
    pub path: PathBuf,
    pub number: u64,
}

impl Node {
    /// The block device at `path`.
    pub(crate) fn of(path: &Path) -> BlockDeviceResult<Self> {
        let metadata = fs::metadata(path).map_err(|source| BlockDeviceError::io("look at", path, source))?;
        let kind = metadata.file_type();
        let (kind, remedy) = if kind.is_block_device() {
            return Ok(Self { path: path.to_owned(), number: metadata.rdev() });
        } else if kind.is_dir() {
            ("a directory", "a directory needs no formatting: give it as a store as it is")
        } else if kind.is_char_device() {
            ("a character device", "an NVMe drive's block device ends in its namespace, as /dev/nvme0n1 does")
        } else if kind.is_file() {
            ("a regular file", "give its directory as a store, which needs no formatting")
        } else {
            ("a socket or a pipe", "`lsblk` lists the block devices of this machine")
        };
        Err(BlockDeviceError::NotBlockDevice { path: path.to_owned(), kind, remedy })
    }

    /// Opens the device for reading, and for writing if `flags` says so.
    pub(crate) fn open(&self, flags: c_int) -> io::Result<File> {
        let write = flags & libc::O_ACCMODE == libc::O_RDWR;
        let flags = flags & !libc::O_ACCMODE | libc::O_CLOEXEC;
        let file = OpenOptions::new().read(true).write(write).custom_flags(flags).open(&self.path)?;
        // The path may name another device by now.
        if file.metadata()?.rdev() == self.number {
            Ok(file)
        } else {
            Err(io::Error::from_raw_os_error(libc::ENXIO))
        }
    }

    /// Opens the device for reading and writing, for this process alone. O_EXCL keeps out
    /// filesystems, RAID and other programs that use it. The lock keeps udev from probing the
    /// device (systemd's convention).
    pub(crate) fn claim(&self, flags: c_int) -> BlockDeviceResult<File> {
        let failed = |source| BlockDeviceError::io("open", &self.path, source);
        self.refuse_uses()?;
        let reader = self.open(libc::O_RDONLY).map_err(failed)?;
        if int_of(&reader, BLKROGET).map_err(failed)? != 0 {
            return Err(BlockDeviceError::ReadOnly { path: self.path.clone() });
        }
        drop(reader);
        // Retry for a while: udev briefly locks a device that was closed, and the kernel releases
        // the device of an io_uring only some time after its process has ended.
        for _ in 0..LOCK_TRIES {
            match self.open(libc::O_RDWR | libc::O_EXCL | flags) {
                Ok(file) => {
                    // SAFETY: a plain system call on a descriptor that lives.
                    if unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } == 0 {
                        return Ok(file);
                    }
                    let source = io::Error::last_os_error();
                    if !matches!(source.raw_os_error(), Some(libc::EWOULDBLOCK | libc::EINTR)) {
                        return Err(BlockDeviceError::io("lock", &self.path, source));
                    }
                }
                Err(source) if source.raw_os_error() == Some(libc::EBUSY) => {}
                Err(source) => return Err(failed(source)),
            }
            thread::sleep(LOCK_PAUSE);
        }
        Err(self.busy())
    }

    /// The error for a device in use, which names the user as precisely as possible.
    fn busy(&self) -> BlockDeviceError {
        match self.refuse_uses() {
            Err(used) => used,
            Ok(()) => {
                BlockDeviceError::Busy { path: self.path.clone(), processes: processes(&self.numbers()) }
            }
        }
    }

    /// Names of the device's partitions that the kernel knows.
    pub(crate) fn partitions(&self) -> Vec<String> {
        let entries = fs::read_dir(sysfs(self.number)).into_iter().flatten().flatten();
        let mut names: Vec<String> = entries
            .filter(|entry| entry.path().join("partition").exists())
            .map(|entry| device_name(&entry.file_name()))
            .collect();
        names.sort();
        names
    }

    /// Numbers of the device and of its partitions.
    fn numbers(&self) -> BTreeSet<u64> {
        let entries = fs::read_dir(sysfs(self.number)).into_iter().flatten().flatten();
        let partitions = entries
            .filter(|entry| entry.path().join("partition").exists())
            .filter_map(|entry| number_in(&entry.path()));
        partitions.chain([self.number]).collect()
    }

    /// Devices on top of this one or of its partitions: LVM, RAID, dm-crypt, and loop devices.
    pub(crate) fn holders(&self) -> Vec<String> {
        let numbers = self.numbers();
        let mut holders: Vec<String> = numbers
            .iter()
            .flat_map(|&number| fs::read_dir(sysfs(number).join("holders")).into_iter().flatten().flatten())
            .map(|entry| {
                // Device-mapper's own names are more telling than dm-0.
                let name = fs::read_to_string(entry.path().join("dm/name")).unwrap_or_default();
                let device = device_name(&entry.file_name());
                if name.trim().is_empty() { device } else { format!("{device} ({})", name.trim()) }
            })
            .collect();
        for entry in fs::read_dir("/sys/class/block").into_iter().flatten().flatten() {
            let backing = fs::read(entry.path().join("loop/backing_file")).unwrap_or_default();
            let backing = PathBuf::from(OsString::from_vec(backing.trim_ascii_end().to_vec()));
            if block_number(&backing).is_some_and(|number| numbers.contains(&number)) {
                holders.push(device_name(&entry.file_name()));
            }
        }
        holders.sort();
        holders.dedup();
        holders
    }

    /// Refuses a device that is mounted, swapped to, or under another device.
    fn refuse_uses(&self) -> BlockDeviceResult<()> {
        let path = self.path.clone();
        let numbers = self.numbers();
        if let Some((number, mount_point)) = mounts().into_iter().find(|(number, _)| numbers.contains(number))
        {
            return Err(BlockDeviceError::Mounted { path, device: self.name_of(number), mount_point });
        }
        let swaps = fs::read("/proc/swaps").unwrap_or_default();
        let swap = swaps.split(|&byte| byte == b'\n').skip(1).find_map(|line| {
            let area = unescape(line.split(|byte| byte.is_ascii_whitespace()).next()?);
            block_number(&area).filter(|number| numbers.contains(number)).map(|_| area)
        });
        if let Some(device) = swap {
            return Err(BlockDeviceError::Swap { path, device });
        }
        let holders = self.holders();
        if holders.is_empty() { Ok(()) } else { Err(BlockDeviceError::Held { path, holders }) }
    }

    fn name_of(&self, number: u64) -> PathBuf {
        if number == self.number {
            return self.path.clone();
        }
        let name = fs::canonicalize(sysfs(number)).ok().and_then(|path| path.file_name().map(device_name));
        name.map_or_else(|| self.path.clone(), PathBuf::from)
    }
}

/// The block devices that the kernel knows and that have a size, by their names in /dev.
pub(crate) fn all_devices() -> Vec<Node> {
    let mut nodes: Vec<Node> = fs::read_dir("/sys/class/block")
        .into_iter()
        .flatten()
        .flatten()
        .filter(|entry| {
            fs::read_to_string(entry.path().join("size")).is_ok_and(|sectors| sectors.trim() != "0")
        })
        .filter_map(|entry| {
            let node =
                Node { path: device_name(&entry.file_name()).into(), number: number_in(&entry.path())? };
            // In a container /dev has fewer devices than /sys.
            (block_number(&node.path) == Some(node.number)).then_some(node)
        })
        .collect();
    nodes.sort_by(|a, b| a.path.cmp(&b.path));
    nodes
}

/// Size of an open device.
pub(crate) fn size_bytes(file: &File, path: &Path) -> BlockDeviceResult<u64> {
    let mut file = file;
    file.seek(SeekFrom::End(0)).map_err(|source| BlockDeviceError::io("measure", path, source))
}

/// The logical block size of a device.
///
/// # Errors
/// If memascend cannot use that size.
pub(crate) fn logical_block_bytes(file: &File, path: &Path) -> BlockDeviceResult<u32> {
    let bytes =
        int_of(file, libc::BLKSSZGET).map_err(|source| BlockDeviceError::io("measure", path, source))?;
    match u32::try_from(bytes) {
        Ok(bytes) if (512..=BLOCK_BYTES as u32).contains(&bytes) && bytes.is_power_of_two() => Ok(bytes),
        _ => Err(BlockDeviceError::BlockSize { path: path.to_owned(), bytes: bytes as u64 }),
    }
}

/// Size of a device.
///
/// # Errors
/// If the device is too small to be formatted.
pub(crate) fn sufficient_bytes(file: &File, path: &Path) -> BlockDeviceResult<u64> {
    let bytes = size_bytes(file, path)?;
    if bytes < DEVICE_BYTES_MIN {
        return Err(BlockDeviceError::TooSmall {
            path: path.to_owned(),
            bytes,
            minimum_bytes: DEVICE_BYTES_MIN,
        });
    }
    Ok(bytes)
}

/// Drops the kernel's cache of a device, because a partition and its disk are cached separately. A
/// precaution: failures are ignored.
pub(crate) fn forget_cached(file: &File) {
    // SAFETY: the request takes no argument. It needs root.
    unsafe { libc::ioctl(file.as_raw_fd(), BLKFLSBUF, 0) };
    // SAFETY: a plain system call on a descriptor that lives. It needs no right, and leaves what is
    // in use.
    unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
}

/// Makes the kernel read the partition table anew.
pub(crate) fn reread_partitions(file: &File, node: &Node) -> BlockDeviceResult<()> {
    // SAFETY: the request takes no argument.
    if unsafe { libc::ioctl(file.as_raw_fd(), BLKRRPART, 0) } == 0 {
        return Ok(());
    }
    let source = io::Error::last_os_error();
    if source.raw_os_error() == Some(libc::EBUSY) {
        // A partition is open without O_EXCL.
        let mut numbers = node.numbers();
        numbers.remove(&node.number);
        return Err(BlockDeviceError::Busy { path: node.path.clone(), processes: processes(&numbers) });
    }
    Err(BlockDeviceError::io("reread the partition table of", &node.path, source))
}

fn int_of(file: &File, request: libc::Ioctl) -> io::Result<c_int> {
    let mut value: c_int = 0;
    // SAFETY: the requests used here write one int.
    if unsafe { libc::ioctl(file.as_raw_fd(), request, &mut value) } == 0 {
        Ok(value)
    } else {
        Err(io::Error::last_os_error())
    }
}

fn sysfs(number: u64) -> PathBuf {
    PathBuf::from(format!("/sys/dev/block/{}:{}", libc::major(number), libc::minor(number)))
}

/// sysfs writes a slash in a device's name as an exclamation mark.
fn device_name(name: &OsStr) -> String {
    format!("/dev/{}", name.to_string_lossy().replace('!', "/"))
}

fn number_in(directory: &Path) -> Option<u64> {
    parse_number(fs::read_to_string(directory.join("dev")).ok()?.trim())
}

fn parse_number(text: &str) -> Option<u64> {
    let (major, minor) = text.split_once(':')?;
    Some(libc::makedev(major.parse().ok()?, minor.parse().ok()?))
}

fn block_number(path: &Path) -> Option<u64> {
    let metadata = fs::metadata(path).ok()?;
    metadata.file_type().is_block_device().then(|| metadata.rdev())
}

/// Numbers of the mounted devices, and where they are mounted.
fn mounts() -> Vec<(u64, PathBuf)> {
    let table = fs::read("/proc/self/mountinfo").unwrap_or_default();
    let mut mounts = Vec::new();
    for line in table.split(|&byte| byte == b'\n') {
        let fields: Vec<&[u8]> = line.split(|&byte| byte == b' ').collect();
        let [_, _, number, _, mount_point, _, optional @ ..] = fields.as_slice() else { continue };
        let mount_point = unescape(mount_point);
        // Btrfs mounts have a number that no device has; their source is the device.
        let source = optional.iter().position(|&field| field == b"-").and_then(|dash| optional.get(dash + 2));
        let numbers = [
            std::str::from_utf8(number).ok().and_then(parse_number),
            source.and_then(|source| block_number(&unescape(source))),
        ];
        mounts.extend(numbers.into_iter().flatten().map(|number| (number, mount_point.clone())));
    }
    mounts
}

/// The kernel writes blanks and backslashes in paths as three octal digits.
fn unescape(text: &[u8]) -> PathBuf {
    let mut plain = Vec::with_capacity(text.len());
    let mut unread = text;
    while let Some((&first, after)) = unread.split_first() {
        let code =
            after.get(..3).filter(|_| first == b'\\').and_then(|digits| std::str::from_utf8(digits).ok());
        match code.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) => {
                plain.push(byte);
                unread = &after[3..];
            }
            None => {
                plain.push(first);
                unread = after;
            }
        }
    }
    PathBuf::from(OsString::from_vec(plain))
}

/// Processes that have one of the devices open, as far as this user may see.
fn processes(numbers: &BTreeSet<u64>) -> Vec<String> {
    let mut users = Vec::new();
    for process in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(id) = process.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        let descriptors = fs::read_dir(process.path().join("fd")).into_iter().flatten().flatten();
        let has_it = descriptors.map(|entry| entry.path()).any(|path| {
            // Only paths in /dev are examined: a call on a network filesystem can take long.
            fs::read_link(&path).is_ok_and(|target| target.as_os_str().as_bytes().starts_with(b"/dev/"))
                && block_number(&path).is_some_and(|number| numbers.contains(&number))
        });
        if has_it {
            let name = fs::read_to_string(process.path().join("comm")).unwrap_or_default();
            users.push(format!("process {id} ({})", name.trim()));
        }
    }
    users
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_unescaped_as_the_kernel_escapes_them() {
        assert_eq!(unescape(br"/mnt/a\040b\134c"), Path::new(r"/mnt/a b\c"));
        assert_eq!(unescape(br"/mnt/\0"), Path::new(r"/mnt/\0"));
        assert_eq!(unescape(br"/mnt/\999"), Path::new(r"/mnt/\999"));
    }

    #[test]
    fn what_is_not_a_block_device_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("file");
        fs::write(&file, b"").unwrap();
        for (path, kind) in [
            (directory.path(), "a directory"),
            (&file, "a regular file"),
            (Path::new("/dev/null"), "a character device"),
        ] {
            let error = Node::of(path).unwrap_err();
            assert!(
                error.to_string().contains(kind) && error.to_string().contains(path.to_str().unwrap()),
                "{error}"
            );
            assert_eq!(error.errno(), Some(libc::ENOTBLK));
        }
        let error = Node::of(&directory.path().join("missing")).unwrap_err();
        assert!(matches!(error, BlockDeviceError::Missing { .. }), "{error}");
    }
}
