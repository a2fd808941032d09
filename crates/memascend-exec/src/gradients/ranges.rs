//! A gradient that is captured range by range, in order, without ever being whole in memory.

use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard};

use memascend_kernels::GradientStats;
use memascend_mem::{HostAllocator, HostBlock, PageableAllocator};
use memascend_store::Extent;

use super::{Chunk, GradientId, GradientPlace, Gradients, Record};
use crate::{ExecError, Result};

/// A gradient on its way. [`Gradients::end_ranges`] makes its values the gradient's;
/// until then the gradient is empty, and it stays empty if this value is dropped before.
pub struct GradientRanges {
    record: Arc<Record>,
    /// The record's number of changes when this capture began.
    change: u64,
    accumulate: bool,
    extent: Extent,
    chunks: Vec<Chunk>,
    /// Elements added so far.
    added: usize,
    /// The elements of a chunk that is not full yet. It is not a staging chunk: a thread that holds
    /// one from one range to the next could wait for another in between.
    partial: Option<HostBlock>,
    stats: GradientStats,
    failed: bool,
}

impl Gradients {
    /// Begins to capture the whole gradient of a tensor that moves alone, in ranges: copies them, or adds
    /// them to the gradient so far if `accumulate`. The result equals one [`Gradients::capture`] of all.
    ///
    /// # Errors
    /// If the gradient is a pack's, or a spill of it failed.
    pub fn begin_ranges(&self, id: GradientId, accumulate: bool) -> Result<GradientRanges> {
        let record = self.record(id);
        let mut place = record.settled();
        let GradientPlace::Chunks { extent, chunks } = &mut *place else {
            return Err(ExecError::Misused("a pack's gradient is not captured in ranges".into()));
        };
        record.pending.wait()?;
        let empty = vec![Chunk::Empty; chunks.len()];
        let (extent, chunks) = (*extent, std::mem::replace(chunks, empty));
        let change = record.changed();
        drop(place);
        let stats = GradientStats::default();
        Ok(GradientRanges {
            record,
            change,
            accumulate,
            extent,
            chunks,
            added: 0,
            partial: None,
            stats,
            failed: false,
        })
    }

    /// Captures the next `numel` elements, at `source`.
    ///
    /// # Errors
    /// If that is more than the rest of the gradient, if the gradient was changed in another way
    /// meanwhile, or if a transfer fails.
    ///
    /// # Safety
    /// `source` points to `numel` readable elements of the dtype that the gradient is made in, which
    /// are not written during the call.
    pub unsafe fn add_range(
        &self,
        ranges: &mut GradientRanges,
        source: *const u8,
        numel: usize,
    ) -> Result<()> {
        let record = Arc::clone(&ranges.record);
        let left = record.numel - ranges.added;
        if numel > left {
            return Err(ExecError::Misused(format!(
                "a range of {numel} elements was added to a gradient of which {left} are left"
            )));
        }
        let _alone = ranges.alone(&record)?;
        if numel == 0 {
            return Ok(());
        }
        // SAFETY: the caller vouches for `numel` readable elements.
        let source = unsafe { std::slice::from_raw_parts(source, numel * record.dtypes.made_bytes()) };
        let added = self.add_bytes(ranges, &record, source);
        ranges.failed |= added.is_err();
        added
    }

    /// Ends the capture: the gradient has its new values. Returns their statistics.
    ///
    /// # Errors
    /// If elements are missing (the rest may be added still), or as [`Gradients::add_range`].
    pub fn end_ranges(&self, ranges: &mut GradientRanges) -> Result<GradientStats> {
        let record = Arc::clone(&ranges.record);
        let left = record.numel - ranges.added;
        if left > 0 {
            return Err(ExecError::Misused(format!(
                "a gradient was ended of which {left} elements are left"
            )));
        }
        let mut place = ranges.alone(&record)?;
        if let GradientPlace::Chunks { chunks, .. } = &mut *place {
            *chunks = std::mem::take(&mut ranges.chunks);
        }
        // An end that is repeated finds the gradient changed.
        record.changed();
        Ok(ranges.stats)
    }

    fn add_bytes(&self, ranges: &mut GradientRanges, record: &Record, mut source: &[u8]) -> Result<()> {
        let element = record.dtypes.made_bytes();
        let chunk_bytes = self.chunk_elements * element;
        let total = record.numel * element;
        while !source.is_empty() {
            let at = ranges.added * element;
            let (index, inside) = (at / chunk_bytes, at % chunk_bytes);
            // Whole chunks are not copied; the last may be short.
            let whole = match source.len() {
                bytes if at + bytes == total => bytes,
                bytes => bytes / chunk_bytes * chunk_bytes,
            };
            let taken = if inside == 0 && whole > 0 {
                self.add_chunks(ranges, record, index, &source[..whole])?;
                whole
            } else {
                let taken = source.len().min(chunk_bytes - inside);
                let partial = match ranges.partial.take() {
                    Some(partial) => partial,
                    None => PageableAllocator::default().allocate(chunk_bytes.min(total))?,
                };
                // SAFETY: the block is ours alone, and `inside + taken` is at most its length.
                let bytes =
                    unsafe { std::slice::from_raw_parts_mut(partial.address().as_ptr(), inside + taken) };
                bytes[inside..].copy_from_slice(&source[..taken]);
                if inside + taken == chunk_bytes || at + taken == total {
                    self.add_chunks(ranges, record, index, bytes)?;
                }
                ranges.partial = Some(partial);
                taken
            };
            ranges.added += taken / element;
            source = &source[taken..];
        }
        Ok(())
    }

    /// Captures whole chunks from chunk `first` on.
    fn add_chunks(
        &self,
        ranges: &mut GradientRanges,
        record: &Record,
        first: usize,
        source: &[u8],
    ) -> Result<()> {
        let GradientRanges { chunks, accumulate, stats, extent, .. } = ranges;
        self.capture_chunks(record, *extent, chunks, first, source, *accumulate, stats, None)
    }
}

impl GradientRanges {
    /// Locks the gradient, if nothing but this capture has changed it.
    fn alone<'a>(&self, record: &'a Record) -> Result<MutexGuard<'a, GradientPlace>> {
        let place = record.settled();
        if self.failed || record.changes.load(Ordering::Relaxed) != self.change {
            return Err(ExecError::Misused(
                "the gradient was changed while ranges of it were captured, or a range failed: begin again"
                    .into(),
            ));
        }
        Ok(place)
    }
}
