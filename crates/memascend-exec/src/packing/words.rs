//! AWQ and GPTQ: numbers in words of 32 bits, of matrices that are stored as the transposes of the model's. They are
//! read in strips, as MXFP4 is.

use std::ops::Range;
use std::sync::{Arc, Mutex, Weak};

use memascend_kernels::{dequantise_fp16, past_caches, unpack_awq, unpack_gptq};
use memascend_mem::LockExt;
use memascend_store::ExternalFile;

use super::Stored;
use super::places::{Need, Target, Window};
use super::transposed::{TILE, TILE_COLUMNS, Tile, strip_rows, tiles};
use crate::{FILE_WINDOW_BYTES, Result};

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
        /// The zeros and scales of all of them, while a thread reads the matrix.
        read: Shared,
    },
}

/// Values that the threads of a matrix use together. They go with the last thread.
#[derive(Debug, Clone, Default)]
pub struct Shared(Arc<Mutex<Weak<Indexed>>>);

/// The group of each row, and the zeros and scales of all groups, by rows.
#[derive(Debug)]
struct Indexed {
    groups: Vec<u32>,
    zeros: Vec<u8>,
    scales: Vec<u16>,
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

/// The groups of a strip's rows, with the zeros and scales of each column.
enum Beside<'a> {
    /// Of `rows` rows each, from number `first` on, as they are stored.
    Rows { rows: usize, first: usize, zeros: &'a [u8], scales: &'a [u8] },
    /// In any order.
    Indexed(Arc<Indexed>),
}

impl Beside<'_> {
    fn group(&self, row: usize) -> usize {
        match self {
            Self::Rows { rows, .. } => row / rows,
            Self::Indexed(indexed) => indexed.groups[row] as usize,
        }
    }
}

impl Words {
    /// Bytes of `elements` of it.
    pub(super) fn stored_bytes(&self, elements: usize) -> usize {
        elements * self.bits / 8
    }

    /// Bytes beside a window that a read takes.
    pub(super) fn scratch_bytes(&self) -> usize {
        match &self.groups {
            Groups::Rows(_) => 0,
            Groups::Index { count, .. } => 3 * count * self.width + 4 * self.rows,
        }
    }

    /// Bytes of the zeros of a group.
    fn zero_bytes(&self) -> usize {
        self.width * self.bits / 8
    }

    /// Rows that the rows of words stand for, and bytes of each row of words.
    fn word_rows(&self) -> (usize, usize) {
        match self.order {
            WordOrder::Awq => (1, self.width / 2),
            WordOrder::Gptq { .. } => (32 / self.bits, 4 * self.width),
        }
    }

    /// Whether a window has room for so many rows with their zeros and scales.
    fn fits(&self, rows: usize) -> bool {
        let need = Need::default().and(self.stored_bytes(rows * self.width));
        match &self.groups {
            // Strips begin with multiples of `rows`.
            Groups::Rows(group) => {
                let apart = rows.is_multiple_of(*group) || group.is_multiple_of(rows);
                let groups = rows.div_ceil(*group) + usize::from(!apart);
                need.and(groups * self.zero_bytes()).and(groups * 2 * self.width).fits()
            }
            Groups::Index { .. } => {
                need.fits() && Need::default().and(4 * self.rows).fits() && self.groups_at_once() > 0
            }
        }
    }

    /// Groups whose scales a window has room for.
    fn groups_at_once(&self) -> usize {
        let most = FILE_WINDOW_BYTES / (2 * self.width);
        (0..=most).rev().find(|groups| Need::default().and(groups * 2 * self.width).fits()).unwrap_or(0)
    }

    /// Whether a window has room for a row of words.
    pub fn fits_window(&self) -> bool {
        self.fits(self.word_rows().0)
    }

    /// Rows of a strip.
    fn strip_rows(&self) -> usize {
        strip_rows(self.rows, self.word_rows().0, |rows| self.fits(rows))
    }

    /// Pieces of the matrix.
    pub(super) fn pieces(&self) -> usize {
        self.rows.div_ceil(self.strip_rows())
    }

