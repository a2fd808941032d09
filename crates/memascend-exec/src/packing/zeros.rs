//! Zero points of whole numbers. They are read for each piece, as scales are.

use super::Stored;
use crate::Result;

/// Where the zeros of blocks lie.
#[derive(Debug, Clone)]
pub enum Zeros {
    /// Nowhere: they are half of the numbers' range.
    Half,
    /// Bytes, signed as the numbers are.
    Signed(Stored),
    /// Words of 32 bits, each of which has the zeros of a column of some rows of blocks, the first one lowest.
    Words(Stored),
}

impl Zeros {
    /// The bits of a number that are inverted, so that a signed one counts from 0.
    pub(super) fn flipped(&self) -> u8 {
        if matches!(self, Self::Signed(_)) { 0x80 } else { 0 }
    }

    /// Reads the zeros, for numbers of `bits` that count from 0, of `count` rows of `width` blocks from row `top` on.
    pub(super) fn read(
        &self,
        bits: usize,
        top: usize,
        count: usize,
        width: usize,
        window: &mut [u8],
    ) -> Result<Vec<f32>> {
        match self {
            Self::Half => Ok(vec![(1 << (bits - 1)) as f32; count * width]),
            Self::Signed(stored) => {
                let bytes = stored.read(top * width, count * width, window)?;
                Ok(bytes.into_iter().map(|byte| f32::from(byte ^ 0x80)).collect())
            }
            Self::Words(stored) => {
                let per_word = 32 / bits;
                let first = top / per_word;
                let words = (top + count).div_ceil(per_word) - first;
                let bytes = stored.read(4 * first * width, 4 * words * width, window)?;
                let zero = |row: usize, column: usize| {
                    let at = 4 * ((row / per_word - first) * width + column);
                    let word = u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
                    (word >> (row % per_word * bits) & ((1 << bits) - 1)) as f32
                };
                Ok((0..count * width).map(|at| zero(top + at / width, at % width)).collect())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use memascend_kernels::round_bf16;

    use super::super::tests::{opened, read};
    use super::super::{Numbers, Packing, ScaleFormat, Scales};
    use super::*;

    #[test]
    fn whole_numbers_have_the_zero_of_their_block_in_any_piece() {
        let (rows, width, block) = (40, 96, (1, 32));
        let grid_width = width / block.1;
        let scales: Vec<f32> = (0..rows * grid_width).map(|at| 0.01 + at as f32 / 7.0).collect();
        let scale_bytes: Vec<u8> = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
        for bits in [2, 4, 8] {
            let most = (1usize << bits) - 1;
            let per_word = 32 / bits;
            let number = |at: usize| (at * 7 + at / 31) & most;
            let zero = |block: usize| (block * 5 + 3) & most;
            let packed: Vec<u8> = (0..rows * width * bits / 8)
                .map(|byte| {
                    let per_byte = 8 / bits;
                    (0..per_byte).fold(0, |made, n| made | number(byte * per_byte + n) << (n * bits)) as u8
                })
                .collect();
            let words: Vec<u8> = (0..rows.div_ceil(per_word) * grid_width)
                .flat_map(|at| {
                    let (top, column) = (at / grid_width * per_word, at % grid_width);
                    let of_rows = (0..per_word).filter(|n| top + n < rows);
                    let word = of_rows.fold(0u32, |word, n| {
                        word | (zero((top + n) * grid_width + column) as u32) << (n * bits)
                    });
                    word.to_le_bytes()
                })
                .collect();
            // Signed numbers and zeros are less by half of their range.
            let signed: Vec<u8> = (0..rows * grid_width).map(|block| zero(block) as u8 ^ 0x80).collect();
            let flipped: Vec<u8> = packed.iter().map(|byte| byte ^ 0x80).collect();
            let bytes = [&scale_bytes[..], &words, &signed, &packed, &flipped].concat();
            let (_file, file) = opened(&bytes, true);
            let stored = |position: usize| Stored { file: Arc::clone(&file), position: position as u64 };
            let words_at = scale_bytes.len();
            let signed_at = words_at + words.len();
            let packed_at = signed_at + signed.len();
            let half = 1 << (bits - 1);
            let kinds = [
                (Zeros::Half, packed_at),
                (Zeros::Words(stored(words_at)), packed_at),
                (Zeros::Signed(stored(signed_at)), packed_at + packed.len()),
            ];
            for (zeros, position) in kinds {
                let is_half = matches!(zeros, Zeros::Half);
                let zero = |block| if is_half { half } else { zero(block) };
                if bits != 8 && matches!(zeros, Zeros::Signed(_)) {
                    continue;
                }
                let numbers = Numbers::Whole { bits, zeros };
                let scales_at = Scales { stored: stored(0), format: ScaleFormat::F32 };
                let packing = Packing::Rows { numbers, width, block, scales: scales_at };
                for (top, bottom) in [(0, rows), (7, 8), (15, 33)] {
                    let wanted: Vec<u16> = (top * width..bottom * width)
                        .map(|at| {
                            let block = at / width * grid_width + at % width / block.1;
                            round_bf16((number(at) as f32 - zero(block) as f32) * scales[block])
                        })
                        .collect();
                    let made = read(&packing, &file, position as u64, top * width, (bottom - top) * width);
                    assert_eq!(made, wanted, "{bits} bits, rows {top} .. {bottom}");
                }
            }
        }
    }
}
