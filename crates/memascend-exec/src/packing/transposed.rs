//! Matrices that are stored as the transposes of the model's, and MXFP4 as gpt-oss is published, where experts' are.
//!
//! A piece is a strip of rows, as many as a window has room for. Its tiles are dequantised by rows and transposed in
//! the first cache, and then written to the columns of the matrix's place in the unit.

use std::ops::Range;

use memascend_kernels::{Blocks, E2M1, First, dequantise_four_bits, power_of_two, transpose};
use memascend_store::ExternalFile;

use super::Stored;
use super::places::{Need, Target, Window};
use crate::Result;

/// Rows, and columns, of a tile at most.
pub(super) const TILE: usize = 64;

/// The values of a tile by rows, and by columns.
pub(super) struct Tile {
    pub(super) values: [u16; TILE * TILE],
    transposed: [u16; TILE * TILE],
}

impl Tile {
    pub(super) fn new() -> Self {
        Self { values: [0; TILE * TILE], transposed: [0; TILE * TILE] }
    }

    /// Writes the values, which are of `rows` and `columns` of a matrix of `height` rows, to the columns of the matrix,
    /// whose elements begin with number `first` of `target`.
    pub(super) fn write(
        &mut self,
        target: &mut Target,
        first: usize,
        height: usize,
        rows: Range<usize>,
        columns: Range<usize>,
    ) {
        let elements = rows.len() * columns.len();
        let transposed = &mut self.transposed[..elements];
        transpose(transposed, &self.values[..elements], columns.len());
        for (column, values) in columns.zip(transposed.chunks_exact(rows.len())) {
            let target = target.slice(first + column * height + rows.start, rows.len());
            match (target.as_chunks_mut::<TILE>().0, values.as_chunks::<TILE>().0) {
                // Of a known length, which needs no call.
                ([target], [values]) => *target = *values,
                _ => target.copy_from_slice(values),
            }
        }
    }
}

/// The parts of a range that a tile has room for.
pub(super) fn tiles(range: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let end = range.end;
    range.step_by(TILE).map(move |at| at..(at + TILE).min(end))
}

/// The most rows, of `rows`, that `fits` says there is room for: whole tiles if it can be, else whole groups of `least`.
pub(super) fn strip_rows(rows: usize, least: usize, fits: impl Fn(usize) -> bool) -> usize {
    let largest = |step: usize| {
        (1..=rows.div_ceil(step)).map(|count| count * step).take_while(|&rows| fits(rows)).last()
    };
    largest(TILE).or_else(|| largest(least)).unwrap_or(least)
}

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

/// Elements of MXFP4 that share a power of two, and such blocks of a tile's row.
const BLOCK: usize = 32;
const TILE_BLOCKS: usize = TILE / BLOCK;

impl Mxfp4 {
    /// Bytes of a row's numbers, and of its powers of two.
    fn row_bytes(&self) -> (usize, usize) {
        (self.width / 2, self.width / BLOCK)
    }

    /// Whether a window has room for so many rows.
    fn fits(&self, rows: usize) -> bool {
        let (numbers, powers) = self.row_bytes();
        Need::default().and(rows * numbers).and(rows * powers).fits()
    }

    /// Whether a window has room for a row.
    pub fn fits_window(&self) -> bool {
        self.fits(1)
    }

    /// Rows of a strip, and strips of a matrix.
    fn strips(&self) -> (usize, usize) {
        let rows = strip_rows(self.rows, 1, |rows| self.fits(rows));
        (rows, self.rows.div_ceil(rows))
    }

    /// Pieces of `elements`, in whole matrices.
    pub(super) fn pieces(&self, elements: usize) -> usize {
        elements / (self.rows * self.width) * self.strips().1
    }

    /// Reads a piece into its columns of `target`. `position` is where the matrices begin in `file`.
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
        let (per_strip, strips) = self.strips();
        let (numbers, powers) = self.row_bytes();
        let (matrix, top) = (piece / strips, piece % strips * per_strip);
        let strip = top..(top + per_strip).min(self.rows);
        let row = matrix * self.rows + top;
        let mut window = Window::new(window);
        let packed = window.read(file, position + (row * numbers) as u64, strip.len() * numbers)?;
        let exponents = self.scales.read(row * powers, strip.len() * powers, &mut window)?;
        let (mut tile, mut bytes, mut scales) =
            (Tile::new(), [0; TILE * TILE / 2], [0f32; TILE * TILE_BLOCKS]);
        let first = matrix * self.rows * self.width;
        for columns in tiles(0..self.width) {
            let (of_row, blocks) = (columns.len() / 2, columns.len() / BLOCK);
            for rows in tiles(strip.clone()) {
                for (at, row) in rows.clone().enumerate() {
                    let row = row - top;
                    bytes[at * of_row..][..of_row]
                        .copy_from_slice(&packed[row * numbers + columns.start / 2..][..of_row]);
                    let exponents = &exponents[row * powers + columns.start / BLOCK..][..blocks];
                    let scales = &mut scales[at * blocks..][..blocks];
                    scales.iter_mut().zip(exponents).for_each(|(scale, &e)| *scale = power_of_two(e));
                }
                let (count, blocks) = (rows.len(), rows.len() * blocks);
                let values = &mut tile.values[..count * columns.len()];
                let blocks = Blocks { elements: BLOCK, scales: &scales[..blocks] };
                dequantise_four_bits(values, &bytes[..count * of_row], First::Low, &E2M1, blocks, None);
                tile.write(target, first, self.rows, rows, columns.clone());
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use memascend_kernels::{E2M1, power_of_two, round_bf16};

    use super::super::Packing;
    use super::super::tests::{opened, read_pieces};
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
            let elements = experts * rows * width;
            let made = read_pieces(&packing, &file, 3 + exponents.len() as u64, elements);
            let wanted = (0..elements).map(|at| {
                let first = at / (rows * width) * (rows * width);
                let (column, row) = ((at - first) / rows, (at - first) % rows);
                let at = first + row * width + column;
                let code = packed[at / 2] >> (at % 2 * 4) & 0xF;
                round_bf16(E2M1[usize::from(code)] * power_of_two(exponents[at / 32]))
            });
            assert!(made.into_iter().eq(wanted), "{experts} of {rows} x {width}");
        }
    }
}
