//! AWQ and GPTQ in four bits: numbers in words of 32 bits, of matrices that are stored as the transposes of the
//! model's. They are read in strips, as MXFP4 is.

use memascend_kernels::dequantise_half;
use memascend_mem::PAGE_BYTES;
use memascend_store::ExternalFile;

use super::Stored;
use crate::Result;

/// Numbers in a word.
const PER_WORD: usize = 8;
/// Elements of a column that are dequantised at once.
const RUN: usize = 256;

/// Which numbers share a word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WordOrder {
    /// Eight columns of a row, in AWQ's order.
    Awq,
    /// Eight rows of a column, in order; a number is added to words of zeros.
    Gptq {
        /// Added to each word of zeros.
        added: u32,
    },
}

/// Where columns 0 .. 7 lie in a word of AWQ's.
const AWQ_ORDER: [usize; PER_WORD] = [0, 4, 1, 5, 2, 6, 3, 7];

/// A matrix as it is stored: `rows` rows of `width` numbers.
#[derive(Debug, Clone)]
pub struct Words {
    /// Which numbers share a word.
    pub order: WordOrder,
    /// Rows; columns of the model's matrix.
    pub rows: usize,
    /// Elements of a row, in whole words.
    pub width: usize,
    /// Rows that share scales and zeros.
    pub group: usize,
    /// The zeros, in words, of each group.
    pub zeros: Stored,
    /// The scales, fp16, of each group.
    pub scales: Stored,
}

impl Words {
    /// Elements of the matrix.
    pub(super) fn elements(&self) -> usize {
        self.rows * self.width
    }

    /// Rows that the rows of words stand for, and bytes of each row of words.
    fn word_rows(&self) -> (usize, usize) {
        match self.order {
            WordOrder::Awq => (1, self.width / 2),
            WordOrder::Gptq { .. } => (PER_WORD, 4 * self.width),
        }
    }

    /// Reads the matrix, which begins at `position` in `file`, into `target`, bf16, transposed.
    ///
    /// # Errors
    /// If a read fails, or a file has changed.
    pub(super) fn read(
        &self,
        file: &ExternalFile,
        position: u64,
        target: &mut [u8],
        window: &mut [u8],
    ) -> Result<()> {
        let half = window.len() / 2 / PAGE_BYTES * PAGE_BYTES;
        let (window, strip) = window.split_at_mut(half);
        let (of_row, bytes) = self.word_rows();
        let word_rows = self.rows / of_row;
        let per_strip = (strip.len() / bytes).max(1);
        for top in (0..word_rows).step_by(per_strip) {
            let count = per_strip.min(word_rows - top);
            let packed = &mut strip[..count * bytes];
            file.read(position + (top * bytes) as u64, packed, window)?;
            let (first, end) = (top * of_row, (top + count) * of_row);
            for group in first / self.group..end.div_ceil(self.group) {
                let mut zeros = vec![0; self.width / 2];
                self.zeros.read_into(group * zeros.len(), &mut zeros, window)?;
                let mut scales = vec![0; 2 * self.width];
                self.scales.read_into(group * scales.len(), &mut scales, window)?;
                let of_group = (group * self.group).max(first)..((group + 1) * self.group).min(end);
                for at in of_group.clone().step_by(RUN) {
                    let end = (at + RUN).min(of_group.end);
                    self.write_run(packed, first, at..end, &zeros, &scales, target);
                }
            }
        }
        Ok(())
    }

    /// Writes the numbers of `rows`, all of one group, to their columns of `target`. `packed` begins with row `first`.
    fn write_run(
        &self,
        packed: &[u8],
        first: usize,
        rows: std::ops::Range<usize>,
        zeros: &[u8],
        scales: &[u8],
        target: &mut [u8],
    ) {
        let (mut codes, mut made) = ([0u8; RUN], [0u16; RUN]);
        let (codes, made) = (&mut codes[..rows.len()], &mut made[..rows.len()]);
        for column in 0..self.width {
            for (code, row) in codes.iter_mut().zip(rows.clone()) {
                *code = self.number(packed, row - first, column);
            }
            let scale = u16::from_le_bytes([scales[2 * column], scales[2 * column + 1]]);
            dequantise_half(made, codes, self.zero(zeros, column), scale);
            let written =
                target[2 * (column * self.rows + rows.start)..][..2 * rows.len()].chunks_exact_mut(2);
            written.zip(&*made).for_each(|(pair, bits)| pair.copy_from_slice(&bits.to_ne_bytes()));
        }
    }

