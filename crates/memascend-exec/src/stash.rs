use std::sync::{Arc, Mutex, MutexGuard, Weak};

use memascend_mem::{Lease, LeaseSlice, LockExt, Origin};
use memascend_store::Extent;

use crate::device::{Copies, Outcome};
use crate::{OptimError, Pending, Result, Staging};

/// Bytes put aside for a while: in spare staging buffers as far as there are any, the rest on the SSD. Dropping it
/// gives the room back.
pub struct Stash {
    kept: Arc<Kept>,
    /// Of those that come from a device: whether they are here.
    copied: Option<Arc<Outcome<()>>>,
}

/// Where they are. Whoever copies them holds it too, so that the room is given back when nobody does.
pub(crate) struct Kept {
    staging: Weak<Staging>,
    bytes: usize,
    places: Mutex<Places>,
    pending: Arc<Pending>,
    origin: Origin,
}

#[derive(Clone, Default)]
struct Places {
    /// The chunks in host memory, by their order; the others are in `extent`.
    chunks: Vec<Option<Arc<Lease>>>,
    extent: Option<Extent>,
}

impl Stash {
    /// Copies `source` out; with `spill` all of it goes to the SSD. Returns when all of it is copied; what goes to the SSD
    /// is written meanwhile.
    pub fn new(staging: &Arc<Staging>, source: &[u8], spill: bool) -> Result<Self> {
        let kept = Kept::new(staging, source.len());
        for part in source.chunks(staging.chunk_bytes()) {
            let (chunk, stays) = staging.chunk_for(!spill)?;
            let buffer = LeaseSlice::new(Arc::clone(&chunk), 0, part.len());
            // SAFETY: the lease is fresh and nobody else knows it.
            unsafe { buffer.as_mut_slice() }.copy_from_slice(part);
            drop(buffer);
            kept.add(staging, chunk, stays, part.len())?;
        }
        Ok(Self { kept: Arc::new(kept), copied: None })
    }

    /// One whose bytes are being copied by somebody else.
    pub(crate) fn arriving(staging: &Arc<Staging>, bytes: usize, copied: Arc<Outcome<()>>) -> Self {
        Self { kept: Arc::new(Kept::new(staging, bytes)), copied: Some(copied) }
    }

    pub(crate) fn kept(&self) -> Arc<Kept> {
        Arc::clone(&self.kept)
    }

    /// Length in bytes.
    pub fn bytes(&self) -> usize {
        self.kept.bytes
    }

    /// Whether the source is read no more: it was copied, or that failed.
    pub fn is_copied(&self) -> bool {
        self.copied.as_ref().is_none_or(|copied| copied.is_done())
    }

    /// Waits until the source is read no more.
    ///
    /// # Errors
    /// Why it could not be copied.
    pub fn wait_copied(&self) -> Result<()> {
        self.copied.as_ref().map_or(Ok(()), |copied| copied.wait())
    }

    /// Copies the bytes to `target`, as often as wanted.
    ///
    /// # Panics
    /// If `target` has another length.
    pub fn restore(&self, target: &mut [u8]) -> Result<()> {
        assert_eq!(target.len(), self.bytes(), "a stash comes back whole");
        self.wait_copied()?;
        self.kept.chunks(|offset, chunk, bytes| {
            let source = LeaseSlice::new(chunk, 0, bytes);
            // SAFETY: chunks of a stash are written only when it is made.
            target[offset..offset + bytes].copy_from_slice(unsafe { source.as_slice() });
            Ok(())
        })
    }
}

impl Kept {
    fn new(staging: &Arc<Staging>, bytes: usize) -> Self {
        Self {
            staging: Arc::downgrade(staging),
            bytes,
            places: Mutex::default(),
            pending: Arc::default(),
            origin: Origin::here(),
        }
    }

    /// Takes the next `bytes` bytes, which are in `chunk`: as they are if it `stays`, otherwise to the SSD.
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

    /// Takes all bytes from device address `source`; with `spill` all of them go to the SSD.
    ///
    /// # Safety
    /// As [`Copies::download`].
    pub(crate) unsafe fn download(&self, copies: &Copies, source: usize, spill: bool) -> Result<()> {
        let staging = self.staging.upgrade().ok_or(OptimError::Closed)?;
        let chunk_bytes = staging.chunk_bytes();
        let pieces = 0..self.bytes.div_ceil(chunk_bytes);
        let add = |_, chunk, stays, bytes| self.add(&staging, chunk, stays, bytes);
        // SAFETY: the caller's promise.
        unsafe { copies.download(&staging, source, pieces, chunk_bytes, self.bytes, !spill, add) }
    }

    /// Tells whoever wants the bytes back that they did not come.
    pub(crate) fn fail(&self, error: &OptimError) {
        self.pending.begin().end(Err(error.clone()));
    }

    /// Calls `consume(offset, chunk, bytes)` for each piece in order, reading ahead what is on the SSD.
    pub(crate) fn chunks(
        &self,
        mut consume: impl FnMut(usize, Arc<Lease>, usize) -> Result<()>,
    ) -> Result<()> {
        let staging = self.staging.upgrade().ok_or(OptimError::Closed)?;
        self.pending.wait()?;
        let Places { chunks, extent } = self.lock().clone();
        let chunk_bytes = staging.chunk_bytes();
        assert_eq!(chunks.len(), self.bytes.div_ceil(chunk_bytes), "a stash comes back whole");
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

    fn lock(&self) -> MutexGuard<'_, Places> {
        self.places.locked()
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        // The thread that would end the writes did not come along into a forked child.
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
