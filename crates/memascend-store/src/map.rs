//! The address space of a store, and where its bytes lie on the volumes.

use std::sync::Arc;

use memascend_nvme::VolumeFile;

use crate::layout::VolumePiece;
use crate::table::Bytes;
use crate::{Damage, Extent, Layout};

/// How the address space is laid out over the files of the volumes.
pub(crate) struct Map {
    pub layout: Layout,
    pub files: Vec<Arc<VolumeFile>>,
}

impl Map {
    /// The volume ranges that hold `bytes` bytes at `offset` within the concatenation of `ranges`.
    pub(crate) fn pieces(&self, ranges: &[Extent], offset: u64, bytes: u64) -> Vec<VolumePiece> {
        let mut pieces = Vec::new();
        let (mut skipped, mut done) = (0, 0);
        for range in ranges {
            let from = offset.saturating_sub(skipped);
            if from < range.bytes && done < bytes {
                let length = (range.bytes - from).min(bytes - done);
                let range_pieces = self.layout.pieces(range.offset + from, length);
                let shifted = range_pieces
                    .into_iter()
                    .map(|piece| VolumePiece { start: piece.start + done as usize, ..piece });
                pieces.extend(shifted);
                done += length;
            }
            skipped += range.bytes;
        }
        pieces
    }

    /// The report of damaged bytes: the tensor, and where the bytes lie on the volumes.
    pub(crate) fn damage(&self, of: &Bytes, offset: u64, bytes: u64) -> Damage {
        let place = |piece: VolumePiece| {
            let file = &self.files[piece.volume];
            (file.path().to_owned(), file.position(piece.offset))
        };
        let places = self.pieces(&of.ranges, offset, bytes).into_iter().map(place).collect();
        Damage { tensor: of.name.to_string(), offset, bytes, places }
    }
}
