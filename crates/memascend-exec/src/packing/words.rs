//! AWQ and GPTQ: numbers in words of 32 bits, of matrices that are stored as the transposes of the model's. They are
//! read in strips, as MXFP4 is.

use std::ops::Range;

use memascend_kernels::{dequantise_half, dequantise_halves};
use memascend_mem::PAGE_BYTES;
use memascend_store::ExternalFile;

use super::Stored;
use crate::Result;

/// Elements of a column that are dequantised at once.
const RUN: usize = 256;

/// Which numbers share a word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WordOrder {
    /// Eight columns of a row, in AWQ's order.
    Awq,
    /// Some rows of a column, in order; a number is added to words of zeros.
    Gptq {
        /// Added to each word of zeros.
        added: u32,
    },
}

/// Where columns 0 .. 7 lie in a word of AWQ's.
const AWQ_ORDER: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

/// Which rows share scales and zeros.
#[derive(Debug, Clone)]
pub enum Groups {
    /// So many that follow each other.
    Rows(usize),
    /// Those that have the same number in an index, of an int32 for each row.
    Index {
        /// The index.
        stored: Stored,
        /// How many groups there are.
        count: usize,
    },
}

/// A matrix as it is stored: `rows` rows of `width` numbers.
#[derive(Debug, Clone)]
pub struct Words {
    /// Which numbers share a word.
    pub order: WordOrder,
    /// Bits of a number: 2, 4 or 8; 4 in AWQ's order.
    pub bits: usize,
    /// Rows; columns of the model's matrix.
    pub rows: usize,
    /// Elements of a row, in whole words.
    pub width: usize,
    /// Rows that share scales and zeros.
    pub groups: Groups,
    /// The zeros, in words, of each group.
    pub zeros: Stored,
    /// The scales, fp16, of each group.
    pub scales: Stored,
}

/// The zeros and scales of some groups, by rows.
struct Beside {
    zeros: Vec<u8>,
    scales: Vec<u8>,
}

impl Words {
    /// Elements of the matrix.
    pub(super) fn elements(&self) -> usize {
        self.rows * self.width
    }

    /// Bytes of `elements` of it.
    pub(super) fn stored_bytes(&self, elements: usize) -> usize {
        elements * self.bits / 8
    }

    /// Bytes beside a window that a read takes.
    pub(super) fn scratch_bytes(&self) -> usize {
        match &self.groups {
            Groups::Rows(_) => 0,
            Groups::Index { count, .. } => count * (self.zero_bytes() + 2 * self.width) + 4 * self.rows,
        }
    }

    /// Bytes of the zeros of a group.
    fn zero_bytes(&self) -> usize {
        self.width * self.bits / 8
    }

    /// Numbers in a word.
    fn per_word(&self) -> usize {
        32 / self.bits
    }