    /// The number of a row and column in the words of a strip.
    #[inline]
    fn number(&self, packed: &[u8], row: usize, column: usize) -> u8 {
        let (word, place) = match self.order {
            WordOrder::Awq => (row * self.width / PER_WORD + column / PER_WORD, AWQ_ORDER[column % PER_WORD]),
            WordOrder::Gptq { .. } => (row / PER_WORD * self.width + column, row % PER_WORD),
        };
        packed[4 * word + place / 2] >> (place % 2 * 4) & 0xF
    }

    /// The zero of a column.
    fn zero(&self, zeros: &[u8], column: usize) -> u8 {
        let word = &zeros[column / PER_WORD * 4..][..4];
        let word = u32::from_le_bytes(word.try_into().expect("four bytes"));
        let (word, place) = match self.order {
            WordOrder::Awq => (word, AWQ_ORDER[column % PER_WORD]),
            WordOrder::Gptq { added } => (word.wrapping_add(added), column % PER_WORD),
        };
        (word >> (4 * place) & 0xF) as u8
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use memascend_kernels::{round_bf16, round_f16, widen_f16};

    use super::super::Packing;
    use super::super::tests::{opened, read};
    use super::*;

    /// Words of eight numbers each; number `n` lies at `place(n)`.
    fn words(numbers: &[u8], place: impl Fn(usize) -> usize) -> Vec<u8> {
        let word = |group: &[u8]| {
            group
                .iter()
                .enumerate()
                .fold(0u32, |word, (n, &number)| word | u32::from(number) << (4 * place(n)))
        };
        numbers.chunks_exact(PER_WORD).flat_map(|group| word(group).to_le_bytes()).collect()
    }

    #[test]
    fn matrices_are_transposed_with_the_zeros_of_their_groups() {
        // Several strips, groups that end within one, and one that is less than a run.
        let (rows, width, group) = (2080, 1024, 416);
        let number = |row: usize, column: usize| ((row * 7 + column * 3 + row / 5) % 16) as u8;
        let zero = |group: usize, column: usize| (1 + (group * 5 + column) % 15) as u8;
        let scales: Vec<u16> = (0..rows / group * width).map(|at| 0x2000 + (at * 13 % 5000) as u16).collect();
        let by_rows: Vec<u8> = (0..rows * width).map(|at| number(at / width, at % width)).collect();
        let by_columns: Vec<u8> = (0..rows * width)
            .map(|at| {
                let (word, n) = (at / PER_WORD, at % PER_WORD);
                number(word / width * PER_WORD + n, word % width)
            })
            .collect();
        let zeros: Vec<u8> = (0..rows / group * width).map(|at| zero(at / width, at % width)).collect();
        let less: Vec<u8> = zeros.iter().map(|zero| zero - 1).collect();
        let scale_bytes: Vec<u8> = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
        let gptq = WordOrder::Gptq { added: 0x1111_1111 };
        for (order, packed, zeros) in [
            (WordOrder::Awq, words(&by_rows, |n| AWQ_ORDER[n]), words(&zeros, |n| AWQ_ORDER[n])),
            (gptq, words(&by_columns, |n| n), words(&less, |n| n)),
        ] {
            let bytes = [&scale_bytes[..], &zeros, &packed].concat();
            let (_file, file) = opened(&bytes, true);
            let stored = |position: usize| Stored { file: Arc::clone(&file), position: position as u64 };
            let (zeros, scales_at) = (stored(scale_bytes.len()), stored(0));
            let matrix = Words { order, rows, width, group, zeros, scales: scales_at };
            let packing = Packing::Words(matrix);
            let position = (bytes.len() - packed.len()) as u64;
            let made = read(&packing, &file, position, 0, rows * width);
            let wanted = (0..rows * width).map(|at| {
                let (column, row) = (at / rows, at % rows);
                let scale = widen_f16(scales[row / group * width + column]);
                let number = f32::from(number(row, column)) - f32::from(zero(row / group, column));
                round_bf16(widen_f16(round_f16(number * scale)))
            });
            assert!(made.into_iter().eq(wanted), "{order:?}");
        }
    }
}
