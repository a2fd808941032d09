//! Memory that direct transfers can use.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::slice;

use crate::BLOCK_BYTES;
use crate::memory::with_room;

/// Memory that O_DIRECT can use.
#[derive(Clone)]
#[repr(C, align(4096))]
struct Block([u8; BLOCK_BYTES]);

/// Whole blocks of memory, aligned, to be transferred by O_DIRECT.
pub(crate) struct Blocks(Vec<Block>);

impl Blocks {
    /// Zeros: `bytes` bytes, rounded up to whole blocks.
    pub(crate) fn zeroed(bytes: usize) -> io::Result<Self> {
        let blocks = bytes.div_ceil(BLOCK_BYTES);
        let mut zeros = with_room(blocks)?;
        zeros.resize(blocks, Block([0; BLOCK_BYTES]));
        Ok(Self(zeros))
    }

    /// Reads `bytes` bytes, rounded up to whole blocks.
    pub(crate) fn read(file: &File, offset: u64, bytes: usize) -> io::Result<Self> {
        let mut blocks = Self::zeroed(bytes)?;
        file.read_exact_at(blocks.bytes_mut(), offset)?;
        Ok(blocks)
    }

    /// Writes all blocks at `offset`.
    pub(crate) fn write(&self, file: &File, offset: u64) -> io::Result<()> {
        file.write_all_at(self.bytes(), offset)
    }

    /// The first block.
    pub(crate) fn first(&self) -> &[u8; BLOCK_BYTES] {
        &self.0[0].0
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: a block is exactly its bytes, so that blocks in a row are bytes in a row.
        unsafe { slice::from_raw_parts(self.0.as_ptr().cast(), self.0.len() * BLOCK_BYTES) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and the borrow is exclusive.
        unsafe { slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), self.0.len() * BLOCK_BYTES) }
    }
}

impl From<[u8; BLOCK_BYTES]> for Blocks {
    fn from(block: [u8; BLOCK_BYTES]) -> Self {
        Self(vec![Block(block)])
    }
}

const _: () = assert!(size_of::<Block>() == BLOCK_BYTES && align_of::<Block>() == BLOCK_BYTES);
