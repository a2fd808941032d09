//! Bytes put aside for a while, in staging buffers or on the SSD.

use std::sync::{Arc, Mutex, MutexGuard, Weak};

use memascend_mem::{Lease, LeaseSlice, LockExt, Origin};
use memascend_store::Extent;

use crate::device::{Copies, DeviceFuture, Download};
use crate::{ExecError, InFlightCounter, Result, Staging};

/// Bytes put aside for a while: in spare staging buffers, and on the SSD when no buffer is spare.
/// Dropping the stash frees both.
pub struct Stash {
    stashed: Arc<Stashed>,
    /// For a stash from a device: whether the bytes were copied.
    copied: Option<Arc<DeviceFuture<()>>>,
}

/// Where the bytes lie. A thread that copies them shares this value, so that the space is freed
/// when no copy needs it.
pub(crate) struct Stashed {
    staging: Weak<Staging>,
    bytes: usize,
    places: Mutex<StashPlaces>,
    pending: Arc<InFlightCounter>,
    origin: Origin,
}

#[derive(Clone, Default)]
struct StashPlaces {
    /// The chunks in host memory, by index; None for a chunk in `extent`.
    chunks: Vec<Option<Arc<Lease>>>,
    extent: Option<Extent>,
}

impl Stash {
    /// Puts `source` aside; with `spill` all of it on the SSD. Returns when all of it is copied;
    /// writes to the SSD may still be under way.
    pub fn new(staging: &Arc<Staging>, source: &[u8], spill: bool) -> Result<Self> {
        let stashed = Stashed::new(staging, source.len());
        for part in source.chunks(staging.chunk_bytes()) {
            let (chunk, stays) = staging.chunk_for(!spill)?;
            let buffer = LeaseSlice::new(Arc::clone(&chunk), 0, part.len());
            // SAFETY: the lease is fresh, and no other code has it.
            unsafe { buffer.as_mut_slice() }.copy_from_slice(part);
            drop(buffer);
            stashed.add(staging, chunk, stays, part.len())?;
        }
        Ok(Self { stashed: Arc::new(stashed), copied: None })
    }

    /// A stash whose bytes another thread copies.
    pub(crate) fn arriving(staging: &Arc<Staging>, bytes: usize, copied: Arc<DeviceFuture<()>>) -> Self {
        Self { stashed: Arc::new(Stashed::new(staging, bytes)), copied: Some(copied) }
    }

    pub(crate) fn stashed(&self) -> Arc<Stashed> {
        Arc::clone(&self.stashed)
    }

    /// Length in bytes.
    pub fn bytes(&self) -> usize {
        self.stashed.bytes
    }

    /// Whether the source is no longer read: it was copied, or the copy failed.
    pub fn is_copied(&self) -> bool {
        self.copied.as_ref().is_none_or(|copied| copied.is_done())
    }

    /// Waits until the source is no longer read.
    ///
    /// # Errors
    /// If the source could not be copied.
    pub fn wait_copied(&self) -> Result<()> {
        self.copied.as_ref().map_or(Ok(()), |copied| copied.wait())
    }

    /// Copies the bytes to `target`. May be called any number of times.
    ///
    /// # Panics
    /// If `target` has another length.
    pub fn restore(&self, target: &mut [u8]) -> Result<()> {
        assert_eq!(target.len(), self.bytes(), "a stash is restored as a whole");
        self.wait_copied()?;
        self.stashed.chunks(|offset, chunk, bytes| {
            let source = LeaseSlice::new(chunk, 0, bytes);
            // SAFETY: chunks of a stash are written only when it is made.
            target[offset..offset + bytes].copy_from_slice(unsafe { source.as_slice() });
            Ok(())
        })
    }
}

impl Stashed {
    fn new(staging: &Arc<Staging>, bytes: usize) -> Self {
        Self {
            staging: Arc::downgrade(staging),
            bytes,
            places: Mutex::default(),
            pending: Arc::default(),
            origin: Origin::here(),
        }
    }

    /// Adds the next `bytes` bytes, which are in `chunk`: keeps the chunk if it `stays`, writes it
    /// to the SSD otherwise.
    fn add(&self, staging: &Staging, chunk: Arc<Lease>, stays: bool, bytes: usize) -> Result<()> {
        let mut places = self.lock();
        if stays {
            places.chunks.push(Some(chunk));
            return Ok(());
        }
        let extent = match places.extent {
            Some(extent) => extent,
            None => *places.extent.insert(staging.store().allocate("activation", self.bytes as u64)?),
        };
        let offset = places.chunks.len() * staging.chunk_bytes();
        places.chunks.push(None);
        staging.write_chunk(extent, offset, chunk, bytes, &self.pending);
        Ok(())
    }

    /// Copies all bytes from device address `source`; with `spill` all of them to the SSD.
    ///
    /// # Safety
    /// As [`Copies::download`].
    pub(crate) unsafe fn download(&self, copies: &Copies, source: usize, spill: bool) -> Result<()> {
        let staging = self.staging.upgrade().ok_or(ExecError::Closed)?;
        let (piece_bytes, bytes) = (staging.chunk_bytes(), self.bytes);
        let add = |_, chunk, stays, bytes| self.add(&staging, chunk, stays, bytes);
        let download = Download { source, piece_bytes, bytes, keep: !spill };
        // SAFETY: the caller's promise.
        unsafe { copies.download(&staging, download, add) }
    }

    /// Makes every later restore fail with `error`.
    pub(crate) fn fail(&self, error: &ExecError) {
        self.pending.begin().end(Err(error.clone()));
    }

    /// Calls `consume(offset, chunk, bytes)` for each piece in order, and reads ahead from the SSD.
    pub(crate) fn chunks(
        &self,
        mut consume: impl FnMut(usize, Arc<Lease>, usize) -> Result<()>,
    ) -> Result<()> {
        let staging = self.staging.upgrade().ok_or(ExecError::Closed)?;
        self.pending.wait()?;
        let StashPlaces { chunks, extent } = self.lock().clone();
        let chunk_bytes = staging.chunk_bytes();
        assert_eq!(chunks.len(), self.bytes.div_ceil(chunk_bytes), "a stash is restored as a whole");
        let mut index = 0;
        while index < chunks.len() {
            if let Some(chunk) = &chunks[index] {
                let offset = index * chunk_bytes;
                consume(offset, Arc::clone(chunk), chunk_bytes.min(self.bytes - offset))?;
                index += 1;
                continue;
            }
            let extent = extent.expect("chunks on the SSD have an extent");
            let spilled = chunks[index..].iter().take_while(|chunk| chunk.is_none()).count();
            let range = index..index + spilled;
            staging.read_chunks(extent, chunk_bytes, range, self.bytes, |index, chunk, bytes| {
                consume(index * chunk_bytes, chunk, bytes)
            })?;
            index += spilled;
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, StashPlaces> {
        self.places.locked()
    }
}

impl Drop for Stashed {
    fn drop(&mut self) {
        // A forked child has no thread that would end the writes.
        if !self.origin.is_here() {
            return;
        }
        // The extent may be reused only after its writes have ended.
        let _ = self.pending.wait();
        if let (Some(staging), Some(extent)) = (self.staging.upgrade(), self.lock().extent) {
            staging.store().free(extent);
        }
    }
}
