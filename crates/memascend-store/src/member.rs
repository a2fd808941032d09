//! A volume of a store with its engine.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use memascend_nvme::{Engine, FoundNote, NoteKeeper, OpenedEngine, Volume, VolumeFile};

use crate::Result;

/// Opens the engine of a volume.
pub(crate) type OpenEngine<'a> = &'a dyn Fn(&Arc<VolumeFile>) -> memascend_nvme::Result<OpenedEngine>;

/// A volume of the store with its engine.
pub(crate) struct Member {
    // Declared first, so that it is dropped first: the engine drains before the volume closes and
    // its lock is released.
    pub engine: Arc<dyn Engine>,
    pub volume: Volume,
    /// What keeps its notes, if not the volume.
    notes: Option<Arc<dyn NoteKeeper>>,
    /// Bytes written before this store was opened.
    pub life_before: u64,
    note_bytes: AtomicU64,
}

impl Member {
    /// Opens the engine of `volume`. Also returns what the user should know about the engine.
    pub(crate) fn open(volume: Volume, open: OpenEngine<'_>) -> Result<(Self, Option<String>)> {
        let OpenedEngine { engine, notice } = open(volume.file())?;
        let notes = engine.notes();
        Ok((Self { engine, volume, notes, life_before: 0, note_bytes: AtomicU64::new(0) }, notice))
    }

    fn notes(&self) -> &dyn NoteKeeper {
        self.notes.as_deref().unwrap_or(&self.volume)
    }

    pub(crate) fn find_note(&self) -> Result<FoundNote> {
        Ok(self.notes().find_note()?)
    }

    pub(crate) fn write_note(&self, note: &[u8]) -> Result<()> {
        self.note_bytes.fetch_add(note.len() as u64, Ordering::Relaxed);
        Ok(self.notes().write_note(note)?)
    }

    pub(crate) fn clear_note(&self) -> Result<()> {
        Ok(self.notes().clear_note()?)
    }

    /// Bytes written to the volume over the store's whole life.
    pub(crate) fn life_bytes(&self) -> u64 {
        let written = self.engine.counters().writes.bytes + self.note_bytes.load(Ordering::Relaxed);
        self.life_before.saturating_add(written)
    }
}
