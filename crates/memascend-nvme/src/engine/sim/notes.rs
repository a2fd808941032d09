//! Notes on a simulated disk: in two slots, or in a file that is replaced.

use std::io;
use std::sync::Arc;

use crate::block_device::blocks::Blocks;
use crate::block_device::notes::{Medium, Notes, PutError};
use crate::engine::sim::SimDisk;
use crate::engine::sim::disk::{Die, NOTE_OFFSET, PART_BYTES};
use crate::engine::sim::power::gone;
use crate::error::{file_error, flush_error};
use crate::{FoundNote, NoteKeeper, Operation, Result, Uuid, VolumeFile};

/// How long the slots for notes are together.
const NOTE_BYTES: u64 = 1 << 20;

/// The disk as a medium of notes: transfers are whole or fail.
impl Medium for SimDisk {
    fn read(&self, offset: u64, bytes: usize) -> io::Result<Blocks> {
        let mut blocks = Blocks::zeroed(bytes)?;
        self.carry_out_whole(Operation::Read, offset, blocks.bytes_mut())?;
        Ok(blocks)
    }

    fn write(&self, offset: u64, blocks: &Blocks) -> io::Result<()> {
        self.carry_out_whole(Operation::Write, offset, &mut blocks.bytes().to_vec())
    }

    fn flush(&self) -> io::Result<()> {
        SimDisk::flush(self)
    }
}

impl SimDisk {
    fn carry_out_whole(&self, operation: Operation, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let mut done = 0;
        while done < buffer.len() {
            let end = buffer.len().min(done + PART_BYTES);
            match self.carry_out(operation, offset + done as u64, &mut buffer[done..end]) {
                // As the schedule does: a transfer that ends inside a block is resumed at the start
                // of that block.
                Ok(bytes) => done += bytes / self.geometry().block_bytes * self.geometry().block_bytes,
                Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EINTR)) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Writes the new file of a note, which has no name yet.
    fn write_file(&self) -> io::Result<()> {
        let cut = self.power.step()?;
        let mut disk = self.lock();
        let draw = self.hits(&mut disk, self.faults.write_error_one_in, Die::WriteError, NOTE_OFFSET);
        if cut {
            return Err(gone());
        }
        if draw.is_some() {
            disk.injected.write_errors += 1;
            return Err(io::Error::from_raw_os_error(libc::ENOSPC));
        }
        Ok(())
    }

    /// Flushes the new file. Returns whether its bytes are on the medium.
    fn flush_file(&self) -> io::Result<bool> {
        if self.power.step()? {
            return Err(gone());
        }
        let mut disk = self.lock();
        self.fail_flush(&mut disk)?;
        Ok(!self.loses_flush(&mut disk))
    }

    /// Gives the new file the note's name, or removes the name.
    fn rename_file(&self, file: Option<(Vec<u8>, bool)>) -> io::Result<()> {
        let cut = self.power.step()?;
        self.lock().file.renamed = Some(file);
        if cut { Err(gone()) } else { Ok(()) }
    }

    fn flush_directory(&self) -> io::Result<()> {
        if self.power.step()? {
            return Err(gone());
        }
        let mut disk = self.lock();
        self.fail_flush(&mut disk)?;
        // A name that reaches the medium before the bytes do is visible only after a crash.
        let unflushed = matches!(disk.file.renamed, Some(Some((_, false))));
        if !self.loses_flush(&mut disk)
            && !unflushed
            && let Some(renamed) = disk.file.renamed.take()
        {
            disk.file.durable = renamed.map(|(bytes, _)| bytes);
        }
        Ok(())
    }
}

/// A note on a simulated disk: in two slots, as on a device, or in a file that is replaced.
pub(super) struct SimNotes {
    disk: Arc<SimDisk>,
    slots: Option<Notes>,
    file: Arc<VolumeFile>,
}

impl SimNotes {
    pub(super) fn new(disk: Arc<SimDisk>, place: SimNotePlace, file: Arc<VolumeFile>) -> Self {
        let id = Uuid::from_bytes(*b"a simulated disk");
        let slots = (place == SimNotePlace::Slots).then(|| Notes::at(id, NOTE_OFFSET, NOTE_BYTES));
        Self { disk, slots, file }
    }

    fn failed<T>(&self, action: &'static str, result: io::Result<T>) -> Result<T> {
        result.map_err(|source| file_error(action, self.file.path(), source))
    }

    fn put(&self, action: &'static str, result: std::result::Result<(), PutError>) -> Result<()> {
        result.map_err(|error| match error {
            PutError::Transfer(source) => file_error(action, self.file.path(), source),
            PutError::Flush(source) => flush_error(self.file.path(), source),
        })
    }

    fn flushed<T>(&self, result: io::Result<T>) -> Result<T> {
        result.map_err(|source| flush_error(self.file.path(), source))
    }
}

impl NoteKeeper for SimNotes {
    fn find_note(&self) -> Result<FoundNote> {
        let outcome = match &self.slots {
            Some(notes) => notes.find(&*self.disk),
            None => self.disk.flush_directory().map(|()| {
                let disk = self.disk.lock();
                let note = match &disk.file.renamed {
                    Some(renamed) => renamed.as_ref().map(|(bytes, _)| bytes.clone()),
                    None => disk.file.durable.clone(),
                };
                FoundNote { note, damaged: false }
            }),
        };
        self.failed("read the note of", outcome)
    }

    fn limit_bytes(&self) -> u64 {
        self.slots.map_or(NOTE_BYTES, |notes| notes.limit_bytes())
    }

    fn write_note(&self, note: &[u8]) -> Result<()> {
        let (disk, action) = (&self.disk, "write the note of");
        if let Some(notes) = &self.slots {
            return self.put(action, notes.write(&**disk, note));
        }
        self.failed(action, disk.write_file())?;
        let whole = self.flushed(disk.flush_file())?;
        self.failed(action, disk.rename_file(Some((note.to_vec(), whole))))?;
        self.flushed(disk.flush_directory())
    }

    fn clear_note(&self) -> Result<()> {
        let (disk, action) = (&self.disk, "clear the note of");
        if let Some(notes) = &self.slots {
            return self.put(action, notes.clear(&**disk));
        }
        self.failed(action, disk.rename_file(None))?;
        self.flushed(disk.flush_directory())
    }
}

/// Where the notes of a simulated volume lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SimNotePlace {
    /// In two slots on the simulated disk.
    Slots,
    /// In a file on the simulated disk, which is replaced by renaming.
    File,
}