    /// Reads a piece of the matrix, which begins at `position` in `file`, into its columns of `target`.
    ///
    /// # Errors
    /// If a read fails, or a file has changed.
    pub(super) fn read(
        &self,
        file: &ExternalFile,
        position: u64,
        piece: usize,
        target: &mut Target,
        window: &mut [u8],
    ) -> Result<()> {
        let per_strip = self.strip_rows();
        let strip = piece * per_strip..((piece + 1) * per_strip).min(self.rows);
        let (of_word, stride) = self.word_rows();
        let indexed = match &self.groups {
            Groups::Index { stored, count, read } => Some(self.indexed(stored, *count, read, window)?),
            Groups::Rows(_) => None,
        };
        let mut window = Window::new(window);
        let top = (strip.start / of_word * stride) as u64;
        let words = window.read(file, position + top, strip.len() / of_word * stride)?;
        let beside = match (&self.groups, indexed) {
            (Groups::Rows(rows), _) => self.beside(*rows, strip.clone(), &mut window)?,
            (_, Some(indexed)) => Beside::Indexed(indexed),
            (Groups::Index { .. }, None) => unreachable!("read above"),
        };
        let (mut tile, mut numbers) = (Tile::new(), [0; TILE]);
        past_caches(|copies| {
            for (rows, columns) in tiles(strip.clone(), self.width) {
                let numbers = &mut numbers[..rows.len() * columns.len()];
                let words = &words[(rows.start - strip.start) / of_word * stride..];
                self.unpack(numbers, columns.clone(), words, stride);
                self.dequantise(&mut tile, rows.clone(), columns.clone(), numbers, &beside);
                tile.write(copies, target, 0, self.rows, rows, columns);
            }
        });
        Ok(())
    }

    /// Unpacks the numbers of `columns` of rows of words.
    fn unpack(&self, numbers: &mut [u8], columns: Range<usize>, words: &[u8], stride: usize) {
        match self.order {
            WordOrder::Awq => unpack_awq(numbers, columns.len(), &words[columns.start / 2..], stride),
            WordOrder::Gptq { .. } => {
                unpack_gptq(numbers, columns.len(), self.bits, &words[4 * columns.start..], stride);
            }
        }
    }

    /// Dequantises the numbers of a tile, by rows of the same group.
    fn dequantise(
        &self,
        tile: &mut Tile,
        rows: Range<usize>,
        columns: Range<usize>,
        numbers: &[u8],
        beside: &Beside<'_>,
    ) {
        let (mut zeros, mut scales) = ([0; TILE_COLUMNS], [0; TILE_COLUMNS]);
        let width = columns.len();
        let mut at = rows.start;
        while at < rows.end {
            let group = beside.group(at);
            let end = (at + 1..rows.end).find(|&row| beside.group(row) != group).unwrap_or(rows.end);
            let (begin, elements) = ((at - rows.start) * width, (end - at) * width);
            let values = &mut tile.values[begin..][..elements];
            let (zeros, scales) = match beside {
                Beside::Rows { first, zeros: words, scales: stored, .. } => {
                    let number = group - first;
                    let words = &words[number * self.zero_bytes()..][..self.zero_bytes()];
                    self.unpack_zeros(&mut zeros[..width], columns.start, words);
                    let stored = &stored[2 * (number * self.width + columns.start)..].as_chunks().0[..width];
                    scales
                        .iter_mut()
                        .zip(stored)
                        .for_each(|(scale, pair)| *scale = u16::from_le_bytes(*pair));
                    (&zeros[..width], &scales[..width])
                }
                Beside::Indexed(indexed) => {
                    let first = group * self.width + columns.start;
                    (&indexed.zeros[first..][..width], &indexed.scales[first..][..width])
                }
            };
            dequantise_fp16(values, &numbers[begin..][..elements], zeros, scales);
            at = end;
        }
    }

