use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use memascend_mem::{Lease, LeaseSlice};
use memascend_store::Extent;

use crate::kernels::{
    GRADIENT_BLOCK, GradientStats, add_bf16, add_f16, add_f32, copy_bf16, copy_f16, copy_f32,
};
use crate::{Dtype, Pending, Result, Staging};

/// Names a gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GradientId(pub usize);

/// The gradients of a training run: taken over as autograd makes them, kept in spare staging buffers, and
/// spilled to the SSD chunk by chunk where those run out.
pub struct Gradients {
    staging: Staging,
    chunk_elements: usize,
    records: Mutex<Vec<Arc<Mutex<Record>>>>,
}

struct Record {
    dtype: Dtype,
    numel: usize,
    pending: Arc<Pending>,
    place: Place,
}

enum Place {
    /// Cut into chunks, each where it found room.
    Chunks { extent: Extent, chunks: Vec<Chunk> },
    /// Small tensors packed together: a buffer of their own for the whole run.
    Packed { buffer: LeaseSlice },
}

/// Where one chunk of a gradient is.
#[derive(Clone)]
pub(crate) enum Chunk {
    /// Nowhere: no gradient yet.
    Empty,
    /// In a staging buffer.
    Host(Arc<Lease>),
    /// On the SSD.
    Ssd,
}

/// A gradient handed to an update. Host chunks return to the pool as the update consumes them.
#[derive(Clone)]
pub struct GradientSource {
    pub(crate) place: SourcePlace,
}

#[derive(Clone)]
pub(crate) enum SourcePlace {
    Chunks {
        extent: Extent,
        chunk_elements: usize,
        chunks: Vec<Chunk>,
    },
    Packed {
        buffer: LeaseSlice,
    },
    /// Every segment of the update names its own address.
    Addresses,
}

impl GradientSource {
    /// The gradients are where the segments say.
    pub fn addresses() -> Self {
        Self { place: SourcePlace::Addresses }
    }
}

impl Gradients {
    /// No gradients yet, spilled through `staging` in pieces of `chunk_elements` elements: those of the
    /// executor, a multiple of [`GRADIENT_BLOCK`], and at most a staging buffer each.
    pub fn new(staging: Staging, chunk_elements: usize) -> Self {
        assert!(chunk_elements.is_multiple_of(GRADIENT_BLOCK), "statistics are taken in whole blocks");
        Self { staging, chunk_elements, records: Mutex::default() }
    }

    /// Makes room for the gradient of a tensor that moves alone. `pending` counts its spills.
    pub fn create(
        &self,
        name: &str,
        dtype: Dtype,
        numel: usize,
        pending: Arc<Pending>,
    ) -> Result<GradientId> {
        let bytes = numel * dtype.bytes();
        let extent = self.staging.store().allocate(name, bytes as u64)?;
        let chunks = vec![Chunk::Empty; numel.div_ceil(self.chunk_elements)];
        Ok(self.insert(Record { dtype, numel, pending, place: Place::Chunks { extent, chunks } }))
    }

    /// Makes room for the gradients of small tensors packed together, in `buffer`.
    pub fn create_packed(&self, dtype: Dtype, numel: usize, buffer: LeaseSlice) -> GradientId {
        assert!(numel * dtype.bytes() <= buffer.bytes(), "the buffer holds the pack");
        self.insert(Record { dtype, numel, pending: Arc::default(), place: Place::Packed { buffer } })
    }

