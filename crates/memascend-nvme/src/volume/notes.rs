//! The note of a volume. In a directory, the note is a file that appears whole and durably, or not
//! at all.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::error::{file_error, flush_error};
use crate::volume::directory::write_in_place;
use crate::{BLOCK_BYTES, FoundNote, IoError, Result, Volume};

/// The place of a volume's note.
pub trait NoteKeeper: Send + Sync {
    /// The note, which is on the medium when this returns. A killed process may have written the
    /// note without waiting for the medium, and the caller may overwrite data that only the note
    /// before refers to.
    fn find_note(&self) -> Result<FoundNote>;

    /// The longest note that can be written.
    fn limit_bytes(&self) -> u64;

    /// Replaces the note. When this returns, the note is on the medium. An interrupted write leaves
    /// the note before. [`IoError::Flush`](crate::IoError::Flush) if the medium may not have it.
    fn write_note(&self, note: &[u8]) -> Result<()>;

    /// Removes the note. When this returns, the removal is on the medium.
    fn clear_note(&self) -> Result<()>;
}

/// The longest note in a directory: far longer than any that a store needs, and small enough to
/// load.
pub(super) const NOTE_BYTES_MAX: u64 = 256 << 20;

/// The contents of a note's file. A symbolic link is refused.
fn read_no_link(path: &Path) -> io::Result<Vec<u8>> {
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW).open(path)?;
    if file.metadata()?.len() > NOTE_BYTES_MAX {
        return Err(io::Error::from_raw_os_error(libc::EFBIG));
    }
    file.sync_all()?;
    let mut bytes = Vec::new();
    file.take(NOTE_BYTES_MAX).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The note in `directory`.
pub(super) fn find(directory: &Path) -> Result<FoundNote> {
    let path = directory.join(Volume::NOTE_NAME);
    let synced = |note| File::open(directory)?.sync_all().map(|()| note);
    match read_no_link(&path).and_then(synced) {
        Ok(mut note) => {
            // Cut the padding behind the note, which is zeros. No note ends in zeros.
            note.truncate(note.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1));
            Ok(FoundNote { note: Some(note), damaged: false })
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(FoundNote::default()),
        Err(source) => Err(file_error("read", &path, source)),
    }
}

/// Writes a file that appears whole and durably, or not at all, with zeros behind it.
///
/// Two files are used in turn: the spare file is written and then exchanged with the current one.
/// The spare file has its blocks already, so a note about as long as the one before can be written
/// when the filesystem is full.
pub(super) fn write(directory: &Path, bytes: &[u8]) -> Result<()> {
    let (path, spare) = (directory.join(Volume::NOTE_NAME), spare_of(directory));
    let failed = |source| file_error("write", &path, source);
    if bytes.len() as u64 > NOTE_BYTES_MAX {
        return Err(failed(io::Error::from_raw_os_error(libc::EFBIG)));
    }
    let file = fill_spare(&spare, bytes, 0).map_err(failed)?;
    file.sync_all().map_err(|source| flush_error(&path, source))?;
    if exchange(&spare, &path).is_err() {
        // There was no note before, or the filesystem cannot exchange files.
        std::fs::rename(&spare, &path).map_err(failed)?;
        // Make the spare file for the next note. A failure is ignored here: the next write reports
        // it.
        let length = file.metadata().map_or(0, |metadata| metadata.len());
        let _ = fill_spare(&spare, &[], length).and_then(|spare| spare.sync_all());
    }
    flush_directory(directory, failed)
}

/// Waits until the names in `directory` are on the medium.
fn flush_directory(directory: &Path, failed: impl FnOnce(io::Error) -> IoError) -> Result<()> {
    let directory_file = File::open(directory).map_err(failed)?;
    directory_file.sync_all().map_err(|source| flush_error(directory, source))
}

/// Removes the note in `directory`, and the spare file for the next.
pub(super) fn clear(directory: &Path) -> Result<()> {
    let path = directory.join(Volume::NOTE_NAME);
    remove_spare(directory);
    let failed = |source| file_error("remove", &path, source);
    match std::fs::remove_file(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        removed => removed.map_err(failed)?,
    }
    // The caller is about to change the data that the note describes, so the removal must be
    // durable.
    flush_directory(directory, failed)
}

fn spare_of(directory: &Path) -> PathBuf {
    directory.join(format!("{}.new", Volume::NOTE_NAME))
}

/// Removes the spare file for the next note.
pub(super) fn remove_spare(directory: &Path) {
    let _ = std::fs::remove_file(spare_of(directory));
}

/// Overwrites the whole spare file with `bytes` and zeros, and extends it to at least `least`
/// bytes. The caller flushes the file that this returns.
fn fill_spare(spare: &Path, bytes: &[u8], least: u64) -> io::Result<File> {
    let open = || {
        let mut options = OpenOptions::new();
        options
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW)
            .open(spare)
    };
    let file = match open() {
        // A symbolic link is in the way. It is removed rather than followed.
        Err(error) if error.raw_os_error() == Some(libc::ELOOP) => {
            std::fs::remove_file(spare)?;
            open()?
        }
        opened => opened?,
    };
    let had = file.metadata()?.len();
    if had == 0 {
        write_in_place(&file);
    }
    // A little more than needed: the next note may be longer.
    let wanted = (bytes.len() as u64 + bytes.len() as u64 / 8).next_multiple_of(4 * BLOCK_BYTES as u64);
    // A longer file could not be read.
    let wanted = wanted.min(NOTE_BYTES_MAX);
    let length = if bytes.len() as u64 <= had { had } else { wanted }.max(least);
    let mut padded = bytes.to_vec();
    padded.resize(usize::try_from(length).expect("a note fits into memory"), 0);
    file.write_all_at(&padded, 0)?;
    Ok(file)
}

/// Exchanges the names of two files atomically.
fn exchange(one: &Path, other: &Path) -> io::Result<()> {
    let path = |path: &Path| std::ffi::CString::new(path.as_os_str().as_bytes()).map_err(io::Error::other);
    let (one, other) = (path(one)?, path(other)?);
    // SAFETY: both are C strings that live through the call.
    let done = unsafe {
        libc::syscall(
            libc::SYS_renameat2,
            libc::AT_FDCWD,
            one.as_ptr(),
            libc::AT_FDCWD,
            other.as_ptr(),
            libc::RENAME_EXCHANGE,
        )
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
