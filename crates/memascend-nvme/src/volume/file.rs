//! The open file or device that engines transfer on.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use memascend_mem::LeaseSlice;

use crate::error::{file_error, flush_error};
use crate::unforked::Unforked;
use crate::volume::geometry::has_poll_queues;
use crate::{Geometry, Result};

/// The open file or device of a volume, shared with the engine that transfers on it.
#[derive(Debug)]
pub struct VolumeFile {
    pub(super) _unforked: Unforked,
    pub(super) file: File,
    pub(super) path: PathBuf,
    pub(super) geometry: Geometry,
    /// Where the volume's data begins: behind the superblock of a device.
    pub(super) base: u64,
    /// How many bytes of data a device has; None for a file, which grows.
    pub(super) data_bytes: Option<u64>,
    /// The length that the file has unless another program makes the file shorter.
    pub(super) least_bytes: AtomicU64,
    /// Whether its filesystem is mounted read-only: then it is open for reading alone.
    pub(super) read_only: bool,
}

impl VolumeFile {
    /// A file that another program may change.
    pub(crate) fn opened(file: File, path: &Path, geometry: Geometry) -> Self {
        Self {
            _unforked: Unforked::of(&file),
            file,
            path: path.to_owned(),
            geometry,
            base: 0,
            data_bytes: None,
            least_bytes: AtomicU64::new(0),
            read_only: false,
        }
    }

    /// Its metadata.
    pub(crate) fn metadata(&self) -> Result<std::fs::Metadata> {
        self.file.metadata().map_err(|source| file_error("look at", &self.path, source))
    }

    /// Its length in bytes.
    pub(crate) fn length(&self) -> Result<u64> {
        self.metadata().map(|metadata| metadata.len())
    }

    /// The descriptor to transfer on.
    pub fn fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    /// The path, for messages.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Alignments and lengths of transfers.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Where byte `offset` of the volume's data lies in the file or device.
    pub fn position(&self, offset: u64) -> u64 {
        self.base + offset
    }

    /// Whether its drive can be polled for completions.
    pub(crate) fn polls(&self) -> bool {
        has_poll_queues(&self.file)
    }

    /// Waits until everything written is on the medium.
    pub fn sync(&self) -> Result<()> {
        self.file.sync_data().map_err(|source| flush_error(&self.path, source))
    }

    /// Whether the volume can carry out a transfer between `buffer` and `offset`; if not, an errno
    /// and why.
    pub(crate) fn check(
        &self,
        offset: u64,
        buffer: &LeaseSlice,
    ) -> std::result::Result<(), (i32, &'static str)> {
        let (bytes, address) = (buffer.bytes() as u64, buffer.address().as_ptr() as usize);
        let Geometry { block_bytes, memory_bytes, .. } = self.geometry;
        if bytes == 0 {
            return Err((libc::EINVAL, "a transfer of zero bytes"));
        }
        if !(offset | bytes).is_multiple_of(block_bytes as u64) {
            return Err((libc::EINVAL, "offset and length must be multiples of the drive's logical block"));
        }
        if !address.is_multiple_of(memory_bytes) {
            return Err((libc::EINVAL, "the buffer is not aligned as the drive requires"));
        }
        let end = offset.checked_add(bytes).and_then(|end| end.checked_add(self.base));
        match (end, self.data_bytes) {
            (Some(end), Some(data)) if end > self.base + data => {
                return Err((libc::EINVAL, "the transfer leaves the device's data area"));
            }
            (Some(end), _) if i64::try_from(end).is_ok() => {}
            _ => return Err((libc::EFBIG, "the offset is beyond what files can have")),
        }
        Ok(())
    }

    /// Refuses a write where the filesystem is mounted read-only (the system would speak of a bad
    /// descriptor), and where the file is no longer as long as it was made. A read behind the end
    /// fails by itself. A write there would make the file longer again, with zeros in between, so
    /// every write calls this first.
    pub(crate) fn check_writable(&self) -> io::Result<()> {
        if self.read_only {
            return Err(io::Error::from_raw_os_error(libc::EROFS));
        }
        let least_bytes = self.least_bytes.load(Ordering::Acquire);
        if least_bytes > 0 && self.file.metadata()?.len() < least_bytes {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(())
    }
}

/// The hint of a transfer beyond the end of a file that was longer before.
pub(crate) const MADE_SHORTER: &str = "the file or device was made shorter by another program while in use";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::IoError;

    /// What has no medium cannot be flushed, and the system says so.
    #[test]
    fn a_flush_reaches_the_system() {
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let file = File::from(std::os::fd::OwnedFd::from(socket));
        let error =
            VolumeFile::opened(file, Path::new("/a/socket"), Geometry::buffered()).sync().unwrap_err();
        assert!(matches!(error, IoError::Flush { .. }) && error.errno() == Some(libc::EINVAL), "{error}");
    }
}
