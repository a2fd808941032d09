use std::sync::{Arc, Weak};

use memascend_mem::{Lease, LeaseSlice, Origin};
use memascend_store::Extent;

use crate::{OptimError, Pending, Result, Staging};

/// Bytes put aside for a while: in spare staging buffers as far as there are any, the rest on the SSD. Dropping it
/// gives the room back.
pub struct Stash {
    staging: Weak<Staging>,
    bytes: usize,
    /// The chunks in host memory, by their order; the others are in `extent`.
    chunks: Vec<Option<Arc<Lease>>>,
    extent: Option<Extent>,
    pending: Arc<Pending>,
    origin: Origin,
}

impl Stash {
    /// Copies `source` out. Returns when all of it is copied; what goes to the SSD is written meanwhile.
    pub fn new(staging: &Arc<Staging>, source: &[u8]) -> Result<Self> {
        let mut stash = Self {
            staging: Arc::downgrade(staging),
            bytes: source.len(),
            chunks: Vec::new(),
            extent: None,
            pending: Arc::default(),
            origin: Origin::here(),
        };
        let chunk_bytes = staging.chunk_bytes();
        for (index, part) in source.chunks(chunk_bytes).enumerate() {
            let (chunk, stays) = staging.chunk_to_keep()?;
            let buffer = LeaseSlice::new(Arc::clone(&chunk), 0, part.len());
            // SAFETY: the lease is fresh and nobody else knows it.
            unsafe { buffer.as_mut_slice() }.copy_from_slice(part);
            drop(buffer);
            if stays {
                stash.chunks.push(Some(chunk));
                continue;
            }
            let extent = match stash.extent {
                Some(extent) => extent,
                None => *stash.extent.insert(staging.store().allocate("activation", source.len() as u64)?),
            };
            stash.chunks.push(None);
            staging.write_chunk(extent, index * chunk_bytes, chunk, part.len(), &stash.pending);
        }
        Ok(stash)
    }

    /// Length in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Copies the bytes to `target`, as often as wanted.
    ///
    /// # Panics
    /// If `target` has another length.
    pub fn restore(&self, target: &mut [u8]) -> Result<()> {
        assert_eq!(target.len(), self.bytes, "a stash comes back whole");
        let staging = self.staging.upgrade().ok_or(OptimError::Closed)?;
        self.pending.wait()?;
        let chunk_bytes = staging.chunk_bytes();
        let mut index = 0;
        while index < self.chunks.len() {
            if let Some(chunk) = &self.chunks[index] {
                let part = part_of(target, index, chunk_bytes);
                let source = LeaseSlice::new(Arc::clone(chunk), 0, part.len());
                // SAFETY: the stash alone knows the chunk, and writes it only when it is made.
                part.copy_from_slice(unsafe { source.as_slice() });
                index += 1;
                continue;
            }
            let extent = self.extent.expect("chunks on the SSD have an extent");
            let spilled = self.chunks[index..].iter().take_while(|chunk| chunk.is_none()).count();
            let (range, bytes) = (index..index + spilled, self.bytes);
            staging.read_chunks(extent, chunk_bytes, range, bytes, |index, chunk, length| {
                let source = LeaseSlice::new(chunk, 0, length);
                // SAFETY: the read has ended and the chunk is ours alone.
                part_of(target, index, chunk_bytes).copy_from_slice(unsafe { source.as_slice() });
                Ok(())
            })?;
            index += spilled;
        }
        Ok(())
    }
}

fn part_of(target: &mut [u8], index: usize, chunk_bytes: usize) -> &mut [u8] {
    let end = target.len().min((index + 1) * chunk_bytes);
    &mut target[index * chunk_bytes..end]
}

impl Drop for Stash {
    fn drop(&mut self) {
        // The thread that would end the writes did not come along into a forked child.
        if !self.origin.is_here() {
            return;
        }
        // The extent may be reused only after its writes have ended.
        let _ = self.pending.wait();
        if let (Some(staging), Some(extent)) = (self.staging.upgrade(), self.extent) {
            staging.store().free(extent);
        }
    }
}