    /// Rows that the rows of words stand for, and bytes of each row of words.
    fn word_rows(&self) -> (usize, usize) {
        match self.order {
            WordOrder::Awq => (1, self.width / 2),
            WordOrder::Gptq { .. } => (self.per_word(), 4 * self.width),
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
        let indexed = match &self.groups {
            Groups::Rows(_) => None,
            Groups::Index { stored, count } => {
                Some((self.index(stored, window)?, self.beside(0..*count, window)?))
            }
        };
        for top in (0..word_rows).step_by(per_strip) {
            let count = per_strip.min(word_rows - top);
            let packed = &mut strip[..count * bytes];
            file.read(position + (top * bytes) as u64, packed, window)?;
            let rows = top * of_row..(top + count) * of_row;
            match (&self.groups, &indexed) {
                (Groups::Rows(group), _) => self.write_groups(packed, rows, *group, target, window)?,
                (Groups::Index { .. }, Some((index, beside))) => {
                    for run in runs(rows.clone()) {
                        self.write_run(packed, rows.start, run.clone(), &index[run], beside, target);
                    }
                }
                (Groups::Index { .. }, None) => unreachable!("read above"),
            }
        }
        Ok(())
    }

    /// Writes the numbers of `rows`, with which `packed` begins, whose groups are each `group` rows that follow.
    fn write_groups(
        &self,
        packed: &[u8],
        rows: Range<usize>,
        group: usize,
        target: &mut [u8],
        window: &mut [u8],
    ) -> Result<()> {
        for number in rows.start / group..rows.end.div_ceil(group) {
            let beside = self.beside(number..number + 1, window)?;
            let of_group = (number * group).max(rows.start)..((number + 1) * group).min(rows.end);
            for run in runs(of_group) {
                self.write_run(packed, rows.start, run, &[0], &beside, target);
            }
        }
        Ok(())
    }

    /// Reads the zeros and scales of some groups.
    fn beside(&self, groups: Range<usize>, window: &mut [u8]) -> Result<Beside> {
        let (of_zeros, of_scales) = (self.zero_bytes(), 2 * self.width);
        let zeros = self.zeros.read(groups.start * of_zeros, groups.len() * of_zeros, window)?;
        let scales = self.scales.read(groups.start * of_scales, groups.len() * of_scales, window)?;
        Ok(Beside { zeros, scales })
    }

    /// Reads the group of each row.
    fn index(&self, stored: &Stored, window: &mut [u8]) -> Result<Vec<u32>> {
        let bytes = stored.read(0, 4 * self.rows, window)?;
        Ok(bytes
            .chunks_exact(4)
            .map(|word| u32::from_le_bytes(word.try_into().expect("four bytes")))
            .collect())
    }

    /// Writes the numbers of `rows` to their columns of `target`. `packed` begins with row `first`. `groups` has the
    /// group of each row in `beside`, or the one of all.
    fn write_run(
        &self,
        packed: &[u8],
        first: usize,
        rows: Range<usize>,
        groups: &[u32],
        beside: &Beside,
        target: &mut [u8],
    ) {
        match self.bits {
            2 => self.write_run_of::<2>(packed, first, rows, groups, beside, target),
            4 => self.write_run_of::<4>(packed, first, rows, groups, beside, target),
            _ => self.write_run_of::<8>(packed, first, rows, groups, beside, target),
        }
    }

    fn write_run_of<const BITS: usize>(
        &self,
        packed: &[u8],
        first: usize,
        rows: Range<usize>,
        groups: &[u32],
        beside: &Beside,
        target: &mut [u8],
    ) {
        let (mut codes, mut zeros, mut scales) = ([0u8; RUN], [0u8; RUN], [0u16; RUN]);
        let mut made = [0u16; RUN];
        let (codes, made) = (&mut codes[..rows.len()], &mut made[..rows.len()]);
        for column in 0..self.width {
            for (code, row) in codes.iter_mut().zip(rows.clone()) {
                *code = self.number::<BITS>(packed, row - first, column);
            }
            if let ([group], true) = (groups, BITS <= 4) {
                let (zero, scale) = self.zero_and_scale(beside, *group, column);
                dequantise_half(made, codes, zero, scale);
            } else {
                for (at, group) in groups.iter().enumerate() {
                    (zeros[at], scales[at]) = self.zero_and_scale(beside, *group, column);
                }
                if groups.len() == 1 {
                    (zeros, scales) = ([zeros[0]; RUN], [scales[0]; RUN]);
                }
                dequantise_halves(made, codes, &zeros[..rows.len()], &scales[..rows.len()]);
            }
            let written =
                target[2 * (column * self.rows + rows.start)..][..2 * rows.len()].chunks_exact_mut(2);
            written.zip(&*made).for_each(|(pair, bits)| pair.copy_from_slice(&bits.to_ne_bytes()));
        }
    }

    /// The number of a row and column in the words of a strip.
    #[inline]
    fn number<const BITS: usize>(&self, packed: &[u8], row: usize, column: usize) -> u8 {
        let per_word = 32 / BITS;
        let (word, place) = match self.order {
            WordOrder::Awq => (row * self.width / 8 + column / 8, AWQ_ORDER[column % 8]),
            WordOrder::Gptq { .. } => (row / per_word * self.width + column, row % per_word),
        };
        let bit = place * BITS;
        packed[4 * word + bit / 8] >> (bit % 8) & (0xFF >> (8 - BITS)) as u8
    }

    /// The zero and the scale of a group and column.
    #[inline]
    fn zero_and_scale(&self, beside: &Beside, group: u32, column: usize) -> (u8, u16) {
        let group = group as usize;
        let at = group * self.zero_bytes() + column / self.per_word() * 4;
        let word = u32::from_le_bytes(beside.zeros[at..at + 4].try_into().expect("four bytes"));
        let (word, place) = match self.order {
            WordOrder::Awq => (word, AWQ_ORDER[column % 8]),
            WordOrder::Gptq { added } => (word.wrapping_add(added), column % self.per_word()),
        };
        let scale = &beside.scales[2 * (group * self.width + column)..][..2];
        (
            (word >> (self.bits * place)) as u8 & (0xFF >> (8 - self.bits)) as u8,
            u16::from_le_bytes([scale[0], scale[1]]),
        )
    }
}

/// Parts of `rows` that are dequantised at once.
fn runs(rows: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let end = rows.end;
    rows.step_by(RUN).map(move |at| at..(at + RUN).min(end))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use memascend_kernels::{round_bf16, round_f16, widen_f16};

    use super::super::Packing;
    use super::super::tests::{opened, read};
    use super::*;

    /// Words of numbers of `bits`; number `n` of a word lies at `place(n)`.
    fn words(numbers: &[u8], bits: usize, place: impl Fn(usize) -> usize) -> Vec<u8> {
        let word = |group: &[u8]| {
            group
                .iter()
                .enumerate()
                .fold(0u32, |word, (n, &number)| word | u32::from(number) << (bits * place(n)))
        };
        numbers.chunks_exact(32 / bits).flat_map(|group| word(group).to_le_bytes()).collect()
    }

    /// Compares a matrix with its numbers. `index` has the group of each row where groups do not follow each other.
    fn compare(order: WordOrder, bits: usize, index: Option<&[u32]>) {
        // Several strips, groups that end within one, and one that is less than a run.
        let (rows, width, group) = (2080, 1024, 416);
        let most = (1 << bits) - 1;
        let number = |row: usize, column: usize| ((row * 7 + column * 3 + row / 5) % (most + 1)) as u8;
        let zero = |group: usize, column: usize| (1 + (group * 5 + column) % most) as u8;
        let scales: Vec<u16> = (0..rows / group * width).map(|at| 0x2000 + (at * 13 % 5000) as u16).collect();
        let zeros: Vec<u8> = (0..rows / group * width).map(|at| zero(at / width, at % width)).collect();
        let per_word = 32 / bits;
        let (packed, zeros) = match order {
            WordOrder::Awq => {
                let by_rows: Vec<u8> = (0..rows * width).map(|at| number(at / width, at % width)).collect();
                (words(&by_rows, bits, |n| AWQ_ORDER[n]), words(&zeros, bits, |n| AWQ_ORDER[n]))
            }
            WordOrder::Gptq { .. } => {
                let by_columns: Vec<u8> = (0..rows * width)
                    .map(|at| {
                        let (word, n) = (at / per_word, at % per_word);
                        number(word / width * per_word + n, word % width)
                    })
                    .collect();
                let less: Vec<u8> = zeros.iter().map(|zero| zero - 1).collect();
                (words(&by_columns, bits, |n| n), words(&less, bits, |n| n))
            }
        };
        let scale_bytes: Vec<u8> = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
        let index_bytes: Vec<u8> =
            index.unwrap_or(&[]).iter().flat_map(|group| group.to_le_bytes()).collect();
        let bytes = [&scale_bytes[..], &zeros, &index_bytes, &packed].concat();
        let (_file, file) = opened(&bytes, true);
        let stored = |position: usize| Stored { file: Arc::clone(&file), position: position as u64 };
        let groups = match index {
            None => Groups::Rows(group),
            Some(_) => Groups::Index { stored: stored(scale_bytes.len() + zeros.len()), count: rows / group },
        };
        let (zeros_at, scales_at) = (stored(scale_bytes.len()), stored(0));
        let matrix = Words { order, bits, rows, width, groups, zeros: zeros_at, scales: scales_at };
        let packing = Packing::Words(matrix);
        let beside = scale_bytes.len() + zeros.len() + index_bytes.len();
        assert_eq!(packing.scratch_bytes(), if index.is_some() { beside } else { 0 });
        assert_eq!(packing.stored_bytes(rows * width), packed.len());
        let made = read(&packing, &file, beside as u64, 0, rows * width);
        let wanted = (0..rows * width).map(|at| {
            let (column, row) = (at / rows, at % rows);
            let of_row = index.map_or(row / group, |index| index[row] as usize);
            let scale = widen_f16(scales[of_row * width + column]);
            let number = f32::from(number(row, column)) - f32::from(zero(of_row, column));
            round_bf16(widen_f16(round_f16(number * scale)))
        });
        assert!(made.into_iter().eq(wanted), "{order:?}, {bits} bits");
    }

    #[test]
    fn matrices_are_transposed_with_the_zeros_of_their_groups() {
        compare(WordOrder::Awq, 4, None);
        for (bits, added) in [(2, 0x5555_5555), (4, 0x1111_1111), (8, 0x0101_0101)] {
            compare(WordOrder::Gptq { added }, bits, None);
        }
    }

    #[test]
    fn rows_of_a_group_need_not_follow_each_other() {
        let index: Vec<u32> = (0..2080).map(|row| row * 7 % 5).collect();
        for (bits, added) in [(2, 0x5555_5555), (4, 0x1111_1111), (8, 0x0101_0101)] {
            compare(WordOrder::Gptq { added }, bits, Some(&index));
        }
    }
}