    /// Takes over a gradient of `numel` elements that begins at element `start` of the tensor: copied, or added
    /// to what is there when `accumulate`. Returns the statistics of the result.
    ///
    /// # Safety
    /// `source` points to `numel` readable elements of the gradient's dtype, which nobody writes meanwhile.
    ///
    /// # Panics
    /// If the range leaves the tensor, or is not the whole of a tensor that moves alone.
    pub unsafe fn capture(
        &self,
        id: GradientId,
        start: usize,
        source: *const u8,
        numel: usize,
        accumulate: bool,
    ) -> Result<GradientStats> {
        let record = self.record(id);
        let mut record = record.lock().unwrap_or_else(PoisonError::into_inner);
        let end = start.checked_add(numel).expect("the end overflows");
        assert!(end <= record.numel, "elements {start}+{numel} of a gradient of {}", record.numel);
        if numel == 0 {
            return Ok(GradientStats::default()); // torch gives an empty tensor the address 0
        }
        let Record { dtype, pending, place, numel: whole } = &mut *record;
        let dtype = *dtype;
        // SAFETY: the caller vouches for `numel` readable elements.
        let source = unsafe { std::slice::from_raw_parts(source, numel * dtype.bytes()) };
        let mut stats = GradientStats::default();
        match place {
            Place::Packed { buffer } => {
                let target = buffer.narrow(start * dtype.bytes(), source.len());
                // SAFETY: the record's lock is held and the pack's buffer belongs to the record; an update that
                // reads it has been waited for before gradients are captured again.
                merge(dtype, unsafe { target.as_mut_slice() }, source, accumulate, &mut stats);
            }
            Place::Chunks { extent, chunks } => {
                assert!(start == 0 && numel == *whole, "a large tensor's gradient is captured whole");
                pending.wait()?;
                self.capture_chunks(dtype, *extent, chunks, source, accumulate, pending, &mut stats)?;
            }
        }
        Ok(stats)
    }

    #[allow(clippy::too_many_arguments)]
    fn capture_chunks(
        &self,
        dtype: Dtype,
        extent: Extent,
        chunks: &mut [Chunk],
        source: &[u8],
        accumulate: bool,
        pending: &Arc<Pending>,
        stats: &mut GradientStats,
    ) -> Result<()> {
        let chunk_bytes = self.chunk_elements * dtype.bytes();
        let mut index = 0;
        while index < chunks.len() {
            let part =
                |index: usize| &source[index * chunk_bytes..source.len().min((index + 1) * chunk_bytes)];
            // Neighbouring spilled chunks are read ahead of the addition.
            let spilled = if accumulate {
                chunks[index..].iter().take_while(|chunk| matches!(chunk, Chunk::Ssd)).count()
            } else {
                0
            };
            if spilled > 0 {
                self.staging.read_chunks(
                    extent,
                    chunk_bytes,
                    index..index + spilled,
                    source.len(),
                    |index, chunk, length| {
                        let target = LeaseSlice::new(Arc::clone(&chunk), 0, length);
                        // SAFETY: the read has ended and the chunk is ours alone.
                        merge(dtype, unsafe { target.as_mut_slice() }, part(index), true, stats);
                        self.staging.write_chunk(extent, index * chunk_bytes, chunk, length, pending);
                        Ok(())
                    },
                )?;
                index += spilled;
                continue;
            }
            let part = part(index);
            let ((lease, stays), add) = match &chunks[index] {
                Chunk::Host(lease) => ((Arc::clone(lease), true), accumulate),
                _ => (self.staging.chunk_to_keep()?, false),
            };
            let target = LeaseSlice::new(Arc::clone(&lease), 0, part.len());
            // SAFETY: the record's lock is held; the lease is fresh or belongs to the record.
            merge(dtype, unsafe { target.as_mut_slice() }, part, add, stats);
            if stays {
                chunks[index] = Chunk::Host(lease);
            } else {
                self.staging.write_chunk(extent, index * chunk_bytes, lease, part.len(), pending);
                chunks[index] = Chunk::Ssd;
            }
            index += 1;
        }
        Ok(())
    }

    /// Forgets a gradient's values; its room on the SSD stays.
    pub fn clear(&self, id: GradientId) {
        if let Place::Chunks { chunks, .. } = &mut self.lock_record(&self.record(id)).place {
            chunks.fill(Chunk::Empty);
        }
    }

