//! A volume of a store with its engine.
//!
//! A failed flush is final. Linux drops the pages that it could not write and reports that once; the next
//! flush succeeds. So a volume remembers its first failure, and no manifest is written any more.

use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use memascend_nvme::{Activity, Engine, FoundNote, IoError, NoteKeeper, OpenedEngine, Volume, VolumeFile};

use crate::Result;

/// Opens the engine of a volume.
pub(crate) type OpenEngine<'a> = &'a dyn Fn(&Arc<VolumeFile>) -> memascend_nvme::Result<OpenedEngine>;

/// A volume of the store with its engine.
pub(crate) struct Member {
    // Declared first, so that it is dropped first: the engine drains before the volume closes and
    // its lock is released.
    pub engine: Arc<dyn Engine>,
    pub volume: Volume,
    /// Keeper of its notes, if not the volume (tests).
    notes: Option<Arc<dyn NoteKeeper>>,
    /// Bytes written before this store was opened.
    pub life_before: u64,
    note_bytes: AtomicU64,
    /// Whether the note is damaged and the one before was taken, which is to be put in its place.
    damaged: AtomicBool,
    /// The file and the errno of the first flush that failed. The system reports lost writes once:
    /// a later flush succeeds without them.
    lost: OnceLock<(PathBuf, i32)>,
}

impl Member {
    /// Opens the engine of `volume`. Also returns notices about the engine for the user.
    pub(crate) fn open(volume: Volume, open: OpenEngine<'_>) -> Result<(Self, Option<String>)> {
        let OpenedEngine { engine, notice } = open(volume.file())?;
        let notes = engine.notes();
        let note_bytes = AtomicU64::new(0);
        let damaged = AtomicBool::new(false);
        let lost = OnceLock::new();
        Ok((Self { engine, volume, notes, life_before: 0, note_bytes, damaged, lost }, notice))
    }

    fn notes(&self) -> &dyn NoteKeeper {
        self.notes.as_deref().unwrap_or(&self.volume)
    }

    pub(crate) fn find_note(&self) -> Result<FoundNote> {
        Ok(self.notes().find_note()?)
    }

    /// The note that the last one replaced, if the keeper still has it.
    pub(crate) fn find_note_before(&self) -> Option<Vec<u8>> {
        self.notes().find_note_before()
    }

    /// Notes that the note before was taken, since the last one is damaged.
    pub(crate) fn take_note_before(&self) {
        self.damaged.store(true, Ordering::Relaxed);
    }

    /// Puts a note before that was taken in the place of the damaged one, for every later opening.
    pub(crate) fn settle_note(&self) -> Result<()> {
        if self.damaged.load(Ordering::Relaxed) && !self.volume.is_read_only() {
            self.remembering(self.notes().put_note_before_in_place())?;
            self.damaged.store(false, Ordering::Relaxed);
        }
        Ok(())
    }

    /// The longest note that can be written.
    pub(crate) fn note_limit_bytes(&self) -> u64 {
        self.notes().limit_bytes()
    }

    /// Flushes the volume. Once a flush has failed, none succeeds any more.
    pub(crate) fn flush(&self) -> Result<()> {
        self.check_flushes()?;
        self.remembering(self.engine.flush())
    }

    pub(crate) fn write_note(&self, note: &[u8]) -> Result<()> {
        self.settle_note()?;
        self.note_bytes.fetch_add(note.len() as u64, Ordering::Relaxed);
        let write = || self.notes().write_note(note);
        self.remembering(match self.engine.recorder() {
            Some(recorder) => recorder.timed(Activity::Manifest, write),
            None => write(),
        })
    }

    pub(crate) fn clear_note(&self) -> Result<()> {
        self.remembering(self.notes().clear_note())
    }

    /// The error of a flush that has failed.
    pub(crate) fn check_flushes(&self) -> Result<()> {
        let Some((path, errno)) = self.lost.get() else { return Ok(()) };
        let source = io::Error::from_raw_os_error(*errno);
        Err(IoError::Flush { path: path.clone(), source }.into())
    }

    fn remembering(&self, result: memascend_nvme::Result<()>) -> Result<()> {
        if let Err(IoError::Flush { path, source }) = &result {
            // Only the first failure counts.
            let _ = self.lost.set((path.clone(), source.raw_os_error().unwrap_or(libc::EIO)));
        }
        Ok(result?)
    }

    /// Bytes written to the volume over the store's whole life.
    pub(crate) fn life_bytes(&self) -> u64 {
        let written = self.engine.counters().writes.bytes + self.note_bytes.load(Ordering::Relaxed);
        self.life_before.saturating_add(written)
    }
}