    /// Unpacks the zeros of a group's columns from `first` on, where a word begins. `words` are the group's.
    fn unpack_zeros(&self, zeros: &mut [u8], first: usize, words: &[u8]) {
        let words = &words[first * self.bits / 8..];
        match self.order {
            WordOrder::Awq => unpack_awq(zeros, zeros.len(), words, 0),
            WordOrder::Gptq { added } => {
                for (zeros, word) in zeros.chunks_mut(32 / self.bits).zip(words.as_chunks().0) {
                    let word = u32::from_le_bytes(*word).wrapping_add(added);
                    for (place, zero) in zeros.iter_mut().enumerate() {
                        *zero = (word >> (self.bits * place)) as u8 & (0xFF >> (8 - self.bits)) as u8;
                    }
                }
            }
        }
    }

    /// Reads the zeros and scales of the groups, of `group` rows each, that have rows of `strip`.
    fn beside<'a>(&self, group: usize, strip: Range<usize>, window: &mut Window<'a>) -> Result<Beside<'a>> {
        let (first, count) = (strip.start / group, strip.end.div_ceil(group) - strip.start / group);
        let zeros = self.zeros.read(first * self.zero_bytes(), count * self.zero_bytes(), window)?;
        let scales = self.scales.read(first * 2 * self.width, count * 2 * self.width, window)?;
        Ok(Beside::Rows { rows: group, first, zeros, scales })
    }

    /// The zeros and scales of all groups: those that another thread has, or else this one reads them through `window`.
    fn indexed(
        &self,
        index: &Stored,
        count: usize,
        read: &Shared,
        window: &mut [u8],
    ) -> Result<Arc<Indexed>> {
        let mut shared = read.0.locked();
        if let Some(indexed) = shared.upgrade() {
            return Ok(indexed);
        }
        let groups = index.read(0, 4 * self.rows, &mut Window::new(window))?.as_chunks().0;
        let groups = groups.iter().map(|word| u32::from_le_bytes(*word)).collect();
        let (mut zeros, mut scales) = (vec![0; count * self.width], vec![0; count * self.width]);
        let at_once = self.groups_at_once();
        for first in (0..count).step_by(at_once) {
            let count = at_once.min(count - first);
            let (of_zeros, of_scales) = (self.zero_bytes(), 2 * self.width);
            let words = self.zeros.read(first * of_zeros, count * of_zeros, &mut Window::new(window))?;
            for (zeros, words) in
                zeros[first * self.width..].chunks_exact_mut(self.width).zip(words.chunks_exact(of_zeros))
            {
                self.unpack_zeros(zeros, 0, words);
            }
            let stored = self.scales.read(first * of_scales, count * of_scales, &mut Window::new(window))?;
            let scales = scales[first * self.width..].iter_mut().zip(stored.as_chunks().0);
            scales.for_each(|(scale, pair)| *scale = u16::from_le_bytes(*pair));
        }
        let indexed = Arc::new(Indexed { groups, zeros, scales });
        *shared = Arc::downgrade(&indexed);
        Ok(indexed)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use memascend_kernels::{round_bf16, round_f16, widen_f16};

    use super::super::Packing;
    use super::super::tests::{opened, read_pieces};
    use super::*;

    /// Where columns 0 .. 7 lie in a word of AWQ's.
    const AWQ_ORDER: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

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
            Some(_) => {
                let (stored, count) = (stored(scale_bytes.len() + zeros.len()), rows / group);
                Groups::Index { stored, count, read: Shared::default() }
            }
        };
        let (zeros_at, scales_at) = (stored(scale_bytes.len()), stored(0));
        let matrix = Words { order, bits, rows, width, groups, zeros: zeros_at, scales: scales_at };
        let packing = Packing::Words(matrix);
        let beside = scale_bytes.len() + zeros.len() + index_bytes.len();
        // A byte for each zero.
        let scratch = 3 * rows / group * width + 4 * rows;
        assert_eq!(packing.scratch_bytes(), if index.is_some() { scratch } else { 0 });
        assert_eq!(packing.stored_bytes(rows * width), packed.len());
        let made = read_pieces(&packing, &file, beside as u64, rows * width);
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
