//! MXFP4 as gpt-oss is published: experts' matrices are stored as the transposes of the model's.
//!
//! A thread reads a matrix in strips of rows into one half of its window, through the other half, and writes
//! the columns of each strip to the matrix's place in the unit.

use memascend_kernels::{MXFP4_BLOCK, MXFP4_ROWS, dequantise_mxfp4_tile};
use memascend_mem::PAGE_BYTES;
use memascend_store::ExternalFile;

use super::Stored;
use crate::Result;

/// The matrix of each expert as it is stored: `rows` rows of `width` numbers.
#[derive(Debug, Clone)]
pub struct Mxfp4 {
    /// Rows of a matrix.
    pub rows: usize,
    /// Elements of a row, in whole blocks of 32.
    pub width: usize,
    /// The powers of two, a byte for each block.
    pub scales: Stored,
}

impl Mxfp4 {
    /// Elements of a matrix.
    pub(super) fn elements(&self) -> usize {
        self.rows * self.width
    }

    /// Bytes of a row's numbers, and of its powers of two.
    fn row_bytes(&self) -> (usize, usize) {
        (self.width / 2, self.width / MXFP4_BLOCK)
    }

    /// Reads matrix `number` into `target`, bf16, transposed. `position` is where the matrices begin in `file`.
    ///
    /// # Errors
    /// If a read fails, or a file has changed.
    pub(super) fn read(
        &self,
        file: &ExternalFile,
        position: u64,
        number: usize,
        target: &mut [u8],
        window: &mut [u8],
    ) -> Result<()> {
        let half = window.len() / 2 / PAGE_BYTES * PAGE_BYTES;
        let (window, strip) = window.split_at_mut(half);
        let (numbers, powers) = self.row_bytes();
        let per_strip = (strip.len() / (numbers + powers)).max(1);
        // Whole tiles, where there is room for one.
        let per_strip = if per_strip > MXFP4_ROWS { per_strip / MXFP4_ROWS * MXFP4_ROWS } else { per_strip };
        for top in (0..self.rows).step_by(per_strip) {
            let count = per_strip.min(self.rows - top);
            let (packed, rest) = strip.split_at_mut(count * numbers);
            let exponents = &mut rest[..count * powers];
            let row = number * self.rows + top;
            file.read(position + (row * numbers) as u64, packed, window)?;
            self.scales.read_into(row * powers, exponents, window)?;
            self.write_strip(packed, exponents, top, target);
        }
        Ok(())
    }

    /// Writes the columns of the rows from `top` on to `target`.
    fn write_strip(&self, packed: &[u8], exponents: &[u8], top: usize, target: &mut [u8]) {
        let (numbers, powers) = self.row_bytes();
        let bytes = MXFP4_BLOCK / 2;
        let (mut blocks, mut of_rows) = ([0; MXFP4_ROWS * MXFP4_BLOCK / 2], [0; MXFP4_ROWS]);
        let mut made = [0; MXFP4_ROWS * MXFP4_BLOCK];
        let tiles = packed.chunks(MXFP4_ROWS * numbers).zip(exponents.chunks(MXFP4_ROWS * powers));
        for (tile, (packed, exponents)) in tiles.enumerate() {
            let rows = packed.len() / numbers;
            let first = top + tile * MXFP4_ROWS;
            for block in 0..powers {
                for (row, copy) in blocks.chunks_exact_mut(bytes).take(rows).enumerate() {
                    copy.copy_from_slice(&packed[row * numbers + block * bytes..][..bytes]);
                    of_rows[row] = exponents[row * powers + block];
                }
                let made = &mut made[..rows * MXFP4_BLOCK];
                dequantise_mxfp4_tile(made, &blocks[..rows * bytes], &of_rows[..rows]);
                for (column, values) in made.chunks_exact(rows).enumerate() {
                    let at = 2 * ((block * MXFP4_BLOCK + column) * self.rows + first);
                    let written = target[at..][..2 * rows].chunks_exact_mut(2);
                    written.zip(values).for_each(|(pair, bits)| pair.copy_from_slice(&bits.to_ne_bytes()));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use memascend_kernels::{E2M1, power_of_two, round_bf16};

    use super::super::Packing;
    use super::super::tests::{opened, read};
    use super::*;

    #[test]
    fn matrices_are_transposed_in_strips_of_any_height() {
        // One strip; several, whose last tile is not whole; and rows that are wider than a strip has room for tiles.
        for (experts, rows, width) in [(3, 70, 96), (1, 1000, 2880), (2, 5, 64 * 1024)] {
            let numbers = experts * rows * width;
            let packed: Vec<u8> = (0..numbers / 2).map(|at| (at * 7 + at / 31) as u8).collect();
            let exponents: Vec<u8> = (0..numbers / 32).map(|at| 100 + (at % 61) as u8).collect();
            let bytes = [&[1, 2, 3][..], &exponents, &packed].concat();
            let (_file, file) = opened(&bytes, true);
            let scales = Stored { file: std::sync::Arc::clone(&file), position: 3 };
            let packing = Packing::Mxfp4(Mxfp4 { rows, width, scales });
            let elements = packing.piece_elements();
            assert_eq!((elements, packing.stored_bytes(elements)), (rows * width, rows * width / 2));
            for expert in 0..experts {
                let first = expert * elements;
                let made = read(&packing, &file, 3 + exponents.len() as u64, first, elements);
                let wanted = (0..elements).map(|at| {
                    let (column, row) = (at / rows, at % rows);
                    let at = first + row * width + column;
                    let code = packed[at / 2] >> (at % 2 * 4) & 0xF;
                    round_bf16(E2M1[usize::from(code)] * power_of_two(exponents[at / 32]))
                });
                assert!(made.iter().copied().eq(wanted), "expert {expert} of {rows} x {width}");
            }
        }
    }
}
