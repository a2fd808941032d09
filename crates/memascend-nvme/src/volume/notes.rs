//! The note of a volume. In a directory, the note is a file that appears whole and durably, or not
//! at all.
//!
//! Two files take turns. One is written while the other stays, then they exchange names (`RENAME_EXCHANGE`).
//! A manifest of about the same length needs no new block, so steps continue on a drive that other files have
//! filled. If the newer file is damaged, the store asks for the other (`find_note_before`) and puts it in the
//! newer one's place before it writes anything: else the next write would destroy the only whole manifest.
//! Only damage counts: an older step never stands in for a file that cannot be read.

use std::io;
use std::path::{Path, PathBuf};

use crate::error::{file_error, flush_error};
use crate::memory::with_room;
use crate::volume::folder::{NamedFile, Names};
use crate::{BLOCK_BYTES, FoundNote, Result, Volume};

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

    /// The note that the last one replaced, for a caller that finds the last one damaged. None
    /// where the keeper looks for it itself, has none, or cannot read it.
    fn find_note_before(&self) -> Option<Vec<u8>> {
        None
    }

    /// Has the note before take the place of the last one. When this returns, it is found after a
    /// power failure too, so that the data which only the last one refers to may be overwritten.
    fn put_note_before_in_place(&self) -> Result<()> {
        Ok(())
    }
}

/// The longest note in a directory: far longer than any that a store needs, and small enough to
/// load.
pub(super) const NOTE_BYTES_MAX: u64 = 256 << 20;

/// Name of the file that the next note is written to.
pub(super) const SPARE_NAME: &str = "memascend.json.new";

/// The note in a directory, and its names.
pub(super) struct DirectoryNotes<'a, N> {
    pub(super) names: &'a N,
    /// The directory, for messages.
    pub(super) path: &'a Path,
}

impl<N: Names> DirectoryNotes<'_, N> {
    fn note_path(&self) -> PathBuf {
        self.path.join(Volume::NOTE_NAME)
    }

    /// The note, which is on the medium with its name when this returns.
    pub(super) fn find(&self) -> Result<FoundNote> {
        match self.read(Volume::NOTE_NAME) {
            Ok(note) => Ok(FoundNote { note: Some(note), damaged: false }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                // A killed process may have removed the note without waiting for the medium, and the
                // caller is about to overwrite the data.
                unless_read_only(self.names.sync()).map_err(|source| flush_error(self.path, source))?;
                Ok(FoundNote::default())
            }
            Err(source) => Err(file_error("read", &self.note_path(), source)),
        }
    }

    fn read(&self, name: &str) -> io::Result<Vec<u8>> {
        let file = self.names.open(name, false)?;
        if file.length()? > NOTE_BYTES_MAX {
            return Err(io::Error::from_raw_os_error(libc::EFBIG));
        }
        unless_read_only(file.sync())?;
        let mut note = file.read()?;
        unless_read_only(self.names.sync())?;
        // Cut the padding behind the note, which is zeros. No note ends in zeros.
        note.truncate(note.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1));
        Ok(note)
    }

    /// The note that the last one replaced, or one that was being written.
    pub(super) fn find_before(&self) -> Option<Vec<u8>> {
        self.read(SPARE_NAME).ok().filter(|note| !note.is_empty())
    }

    /// Has the spare file be the note. The note becomes the spare file, which the next write
    /// overwrites: were it the whole one, a power failure in that write would leave none.
    pub(super) fn put_before_in_place(&self) -> Result<()> {
        if self.names.exchange(SPARE_NAME, Volume::NOTE_NAME).is_err() {
            let renamed = self.names.rename(SPARE_NAME, Volume::NOTE_NAME);
            renamed.map_err(|source| file_error("write", &self.note_path(), source))?;
        }
        self.flush_names()
    }

    /// Writes a note that appears whole and durably, or not at all, with zeros behind it.
    ///
    /// Two files are used in turn: the spare file is written and then exchanged with the current one.
    /// The spare file has its blocks already, so a note about as long as the one before can be
    /// written when the filesystem is full.
    pub(super) fn write(&self, bytes: &[u8]) -> Result<()> {
        let path = self.note_path();
        let failed = |source| file_error("write", &path, source);
        if bytes.len() as u64 > NOTE_BYTES_MAX {
            return Err(failed(io::Error::from_raw_os_error(libc::EFBIG)));
        }
        let file = self.fill_spare(bytes, 0).map_err(failed)?;
        file.sync().map_err(|source| flush_error(&path, source))?;
        if self.names.exchange(SPARE_NAME, Volume::NOTE_NAME).is_err() {
            // There was no note before, or the filesystem cannot exchange files.
            self.names.rename(SPARE_NAME, Volume::NOTE_NAME).map_err(failed)?;
            // Make the spare file for the next note. A failure is ignored here: the next write
            // reports it.
            let length = file.length().unwrap_or(0);
            let _ = self.fill_spare(&[], length).and_then(|spare| spare.sync());
        }
        self.flush_names()
    }

    /// Removes the note, and the spare file for the next.
    pub(super) fn clear(&self) -> Result<()> {
        self.remove_spare();
        match self.names.remove(Volume::NOTE_NAME) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            removed => removed.map_err(|source| file_error("remove", &self.note_path(), source))?,
        }
        // The caller is about to change the data that the note describes, so the removal must be
        // durable.
        self.flush_names()
    }

    /// Removes the spare file for the next note.
    pub(super) fn remove_spare(&self) {
        let _ = self.names.remove(SPARE_NAME);
    }

    /// Waits until the names in the directory are on the medium.
    fn flush_names(&self) -> Result<()> {
        self.names.sync().map_err(|source| flush_error(self.path, source))
    }

    /// Overwrites the whole spare file with `bytes` and zeros, and extends it to at least `least`
    /// bytes. The caller flushes the file that this returns.
    fn fill_spare(&self, bytes: &[u8], least: u64) -> io::Result<N::File> {
        let file = match self.names.open(SPARE_NAME, true) {
            // A symbolic link or a pipe is in the way. It is removed rather than followed.
            Err(error) if matches!(error.raw_os_error(), Some(libc::ELOOP) | None) => {
                self.names.remove(SPARE_NAME)?;
                self.names.open(SPARE_NAME, true)?
            }
            opened => opened?,
        };
        let had = file.length()?;
        if had == 0 {
            file.write_in_place();
        }
        // A little more than needed: the next note may be longer.
        let wanted = (bytes.len() as u64 + bytes.len() as u64 / 8).next_multiple_of(4 * BLOCK_BYTES as u64);
        // A longer file could not be read.
        let wanted = wanted.min(NOTE_BYTES_MAX);
        let length = if bytes.len() as u64 <= had { had } else { wanted }.max(least);
        let length = usize::try_from(length).map_err(io::Error::other)?;
        let mut padded = with_room(length)?;
        padded.extend_from_slice(bytes);
        padded.resize(length, 0);
        file.write(&padded)?;
        Ok(file)
    }
}

/// The result of a flush. A read-only filesystem has nothing to flush.
fn unless_read_only(flushed: io::Result<()>) -> io::Result<()> {
    match flushed {
        Err(error) if matches!(error.raw_os_error(), Some(libc::EROFS | libc::EINVAL)) => Ok(()),
        flushed => flushed,
    }
}

#[cfg(test)]
mod power;
