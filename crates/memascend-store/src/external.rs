//! Files outside the store, from which tensors are read where they lie.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use memascend_nvme::{BLOCK_BYTES, IoError, Operation};

use crate::checksums::checksum;
use crate::{Result, StoreError};

/// A file outside the store from which tensors are read where they lie, at any offset. The file is
/// never written, and has to stay as it is: every read compares its size and the time of its last
/// change, and checksums where there are any.
#[derive(Debug)]
pub struct ExternalFile {
    path: PathBuf,
    file: File,
    /// Reads bypass the page cache, in whole blocks.
    direct: bool,
    bytes: u64,
    modified_ns: i128,
    /// The checksums of its blocks, which are all whole.
    sums: Option<Box<[u32]>>,
    read_bytes: AtomicU64,
}

/// The checksums of the blocks of some bytes, as [`ExternalFile::with_sums`] takes them. The last block may be shorter.
pub fn block_sums(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks(BLOCK_BYTES).map(checksum).collect()
}

impl ExternalFile {
    /// Opens `path`, which had `bytes` bytes and was last changed at `modified_ns` (since 1970)
    /// when its header was read. With `direct`, reads bypass the page cache where the filesystem
    /// allows it.
    ///
    /// # Errors
    /// If it cannot be opened, or has changed since.
    pub fn open(path: &Path, bytes: u64, modified_ns: i128, direct: bool) -> Result<Self> {
        let open = |flags| OpenOptions::new().read(true).custom_flags(libc::O_CLOEXEC | flags).open(path);
        let (file, direct) = match direct.then(|| open(libc::O_DIRECT)) {
            Some(Ok(file)) if reads_directly(&file) => (file, true),
            _ => (
                open(0).map_err(|source| IoError::File { action: "open", path: path.to_owned(), source })?,
                false,
            ),
        };
        let path = path.to_owned();
        let sums = None;
        let opened = Self { path, file, direct, bytes, modified_ns, sums, read_bytes: AtomicU64::new(0) };
        opened.check()?;
        Ok(opened)
    }

    /// Has every block that is read compared with its checksum. The path for messages is the one that
    /// a link leads to, such as an open file without a name.
    ///
    /// # Panics
    /// If the file does not have as many blocks, all whole.
    pub fn with_sums(mut self, sums: Vec<u32>) -> Self {
        assert_eq!(self.bytes, (sums.len() * BLOCK_BYTES) as u64, "whole blocks");
        self.sums = Some(sums.into());
        if let Ok(target) = std::fs::read_link(&self.path) {
            self.path = target;
        }
        self
    }

    /// The path, for messages.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether reads bypass the page cache.
    pub fn is_direct(&self) -> bool {
        self.direct
    }

    /// Bytes read so far.
    pub fn read_bytes(&self) -> u64 {
        self.read_bytes.load(Ordering::Relaxed)
    }

    /// Fills `target` with the bytes at `offset`. Direct reads go through `window`, which is
    /// aligned to blocks in memory and holds at least one block.
    ///
    /// # Errors
    /// If a read fails, or the file has changed.
    ///
    /// # Panics
    /// If `window` is smaller than a block.
    pub fn read(&self, offset: u64, target: &mut [u8], window: &mut [u8]) -> Result<()> {
        assert!(window.len() >= BLOCK_BYTES, "a window of {} bytes", window.len());
        self.check_range(offset, target.len())?;
        let mut done = 0;
        while done < target.len() {
            let (position, left) = (offset + done as u64, &mut target[done..]);
            done += if self.in_blocks() {
                let room =
                    window.len() / BLOCK_BYTES * BLOCK_BYTES - (position % BLOCK_BYTES as u64) as usize;
                let count = room.min(left.len());
                left[..count].copy_from_slice(self.fill(position, count, window)?);
                count
            } else {
                match self.read_at(position, left)? {
                    0 => return Err(self.changed()),
                    read => read,
                }
            };
        }
        self.read_bytes.fetch_add(target.len() as u64, Ordering::Relaxed);
        // Checked last, so that a change during the read is noticed too.
        self.check()
    }

