//! Zero points of whole numbers. They are read for each piece, as scales are.

use super::Stored;
use super::places::{Need, Window};
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

    /// The need of the zeros, for numbers of `bits`, of `count` rows of `width` blocks, beside other reads.
    pub(super) fn need(&self, bits: usize, count: usize, width: usize, beside: Need) -> Need {
        match self {
            Self::Half => beside,
            Self::Signed(_) => beside.and(count * width),
            Self::Words(_) => beside.and(4 * (count.div_ceil(32 / bits) + 1) * width),
        }
    }

    /// Reads the zeros, for numbers of `bits` that count from 0, of `count` rows of `width` blocks from row `top` on,
    /// into `window`.
    pub(super) fn read<'a>(
        &self,
        bits: usize,
        top: usize,
        count: usize,
        width: usize,
        window: &mut Window<'a>,
    ) -> Result<ReadZeros<'a>> {
        Ok(match self {
            Self::Half => ReadZeros::All((1 << (bits - 1)) as f32),
            Self::Signed(stored) => {
                ReadZeros::Signed { zeros: stored.read(top * width, count * width, window)?, top, width }
            }
            Self::Words(stored) => {
                let first = top / (32 / bits);
                let words = (top + count).div_ceil(32 / bits) - first;
                let words = stored.read(4 * first * width, 4 * words * width, window)?;
                ReadZeros::Words { words, bits, first, width }
            }
        })
    }
}

/// Some rows of zeros in a window.
pub(super) enum ReadZeros<'a> {
    /// The one of all blocks.
    All(f32),
    /// Bytes, of rows of `width` from row `top` on.
    Signed { zeros: &'a [u8], top: usize, width: usize },
    /// Words of numbers of `bits`, in rows of `width` from row of words `first` on.
    Words { words: &'a [u8], bits: usize, first: usize, width: usize },
}

impl ReadZeros<'_> {
    /// Fills `values` with the zeros of the blocks of row `row` from `column` on.
    pub(super) fn fill(&self, row: usize, column: usize, values: &mut [f32]) {
        match *self {
            Self::All(zero) => values.fill(zero),
            Self::Signed { zeros, top, width } => {
                let zeros = &zeros[(row - top) * width + column..];
                values.iter_mut().zip(zeros).for_each(|(value, byte)| *value = f32::from(byte ^ 0x80));
            }
            Self::Words { words, bits, first, width } => {
                let per_word = 32 / bits;
                let words = &words.as_chunks().0[(row / per_word - first) * width + column..];
                for (value, word) in values.iter_mut().zip(words) {
                    let number = u32::from_le_bytes(*word) >> (row % per_word * bits) & ((1 << bits) - 1);
                    *value = number as f32;
                }
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
