//! Single rows of a tensor, read into memory side by side.
//!
//! Rows of a table that an optimizer updates are read without a comparison: the update reads the whole table,
//! and compares it, before the step is committed.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};

use memascend_mem::{Lease, LeaseSlice, PAGE_BYTES};
use memascend_store::{BlockCheck, Extent, StoreError};

use crate::{ExecError, Result, Staging};

/// Bytes between two rows that are rather read than left out: a drive takes longer for another
/// request.
const GAP_BYTES: usize = 16 << 10;
/// Chunks filled ahead of the one whose rows are copied.
const CHUNKS_AHEAD: usize = 32;

impl Staging {
    /// Reads `rows`, ascending numbers of rows of `row_bytes` bytes, of `extent`, whose writes have
    /// ended, and puts them one behind another into `target`.
    ///
    /// With `compare` they are compared with their checksums. Checksums are of whole MiBs, so the
    /// first read of a row reads its MiB, and notes a checksum for each block there, with which later
    /// reads are compared. Where the rows are spread over more than half of the extent, all of it is
    /// read, and compared in any case.
    ///
    /// # Errors
    /// If a row is not in the extent, or does not follow the one before it, if a read fails, or if
    /// bytes are compared and differ.
    ///
    /// # Panics
    /// If `target` has another length than the rows.
    pub fn read_rows(
        &self,
        extent: Extent,
        row_bytes: usize,
        rows: &[i64],
        target: &mut [u8],
        compare: bool,
    ) -> Result<()> {
        assert_eq!(Some(target.len()), rows.len().checked_mul(row_bytes), "the target holds the rows");
        check(extent, row_bytes, rows)?;
        let spans = spans(row_bytes, rows);
        let mut picker = Picker { row_bytes, rows, target, next: 0 };
        let covered: usize = spans.iter().map(Range::len).sum();
        if covered as u64 * 2 <= extent.bytes {
            let Some(mut check) = compare.then(|| self.store().check_blocks(extent)) else {
                return self.read_spans(extent, spans, &mut picker, None);
            };
            let spans = check.widen(spans);
            return self.read_spans(extent, spans, &mut picker, Some(check));
        }
        let (chunk_bytes, bytes) = (self.chunk_bytes(), extent.bytes as usize);
        self.read_chunks(
            extent,
            chunk_bytes,
            0..bytes.div_ceil(chunk_bytes),
            bytes,
            |index, chunk, length| {
                let read = LeaseSlice::new(chunk, 0, length);
                // SAFETY: the read has ended and the chunk is ours alone.
                picker.pick(index * chunk_bytes, unsafe { read.as_slice() });
                Ok(())
            },
        )
    }

    /// Reads `spans`, as many at once as staging chunks hold, and compares them by `check`.
    fn read_spans(
        &self,
        extent: Extent,
        spans: Vec<Range<usize>>,
        picker: &mut Picker<'_>,
        mut check: Option<BlockCheck>,
    ) -> Result<()> {
        let most = self.chunk_bytes();
        let cut = |span: Range<usize>| {
            let end = span.end;
            span.step_by(most).map(move |start| start..end.min(start + most))
        };
        let mut pieces = spans.into_iter().flat_map(cut).peekable();
        let mut ahead = VecDeque::new();
        loop {
            while pieces.peek().is_some() && ahead.len() < CHUNKS_AHEAD {
                // As in `read_chunks`: only the first chunk may be waited for.
                let chunk = if ahead.is_empty() { Some(self.chunk()?) } else { self.spare_chunk(1)? };
                let Some(chunk) = chunk else { break };
                let (sender, ended) = channel();
                let mut filled = Filled { chunk, pieces: Vec::new(), ended };
                let mut at = 0;
                while let Some(piece) = pieces.next_if(|piece| at + piece.len() <= most) {
                    let buffer = LeaseSlice::new(Arc::clone(&filled.chunk), at, piece.len());
                    let (sender, offset) = (sender.clone(), piece.start as u64);
                    let done = Box::new(move |result| drop(sender.send(result)));
                    self.store().read_uncompared(extent, offset, buffer, done);
                    at += piece.len();
                    filled.pieces.push(piece);
                }
                ahead.push_back(filled);
            }
            match ahead.pop_front() {
                Some(filled) => filled.pick(picker, check.as_mut())?,
                None => return Ok(()),
            }
        }
    }
}

fn check(extent: Extent, row_bytes: usize, rows: &[i64]) -> Result<()> {
    let count = if row_bytes == 0 { 0 } else { extent.bytes / row_bytes as u64 };
    if let Some(row) = rows.iter().find(|row| u64::try_from(**row).map_or(true, |row| row >= count)) {
        let message = format!("row {row} was asked for of a tensor of {count} rows of {row_bytes} bytes");
        return Err(ExecError::Misused(message));
    }
    if rows.is_sorted_by(|before, after| before < after) {
        return Ok(());
    }
    Err(ExecError::Misused("rows to read are given in ascending order, each once".into()))
}

/// The pages that hold the rows: ranges of the extent, in order, with small gaps filled.
fn spans(row_bytes: usize, rows: &[i64]) -> Vec<Range<usize>> {
    let mut spans: Vec<Range<usize>> = Vec::new();
    for row in rows {
        let first = *row as usize * row_bytes;
        let start = first / PAGE_BYTES * PAGE_BYTES;
        let end = (first + row_bytes).next_multiple_of(PAGE_BYTES);
        match spans.last_mut() {
            Some(last) if start <= last.end + GAP_BYTES => last.end = end,
            _ => spans.push(start..end),
        }
    }
    spans
}

/// A chunk that pieces of an extent are read into, one behind another.
struct Filled {
    chunk: Arc<Lease>,
    pieces: Vec<Range<usize>>,
    ended: Receiver<std::result::Result<(), StoreError>>,
}

impl Filled {
    /// Waits for the reads, compares them by `check`, and picks the rows.
    fn pick(self, picker: &mut Picker<'_>, mut check: Option<&mut BlockCheck>) -> Result<()> {
        for _ in &self.pieces {
            self.ended.recv().map_err(|_| ExecError::Closed)??;
        }
        let mut at = 0;
        for piece in self.pieces {
            let read = LeaseSlice::new(Arc::clone(&self.chunk), at, piece.len());
            // SAFETY: the reads have ended and the chunk is ours alone.
            let bytes = unsafe { read.as_slice() };
            if let Some(check) = &mut check {
                check.compare(piece.start as u64, bytes)?;
            }
            picker.pick(piece.start, bytes);
            at += piece.len();
        }
        Ok(())
    }
}

/// Copies rows out of the bytes that were read.
struct Picker<'a> {
    row_bytes: usize,
    rows: &'a [i64],
    target: &'a mut [u8],
    /// The first row that is not complete.
    next: usize,
}

impl Picker<'_> {
    /// Copies the rows in `bytes`, the extent's bytes from `start` on. Called in order.
    fn pick(&mut self, start: usize, bytes: &[u8]) {
        let end = start + bytes.len();
        while let Some(row) = self.rows.get(self.next) {
            let first = *row as usize * self.row_bytes;
            let last = first + self.row_bytes;
            let (from, to) = (first.max(start), last.min(end));
            if from < to {
                let at = self.next * self.row_bytes + (from - first);
                self.target[at..at + (to - from)].copy_from_slice(&bytes[from - start..to - start]);
            }
            if last > end {
                return;
            }
            self.next += 1;
        }
    }
}
