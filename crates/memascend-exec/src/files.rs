//! Weights read from files outside the store.

use std::sync::Arc;
use std::thread::JoinHandle;

use crossbeam_channel::{Sender, unbounded};
use memascend_mem::{HostAllocator, LeaseSlice, Origin, PAGE_BYTES, PageableAllocator};
use memascend_store::ExternalFile;

use crate::packing::{Packing, Target};
use crate::{ExecError, InFlight, Result};

/// Threads that read external files, and so reads in flight: each has one window.
pub const FILE_WINDOWS: usize = 4;
/// Bytes of a window.
pub const FILE_WINDOW_BYTES: usize = 1 << 20;

/// A part of a unit's weights that lies in a file outside the store.
#[derive(Debug, Clone)]
pub struct FilePart {
    /// The file.
    pub file: Arc<ExternalFile>,
    /// Where the part begins in the file, in bytes; need not be aligned.
    pub position: u64,
    /// Where it begins in the unit, in bytes.
    pub offset: usize,
    /// Length in bytes, in the unit.
    pub bytes: usize,
    /// How it is stored, where that is not as in the unit. Then the unit has it in bf16.
    pub packing: Option<Arc<Packing>>,
}

/// Reads parts of files into leases, on a few threads. A tensor's offset in a file is seldom a
/// multiple of a block, so each thread reads whole blocks into a window and copies the part from
/// there. Memory is several times as fast as a drive.
pub(crate) struct FileReader {
    pieces: Option<Sender<FilePiece>>,
    threads: Vec<JoinHandle<()>>,
    origin: Origin,
}

/// The bytes that one thread reads at once: as many of a stored part as one window holds.
struct FilePiece {
    file: Arc<ExternalFile>,
    position: u64,
    /// The bytes that are read; where the part is packed, all its bytes.
    buffer: LeaseSlice,
    read: InFlight,
    /// How the part is stored, and the number of the piece.
    packed: Option<(Arc<Packing>, usize)>,
}

impl FileReader {
    /// Starts the threads.
    ///
    /// # Errors
    /// If there is no memory for the windows, or the system starts no thread.
    pub(crate) fn new() -> Result<Self> {
        let (pieces, accepted) = unbounded::<FilePiece>();
        let mut threads = Vec::with_capacity(FILE_WINDOWS);
        for index in 0..FILE_WINDOWS {
            let window = PageableAllocator::default().allocate(FILE_WINDOW_BYTES)?;
            let accepted = accepted.clone();
            let read = move || {
                // SAFETY: the block is this thread's own, and lives as long as the slice.
                let window =
                    unsafe { std::slice::from_raw_parts_mut(window.address().as_ptr(), FILE_WINDOW_BYTES) };
                for FilePiece { file, position, buffer, read, packed } in accepted {
                    let result = match packed {
                        None => {
                            // SAFETY: no other code uses the range until the read has ended, and ranges do
                            // not overlap.
                            let target = unsafe { buffer.as_mut_slice() };
                            file.read(position, target, window).map_err(ExecError::from)
                        }
                        Some((packing, piece)) => {
                            // SAFETY: no other code uses the part until the read has ended, and a piece's
                            // elements are in no other.
                            let mut target =
                                unsafe { Target::new(buffer.address().as_ptr(), buffer.bytes()) };
                            packing.read(&file, position, piece, &mut target, window)
                        }
                    };
                    // Drop the buffer before signalling, so the waiter can reuse it.
                    drop(buffer);
                    read.end(result);
                }
            };
            let thread = std::thread::Builder::new().name(format!("memascend-files-{index}"));
            threads.push(thread.spawn(read).map_err(ExecError::no_thread)?);
        }
        Ok(Self { pieces: Some(pieces), threads, origin: Origin::here() })
    }

    /// Starts reading `part` into `buffer`, which has the same length. `begin` begins the operation
    /// of each piece.
    pub(crate) fn read(&self, part: &FilePart, buffer: &LeaseSlice, begin: impl Fn() -> InFlight) {
        let pieces = self.pieces.as_ref().expect("open until dropped");
        if let Some(packing) = &part.packing {
            for piece in 0..packing.pieces(part.bytes / 2) {
                let (file, position) = (Arc::clone(&part.file), part.position);
                let (buffer, packed) = (buffer.narrow(0, part.bytes), Some((Arc::clone(packing), piece)));
                let _ = pieces.send(FilePiece { file, position, buffer, read: begin(), packed });
            }
            return;
        }
        let mut done = 0;
        while done < part.bytes {
            let position = part.position + done as u64;
            // Up to the end of the window that begins with the block of the first byte.
            let bytes = (FILE_WINDOW_BYTES - (position % PAGE_BYTES as u64) as usize).min(part.bytes - done);
            let file = Arc::clone(&part.file);
            let piece =
                FilePiece { file, position, buffer: buffer.narrow(done, bytes), read: begin(), packed: None };
            // A refused piece is dropped, which ends its operation with an error.
            let _ = pieces.send(piece);
            done += bytes;
        }
    }
}

impl Drop for FileReader {
    fn drop(&mut self) {
        // A forked child has no such threads.
        if !self.origin.is_here() {
            return;
        }
        self.pieces = None;
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}