    /// Hands a gradient over to an update and forgets it.
    pub fn take(&self, id: GradientId) -> GradientSource {
        let record = self.record(id);
        let mut record = self.lock_record(&record);
        let place = match &mut record.place {
            Place::Packed { buffer } => SourcePlace::Packed { buffer: buffer.clone() },
            Place::Chunks { extent, chunks } => {
                let empty = vec![Chunk::Empty; chunks.len()];
                let chunks = std::mem::replace(chunks, empty);
                SourcePlace::Chunks { extent: *extent, chunk_elements: self.chunk_elements, chunks }
            }
        };
        GradientSource { place }
    }

    /// Reads a gradient of `target.len()` bytes: for inspection, off the training path.
    pub fn read(&self, id: GradientId, target: &mut [u8]) -> Result<()> {
        let record = self.record(id);
        let record = self.lock_record(&record);
        record.pending.wait()?;
        match &record.place {
            Place::Packed { buffer } => {
                // SAFETY: the record's lock is held and no update is under way on a gradient being inspected.
                target.copy_from_slice(&unsafe { buffer.as_slice() }[..target.len()]);
            }
            Place::Chunks { extent, chunks } => {
                self.staging.read(*extent, target)?;
                let chunk_bytes = self.chunk_elements * record.dtype.bytes();
                for (part, chunk) in target.chunks_mut(chunk_bytes).zip(chunks) {
                    match chunk {
                        Chunk::Host(lease) => {
                            let source = LeaseSlice::new(Arc::clone(lease), 0, part.len());
                            // SAFETY: the record's lock is held; only captures write its chunks.
                            part.copy_from_slice(unsafe { source.as_slice() });
                        }
                        Chunk::Empty => part.fill(0),
                        Chunk::Ssd => {}
                    }
                }
            }
        }
        Ok(())
    }

    fn insert(&self, record: Record) -> GradientId {
        let mut records = self.records.lock().unwrap_or_else(PoisonError::into_inner);
        records.push(Arc::new(Mutex::new(record)));
        GradientId(records.len() - 1)
    }

    fn record(&self, id: GradientId) -> Arc<Mutex<Record>> {
        Arc::clone(&self.records.lock().unwrap_or_else(PoisonError::into_inner)[id.0])
    }

    fn lock_record<'a>(&self, record: &'a Arc<Mutex<Record>>) -> MutexGuard<'a, Record> {
        record.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// `target = source` or `target += source`, with the statistics of the result.
fn merge(dtype: Dtype, target: &mut [u8], source: &[u8], add: bool, stats: &mut GradientStats) {
    match dtype {
        Dtype::Bf16 => {
            let (target, source) = (cast_mut::<u16>(target), cast::<u16>(source));
            if add { add_bf16(target, source, stats) } else { copy_bf16(target, source, stats) }
        }
        Dtype::F16 => {
            let (target, source) = (cast_mut::<u16>(target), cast::<u16>(source));
            if add { add_f16(target, source, stats) } else { copy_f16(target, source, stats) }
        }
        Dtype::F32 => {
            let (target, source) = (cast_mut::<f32>(target), cast::<f32>(source));
            if add { add_f32(target, source, stats) } else { copy_f32(target, source, stats) }
        }
    }
}

/// Numbers of which every bit pattern is a value.
pub(crate) trait Plain: Copy {}
impl Plain for u16 {}
impl Plain for f32 {}

pub(crate) fn cast<T: Plain>(bytes: &[u8]) -> &[T] {
    // SAFETY: every bit pattern is a valid T.
    let (before, values, after) = unsafe { bytes.align_to::<T>() };
    assert!(before.is_empty() && after.is_empty(), "a buffer of whole, aligned elements");
    values
}

pub(crate) fn cast_mut<T: Plain>(bytes: &mut [u8]) -> &mut [T] {
    // SAFETY: every bit pattern is a valid T.
    let (before, values, after) = unsafe { bytes.align_to_mut::<T>() };
    assert!(before.is_empty() && after.is_empty(), "a buffer of whole, aligned elements");
    values
}
