//! Matrices that are stored as the transposes of the model's, and MXFP4 as gpt-oss is published, where experts' are.
//!
//! A piece is a strip of rows, as many as a window has room for. Its tiles are dequantised by rows and transposed in
//! the first cache, and then written to the columns of the matrix's place in the unit.

use std::ops::Range;

use memascend_kernels::{
    Blocks, E2M1, First, PastCaches, dequantise_four_bits, past_caches, power_of_two, transpose,
};
use memascend_store::ExternalFile;

use super::Stored;
use super::places::{Need, Target, Window};
use crate::Result;

/// Rows of a tile at most: its columns are written as so many elements, some lines of the caches.
const TILE_ROWS: usize = 128;
/// Rows of a tile whose columns are written as a line.
const LINE_ROWS: usize = 32;
/// Columns of a tile at most.
pub(super) const TILE_COLUMNS: usize = 64;
/// Elements of a tile at most.
pub(super) const TILE: usize = TILE_ROWS * TILE_COLUMNS;

/// The values of a tile by rows, and by columns.
pub(super) struct Tile {
    pub(super) values: [u16; TILE],
    transposed: [u16; TILE],
}

impl Tile {
    pub(super) fn new() -> Self {
        Self { values: [0; TILE], transposed: [0; TILE] }
    }

    /// Writes the values, which are of `rows` and `columns` of a matrix of `height` rows, to the columns of the matrix,
    /// whose elements begin with number `first` of `target`.
    pub(super) fn write(
        &mut self,
        copies: &mut PastCaches,
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
            copies.copy(target.slice(first + column * height + rows.start, rows.len()), values);
        }
    }
}

/// The tiles of a strip of a matrix of `width` columns, as rows and columns.
pub(super) fn tiles(strip: Range<usize>, width: usize) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
    let parts = |range: Range<usize>, most: usize| {
        let end = range.end;
        range.step_by(most).map(move |at| at..(at + most).min(end))
    };
    parts(0..width, TILE_COLUMNS)
        .flat_map(move |columns| parts(strip.clone(), TILE_ROWS).map(move |rows| (rows, columns.clone())))
}

/// The most rows, of `rows`, that `fits` says there is room for: whole tiles if it can be, else whole lines of the caches,
/// else whole groups of `least`.
pub(super) fn strip_rows(rows: usize, least: usize, fits: impl Fn(usize) -> bool) -> usize {
    let largest = |step: usize| {
        (1..=rows.div_ceil(step)).map(|count| count * step).take_while(|&rows| fits(rows)).last()
    };
    [TILE_ROWS, LINE_ROWS.max(least), least].into_iter().find_map(largest).unwrap_or(least)
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

/// Elements of MXFP4 that share a power of two, and such blocks of a tile.
const BLOCK: usize = 32;
const TILE_BLOCKS: usize = TILE / BLOCK;
const BLOCK_BYTES: usize = BLOCK / 2;

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
        let (mut tile, mut bytes, mut scales) = (Tile::new(), [0; TILE / 2], [0f32; TILE_BLOCKS]);
        let first = matrix * self.rows * self.width;
        past_caches(|copies| {
            for (rows, columns) in tiles(strip, self.width) {
                let (of_row, blocks) = (columns.len() / 2, columns.len() / BLOCK);
                for (at, row) in rows.clone().enumerate() {
                    let row = row - top;
                    let packed = &packed[row * numbers + columns.start / 2..][..of_row];
                    let bytes = &mut bytes[at * of_row..][..of_row];
                    for (bytes, packed) in
                        bytes.as_chunks_mut::<BLOCK_BYTES>().0.iter_mut().zip(packed.as_chunks().0)
                    {
                        *bytes = *packed;
                    }
                    let exponents = &exponents[row * powers + columns.start / BLOCK..][..blocks];
                    let scales = &mut scales[at * blocks..][..blocks];
                    scales.iter_mut().zip(exponents).for_each(|(scale, &e)| *scale = power_of_two(e));
                }
                let (count, blocks) = (rows.len(), rows.len() * blocks);
                let values = &mut tile.values[..count * columns.len()];
                let blocks = Blocks { elements: BLOCK, scales: &scales[..blocks] };
                dequantise_four_bits(values, &bytes[..count * of_row], First::Low, &E2M1, blocks, None);
                tile.write(copies, target, first, self.rows, rows, columns);
            }
        });
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