    /// Reads `bytes` bytes at `offset` into the blocks of `window`, as a direct read takes them, and returns them there.
    /// The window begins with a block in memory.
    ///
    /// # Errors
    /// If a read fails, or the file has changed.
    ///
    /// # Panics
    /// If the window is smaller than the blocks that have the bytes ([`blocks_of`](Self::blocks_of)).
    pub fn read_in_place<'a>(&self, offset: u64, bytes: usize, window: &'a mut [u8]) -> Result<&'a [u8]> {
        self.check_range(offset, bytes)?;
        let found = self.fill(offset, bytes, window)?;
        self.read_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        // Checked last, so that a change during the read is noticed too.
        self.check()?;
        Ok(found)
    }

    /// Whether reads are of blocks: direct ones, and those that are compared with sums of blocks.
    fn in_blocks(&self) -> bool {
        self.direct || self.sums.is_some()
    }

    /// Returns an error if the file is too short for `bytes` bytes at `offset`.
    fn check_range(&self, offset: u64, bytes: usize) -> Result<()> {
        let end = offset.checked_add(bytes as u64);
        if end.is_none_or(|end| end > self.bytes) { Err(self.changed()) } else { Ok(()) }
    }

    /// Reads the blocks that have `bytes` bytes at `offset` into `window`, and returns the bytes there.
    fn fill<'a>(&self, offset: u64, bytes: usize, window: &'a mut [u8]) -> Result<&'a [u8]> {
        let window = &mut window[..Self::blocks_of(offset, bytes)];
        let shift = (offset % BLOCK_BYTES as u64) as usize;
        let mut done = 0;
        while bytes > 0 && done < shift + bytes {
            let position = offset - shift as u64 + done as u64;
            let read = self.read_at(position, &mut window[done..])?;
            let end = done + self.compare(position, &window[done..done + read])?;
            // The next read begins with a block.
            let next =
                if self.in_blocks() && end < shift + bytes { end / BLOCK_BYTES * BLOCK_BYTES } else { end };
            if next <= done {
                return Err(self.changed());
            }
            done = next;
        }
        Ok(&window[shift..shift + bytes])
    }

    /// The bytes of the blocks that have `bytes` bytes at `offset`.
    pub fn blocks_of(offset: u64, bytes: usize) -> usize {
        ((offset % BLOCK_BYTES as u64) as usize + bytes).next_multiple_of(BLOCK_BYTES)
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> Result<usize> {
        loop {
            // SAFETY: the range is writable memory of the buffer's length.
            let read = unsafe {
                libc::pread(
                    self.file.as_raw_fd(),
                    buffer.as_mut_ptr().cast(),
                    buffer.len(),
                    i64::try_from(offset).expect("offsets fit in i64"),
                )
            };
            let Ok(read) = usize::try_from(read) else {
                let source = io::Error::last_os_error();
                if source.kind() == io::ErrorKind::Interrupted {
                    continue;
                }
                let (path, bytes) = (self.path.clone(), buffer.len());
                return Err(IoError::Transfer {
                    operation: Operation::Read,
                    path,
                    offset,
                    bytes,
                    source,
                    hint: "",
                }
                .into());
            };
            return Ok(read);
        }
    }

    /// Compares the blocks in `read`, which are from `position` on, with their checksums. Returns the bytes
    /// that may be used.
    fn compare(&self, position: u64, read: &[u8]) -> Result<usize> {
        let Some(sums) = &self.sums else { return Ok(read.len()) };
        let first = (position / BLOCK_BYTES as u64) as usize;
        let blocks = read.chunks_exact(BLOCK_BYTES);
        let whole = blocks.len() * BLOCK_BYTES;
        match blocks.zip(&sums[first..]).position(|(block, &sum)| checksum(block) != sum) {
            None => Ok(whole),
            Some(number) => {
                let offset = position + (number * BLOCK_BYTES) as u64;
                Err(StoreError::DamagedBeside { path: self.path.clone(), offset })
            }
        }
    }

    fn check(&self) -> Result<()> {
        let found = self.file.metadata().map_err(|source| IoError::File {
            action: "look at",
            path: self.path.clone(),
            source,
        })?;
        let modified_ns = i128::from(found.mtime()) * 1_000_000_000 + i128::from(found.mtime_nsec());
        if (found.len(), modified_ns) == (self.bytes, self.modified_ns) {
            Ok(())
        } else {
            Err(self.changed())
        }
    }

    fn changed(&self) -> StoreError {
        StoreError::Changed { path: self.path.clone() }
    }
}

