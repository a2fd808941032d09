//! Where a piece is read to, and where its elements go.

use memascend_mem::PAGE_BYTES;
use memascend_store::ExternalFile;

use crate::{FILE_WINDOW_BYTES, Result};

/// The rest of a window. Each read takes as many of its blocks as it needs.
pub(super) struct Window<'a>(&'a mut [u8]);

impl<'a> Window<'a> {
    pub(super) fn new(window: &'a mut [u8]) -> Self {
        Self(window)
    }

    /// The bytes at `position` of `file`, which stay in the window.
    ///
    /// # Panics
    /// If there is no room for them: [`Need`] says before how much there has to be.
    pub(super) fn read(&mut self, file: &ExternalFile, position: u64, bytes: usize) -> Result<&'a [u8]> {
        let blocks = ExternalFile::blocks_of(position, bytes);
        let (blocks, rest) = std::mem::take(&mut self.0).split_at_mut(blocks);
        self.0 = rest;
        Ok(file.read_in_place(position, bytes, blocks)?)
    }
}

/// Bytes of a window that reads take at most.
#[derive(Clone, Copy, Default)]
pub(super) struct Need(usize);

impl Need {
    /// With a read of `bytes` more, at any position.
    pub(super) fn and(self, bytes: usize) -> Self {
        Self(self.0 + bytes.next_multiple_of(PAGE_BYTES) + PAGE_BYTES)
    }

    /// Whether a window has room for them.
    pub(super) fn fits(self) -> bool {
        self.0 <= FILE_WINDOW_BYTES
    }
}

/// The elements of a part of a unit, bf16. Threads write at once, each the elements of its piece.
pub(crate) struct Target {
    first: *mut u16,
    elements: usize,
}

impl Target {
    /// # Safety
    /// The bytes are valid memory while the target lives, and no other code uses the elements that it is asked for.
    ///
    /// # Panics
    /// If no bf16 begins at `address`.
    pub(crate) unsafe fn new(address: *mut u8, bytes: usize) -> Self {
        assert!(address.addr().is_multiple_of(2), "bf16 at {address:?}");
        Self { first: address.cast(), elements: bytes / 2 }
    }

    /// Elements of the part.
    pub(super) fn elements(&self) -> usize {
        self.elements
    }

    /// The elements `first .. first + count`.
    ///
    /// # Panics
    /// If the part does not have them.
    pub(super) fn slice(&mut self, first: usize, count: usize) -> &mut [u16] {
        let end = first.checked_add(count);
        assert!(end.is_some_and(|end| end <= self.elements), "{count} elements from {first} on");
        // SAFETY: they lie in the memory that `new` was given, which no other code uses. This one slice borrows
        // the target.
        unsafe { std::slice::from_raw_parts_mut(self.first.add(first), count) }
    }
}