/// Whether the first block can be read without the page cache: some filesystems refuse it only
/// then.
fn reads_directly(file: &File) -> bool {
    #[repr(align(4096))]
    struct Block([u8; BLOCK_BYTES]);
    let mut block = Block([0; BLOCK_BYTES]);
    // SAFETY: the block is writable memory of that length.
    unsafe { libc::pread(file.as_raw_fd(), block.0.as_mut_ptr().cast(), BLOCK_BYTES, 0) >= 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(align(4096))]
    #[derive(Clone)]
    struct Window([u8; 2 * BLOCK_BYTES]);

    fn stamp(path: &Path) -> (u64, i128) {
        let found = std::fs::metadata(path).unwrap();
        (found.len(), i128::from(found.mtime()) * 1_000_000_000 + i128::from(found.mtime_nsec()))
    }

    /// In the directory of the test binary: /tmp may refuse direct reads.
    fn file_of(contents: &[u8]) -> tempfile::NamedTempFile {
        let here = std::env::current_exe().unwrap();
        let file = tempfile::NamedTempFile::new_in(here.parent().unwrap()).unwrap();
        std::fs::write(file.path(), contents).unwrap();
        file
    }

    /// Reads into a window that is as large as it has to be.
    fn in_place(external: &ExternalFile, offset: u64, bytes: usize) -> Result<Vec<u8>> {
        let blocks = ExternalFile::blocks_of(offset, bytes).div_ceil(2 * BLOCK_BYTES);
        let mut windows = vec![Window([0; 2 * BLOCK_BYTES]); blocks];
        // SAFETY: windows are bytes, one after the other.
        let window =
            unsafe { std::slice::from_raw_parts_mut(windows.as_mut_ptr().cast(), 2 * BLOCK_BYTES * blocks) };
        Ok(external.read_in_place(offset, bytes, window)?.to_vec())
    }

    #[test]
    fn any_range_is_read_as_it_is() {
        let contents: Vec<u8> = (0..5 * BLOCK_BYTES + 123).map(|index| (index * 7 % 251) as u8).collect();
        let file = file_of(&contents);
        let (bytes, modified_ns) = stamp(file.path());
        let mut window = Window([0; 2 * BLOCK_BYTES]);
        for direct in [true, false] {
            let external = ExternalFile::open(file.path(), bytes, modified_ns, direct).unwrap();
            assert!(direct || !external.is_direct());
            let mut total = 0;
            for (start, end) in [
                (0, 1),
                (8, 4096),
                (4095, 4097),
                (4096, 8192),
                (1, contents.len()),
                (contents.len() - 5, contents.len()),
                (77, 77),
            ] {
                let mut target = vec![0xAB; end - start];
                external.read(start as u64, &mut target, &mut window.0).unwrap();
                assert_eq!(target, contents[start..end], "{start}..{end}");
                let read = in_place(&external, start as u64, end - start).unwrap();
                assert_eq!(read, contents[start..end], "{start}..{end} in place");
                total += 2 * (end - start);
            }
            assert_eq!(external.read_bytes(), total as u64);
        }
    }

    #[test]
    fn a_file_that_is_not_what_it_was_is_refused() {
        let file = file_of(&[1; 3 * BLOCK_BYTES]);
        let (bytes, modified_ns) = stamp(file.path());
        let mut window = Window([0; 2 * BLOCK_BYTES]);
        let mut target = [0; 10];
        for direct in [true, false] {
            let external = ExternalFile::open(file.path(), bytes, modified_ns, direct).unwrap();
            external.read(2 * BLOCK_BYTES as u64, &mut target, &mut window.0).unwrap();
            // Beyond the end.
            for beyond in [bytes - 5, bytes, i64::MAX as u64, u64::MAX - 3, u64::MAX] {
                let in_place = in_place(&external, beyond, target.len()).unwrap_err();
                let beyond = external.read(beyond, &mut target, &mut window.0).unwrap_err();
                for error in [beyond, in_place] {
                    assert!(matches!(error, StoreError::Changed { .. }), "{error}");
                }
            }
        }
        let external = ExternalFile::open(file.path(), bytes, modified_ns, true).unwrap();
        std::fs::write(file.path(), [2; 3 * BLOCK_BYTES]).unwrap();
        file.as_file()
            .set_modified(std::time::SystemTime::now() + std::time::Duration::from_secs(2))
            .unwrap();
        assert!(matches!(in_place(&external, 0, 10), Err(StoreError::Changed { .. })));
        let written = external.read(0, &mut target, &mut window.0).unwrap_err();
        assert!(written.to_string().contains(file.path().to_str().unwrap()), "{written}");
        let reopened = ExternalFile::open(file.path(), bytes, modified_ns, true).unwrap_err();
        assert!(matches!(reopened, StoreError::Changed { .. }), "{reopened}");
        let missing = ExternalFile::open(Path::new("/nowhere/at/all"), bytes, modified_ns, true).unwrap_err();
        assert_eq!(missing.errno(), Some(libc::ENOENT));
    }

    #[test]
    fn a_block_that_differs_from_its_checksum_is_found() {
        let mut contents: Vec<u8> = (0..4 * BLOCK_BYTES).map(|index| (index * 7 % 251) as u8).collect();
        let sums = block_sums(&contents);
        contents[2 * BLOCK_BYTES + 5] ^= 1;
        let file = file_of(&contents);
        let (bytes, modified_ns) = stamp(file.path());
        let mut window = Window([0; 2 * BLOCK_BYTES]);
        for direct in [true, false] {
            let external =
                ExternalFile::open(file.path(), bytes, modified_ns, direct).unwrap().with_sums(sums.clone());
            for (start, end) in [(1, 2 * BLOCK_BYTES), (3 * BLOCK_BYTES + 9, 4 * BLOCK_BYTES), (5000, 5001)] {
                let mut target = vec![0xAB; end - start];
                external.read(start as u64, &mut target, &mut window.0).unwrap();
                assert_eq!(target, contents[start..end], "{start}..{end}");
                assert_eq!(in_place(&external, start as u64, end - start).unwrap(), target);
            }
            for (start, end) in [(100, 4 * BLOCK_BYTES), (3 * BLOCK_BYTES - 1, 3 * BLOCK_BYTES)] {
                let found = external.read(start as u64, &mut vec![0; end - start], &mut window.0);
                let in_place = in_place(&external, start as u64, end - start).map(|_| ());
                for found in [found, in_place] {
                    let offset = 2 * BLOCK_BYTES as u64;
                    assert!(
                        matches!(found, Err(StoreError::DamagedBeside { offset: at, .. }) if at == offset)
                    );
                }
            }
        }
    }
}
