//! Quantised weights in files outside the store, which are dequantised as they are read.
//!
//! A thread reads the packed numbers of a piece, and the scales and zeros that belong to them, into its window, and
//! dequantises them from there to their place in the unit. So no other memory is needed, and each element is written
//! once. Scales are read for each piece: a whole model's are hundreds of megabytes.

mod places;
mod scales;
mod transposed;
mod words;
mod zeros;

pub use memascend_kernels::First;
use memascend_kernels::{Blocks, dequantise_bytes, dequantise_e4m3, dequantise_four_bits, dequantise_int8};
use memascend_kernels::{dequantise_two_bits, dequantise_whole};
use memascend_store::ExternalFile;

pub(crate) use places::Target;
use places::{Need, Window};
pub use scales::{Nested, ScaleFormat, Scales, Stored};
pub use transposed::Mxfp4;
pub use words::{Groups, Shared, WordOrder, Words};
pub use zeros::Zeros;

use crate::Result;
use zeros::ReadZeros;

/// Elements of a piece at most, in whole blocks or rows. Its packed numbers should stay in the second cache.
const PIECE_ELEMENTS: usize = 1 << 19;
/// Blocks that a kernel takes at once: their scales and zeros are on the stack.
const BLOCKS: usize = 512;

/// The meaning of the bytes of rows.
#[derive(Debug, Clone)]
pub enum Numbers {
    /// FP8 (e4m3fn).
    E4m3,
    /// A whole number, whose product with its scale is multiplied by `step`.
    Int8 {
        /// The factor.
        step: f32,
    },
    /// Whole numbers of 2, 4 or 8 bits, the first one lowest, less a zero for each block.
    Whole {
        /// The bits.
        bits: usize,
        /// The zeros, by rows of blocks.
        zeros: Zeros,
    },
}

impl Numbers {
    /// Bits of a number.
    fn bits(&self) -> usize {
        match self {
            Self::E4m3 | Self::Int8 { .. } => 8,
            Self::Whole { bits, .. } => *bits,
        }
    }
}

/// How a part of a unit's weights, in bf16 there, is stored in its file.
#[derive(Debug, Clone)]
pub enum Packing {
    /// Bytes by rows, with a scale for each block of some rows and columns.
    Rows {
        /// Their meaning.
        numbers: Numbers,
        /// Elements of a row, in whole bytes.
        width: usize,
        /// Rows and columns of a block, which begins with a byte.
        block: (usize, usize),
        /// The scales, by rows of blocks.
        scales: Scales,
    },
    /// Numbers of four bits that name a number of a code, with a scale for each block.
    FourBits {
        /// Elements of a block; divides 4,096.
        block: usize,
        /// Which four bits of a byte are the first number.
        first: First,
        /// The numbers.
        code: [f32; 16],
        /// The scales.
        scales: Scales,
    },
    /// Bytes that name a number of a code, with a scale for each block.
    Bytes {
        /// Elements of a block; divides 4,096.
        block: usize,
        /// The numbers.
        code: Box<[f32; 256]>,
        /// The scales.
        scales: Scales,
    },
    /// Matrices of MXFP4, stored as the transposes of the unit's.
    Mxfp4(Mxfp4),
    /// A matrix of AWQ or GPTQ, stored as the transpose of the unit's.
    Words(Words),
}

impl Packing {
    /// Pieces that `elements` are read in.
    pub(crate) fn pieces(&self, elements: usize) -> usize {
        match self {
            Self::Mxfp4(matrices) => matrices.pieces(elements),
            Self::Words(matrix) => matrix.pieces(),
            _ => elements.div_ceil(self.piece_elements()),
        }
    }

    /// Elements of a piece, where it is of elements that follow each other.
    fn piece_elements(&self) -> usize {
        let least = match self {
            Self::Rows { width, .. } => *width,
            _ => 4096,
        };
        let most = (PIECE_ELEMENTS / least).max(1);
        // Halved until a window has room.
        let fitting = std::iter::successors(Some(most), |count| (*count > 1).then_some(count / 2));
        least * fitting.into_iter().find(|count| self.need(count * least).fits()).unwrap_or(1)
    }

    /// The need of so many elements that follow each other.
    fn need(&self, elements: usize) -> Need {
        let need = Need::default().and(self.stored_bytes(elements));
        match self {
            Self::Rows { numbers, width, block: (rows, columns), scales } => {
                let grid_width = width.div_ceil(*columns);
                // The first of several rows may be the last one of a block.
                let grid_rows = (elements / width - 1).div_ceil(*rows) + 1;
                let need = scales.need(grid_rows * grid_width, need);
                match numbers {
                    Numbers::Whole { bits, zeros } => zeros.need(*bits, grid_rows, grid_width, need),
                    _ => need,
                }
            }
            Self::FourBits { block, scales, .. } | Self::Bytes { block, scales, .. } => {
                scales.need(elements.div_ceil(*block), need)
            }
            Self::Mxfp4(_) | Self::Words(_) => need,
        }
    }

    /// Whether a window has room for a piece.
    pub fn fits_window(&self) -> bool {
        match self {
            Self::Mxfp4(matrices) => matrices.fits_window(),
            Self::Words(matrix) => matrix.fits_window(),
            _ => self.need(self.piece_elements()).fits(),
        }
    }

    /// Bytes that `elements` take in the file, without their scales.
    fn stored_bytes(&self, elements: usize) -> usize {
        match self {
            Self::Rows { numbers, .. } => elements * numbers.bits() / 8,
            Self::Bytes { .. } => elements,
            Self::FourBits { .. } | Self::Mxfp4(_) => elements / 2,
            Self::Words(matrix) => matrix.stored_bytes(elements),
        }
    }

    /// Bytes that a thread needs beside its window for a piece, where they are not few.
    pub fn scratch_bytes(&self) -> usize {
        match self {
            Self::Words(matrix) => matrix.scratch_bytes(),
            _ => 0,
        }
    }

    /// Reads the elements of a piece into their places in `target`, which is all of the part's, through `window`.
    /// `position` is where the weights begin in `file`.
    ///
    /// # Errors
    /// If a read fails, or a file has changed.
    pub(crate) fn read(
        &self,
        file: &ExternalFile,
        position: u64,
        piece: usize,
        target: &mut Target,
        window: &mut [u8],
    ) -> Result<()> {
        match self {
            Self::Mxfp4(matrices) => matrices.read(file, position, piece, target, window),
            Self::Words(matrix) => matrix.read(file, position, piece, target, window),
            _ => {
                let first = piece * self.piece_elements();
                let elements = self.piece_elements().min(target.elements() - first);
                self.read_elements(file, position, first, target.slice(first, elements), window)
            }
        }
    }

    /// Reads elements that follow each other, from number `first` on.
    fn read_elements(
        &self,
        file: &ExternalFile,
        position: u64,
        first: usize,
        target: &mut [u16],
        window: &mut [u8],
    ) -> Result<()> {
        let mut window = Window::new(window);
        let begin = position + self.stored_bytes(first) as u64;
        let packed = window.read(file, begin, self.stored_bytes(target.len()))?;
        let run = Run { first, target, packed, window };
        match self {
            Self::Rows { numbers, width, block, scales } => run.read_rows(numbers, *width, *block, scales),
            Self::FourBits { block, first: order, code, scales } => {
                run.read_blocks(*block, 2, scales, |dst, packed, blocks| {
                    dequantise_four_bits(dst, packed, *order, code, blocks, None);
                })
            }
            Self::Bytes { block, code, scales } => {
                run.read_blocks(*block, 1, scales, |dst, codes, blocks| {
                    dequantise_bytes(dst, codes, code, blocks);
                })
            }
            Self::Mxfp4(_) | Self::Words(_) => unreachable!("they have strips"),
        }
    }
}

/// Elements that follow each other, whose numbers are read.
struct Run<'a> {
    /// The number of the first one.
    first: usize,
    target: &'a mut [u16],
    packed: &'a [u8],
    window: Window<'a>,
}

impl Run<'_> {
    /// Dequantises them with `kernel`, `per_byte` to a byte, in blocks of `block`.
    fn read_blocks(
        mut self,
        block: usize,
        per_byte: usize,
        scales: &Scales,
        kernel: impl Fn(&mut [u16], &[u8], Blocks<'_>),
    ) -> Result<()> {
        let stored = scales.read(self.first / block, self.target.len().div_ceil(block), &mut self.window)?;
        let mut scales = [0.0; BLOCKS];
        let parts = self.target.chunks_mut(BLOCKS * block).zip(self.packed.chunks(BLOCKS * block / per_byte));
        for (number, (dst, packed)) in parts.enumerate() {
            let scales = &mut scales[..dst.len().div_ceil(block)];
            stored.fill(number * BLOCKS, scales);
            kernel(dst, packed, Blocks { elements: block, scales });
        }
        Ok(())
    }

    /// Dequantises them, whole rows of `width`, in blocks of some rows and columns.
    fn read_rows(
        mut self,
        numbers: &Numbers,
        width: usize,
        (rows, columns): (usize, usize),
        scales: &Scales,
    ) -> Result<()> {
        let (columns, per_byte) = (columns.min(width), 8 / numbers.bits());
        let (top, count, grid_width) =
            (self.first / width, self.target.len() / width, width.div_ceil(columns));
        let grid_top = top / rows;
        let grid_rows = (top + count).div_ceil(rows) - grid_top;
        let window = &mut self.window;
        let stored = scales.read(grid_top * grid_width, grid_rows * grid_width, window)?;
        let stored_zeros = match numbers {
            Numbers::Whole { bits, zeros } => zeros.read(*bits, grid_top, grid_rows, grid_width, window)?,
            _ => ReadZeros::All(0.0),
        };
        let (mut scales, mut zeros) = ([0.0; BLOCKS], [0.0; BLOCKS]);
        let of_rows = self.target.chunks_exact_mut(width).zip(self.packed.chunks_exact(width / per_byte));
        for (row, (dst, packed)) in of_rows.enumerate() {
            let grid_row = (top + row) / rows;
            let parts = dst.chunks_mut(BLOCKS * columns).zip(packed.chunks(BLOCKS * columns / per_byte));
            for (number, (dst, packed)) in parts.enumerate() {
                let count = dst.len().div_ceil(columns);
                let (scales, zeros) = (&mut scales[..count], &mut zeros[..count]);
                stored.fill((grid_row - grid_top) * grid_width + number * BLOCKS, scales);
                stored_zeros.fill(grid_row, number * BLOCKS, zeros);
                dequantise_numbers(dst, packed, numbers, Blocks { elements: columns, scales }, zeros);
            }
        }
        Ok(())
    }
}

/// The numbers of four bits.
const FOUR_BITS: [f32; 16] = [0., 1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 11., 12., 13., 14., 15.];

/// Numbers times the scales of their blocks, whole ones less the zeros before, to bf16.
fn dequantise_numbers(dst: &mut [u16], packed: &[u8], numbers: &Numbers, blocks: Blocks<'_>, zeros: &[f32]) {
    match numbers {
        Numbers::E4m3 => dequantise_e4m3(dst, packed, blocks),
        Numbers::Int8 { step } => dequantise_int8(dst, packed, blocks, *step),
        Numbers::Whole { bits: 2, .. } => dequantise_two_bits(dst, packed, blocks, zeros),
        Numbers::Whole { bits: 4, .. } => {
            dequantise_four_bits(dst, packed, First::Low, &FOUR_BITS, blocks, Some(zeros));
        }
        Numbers::Whole { zeros: of, .. } => dequantise_whole(dst, packed, of.flipped(), blocks, zeros),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::fs::MetadataExt;
    use std::sync::Arc;

    use memascend_kernels::{round_bf16, widen_e4m3};
    use memascend_mem::{HostAllocator, PageableAllocator};

    use super::*;
    use crate::FILE_WINDOW_BYTES;

    /// A file of `bytes`, and a window to read it through.
    pub(super) fn opened(bytes: &[u8], direct: bool) -> (tempfile::NamedTempFile, Arc<ExternalFile>) {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(bytes).unwrap();
        let seen = file.as_file().metadata().unwrap();
        let modified_ns = i128::from(seen.mtime()) * 1_000_000_000 + i128::from(seen.mtime_nsec());
        let external = ExternalFile::open(file.path(), bytes.len() as u64, modified_ns, direct).unwrap();
        (file, Arc::new(external))
    }

    /// Calls `read` with a window, and returns the `elements` that it has filled.
    fn filled(elements: usize, read: impl FnOnce(&mut [u16], &mut [u8])) -> Vec<u16> {
        let block = PageableAllocator::default().allocate(FILE_WINDOW_BYTES).unwrap();
        // SAFETY: the block is this function's own, and lives as long as the slice.
        let window = unsafe { std::slice::from_raw_parts_mut(block.address().as_ptr(), FILE_WINDOW_BYTES) };
        let mut target = vec![0xEEEE; elements];
        read(&mut target, window);
        target
    }

    /// Reads `elements` from number `first` on.
    pub(super) fn read(
        packing: &Packing,
        file: &ExternalFile,
        position: u64,
        first: usize,
        elements: usize,
    ) -> Vec<u16> {
        assert!(packing.fits_window());
        filled(elements, |target, window| {
            packing.read_elements(file, position, first, target, window).unwrap()
        })
    }

    /// Reads all `elements`, piece by piece, the last one first.
    pub(super) fn read_pieces(
        packing: &Packing,
        file: &ExternalFile,
        position: u64,
        elements: usize,
    ) -> Vec<u16> {
        assert!(packing.fits_window());
        filled(elements, |target, window| {
            // SAFETY: the slice is valid, and is not used by other code.
            let mut target = unsafe { Target::new(target.as_mut_ptr().cast(), 2 * elements) };
            for piece in (0..packing.pieces(elements)).rev() {
                packing.read(file, position, piece, &mut target, window).unwrap();
            }
        })
    }

    #[test]
    fn float8_has_the_scale_of_its_block_in_any_piece() {
        let (rows, width, block) = (300, 130, (128, 48));
        let grid_width = 3;
        let codes: Vec<u8> = (0..rows * width).map(|at| (at * 7 + at / 31) as u8 & 0x7D).collect();
        let scales: Vec<f32> = (0..3 * grid_width).map(|at| 0.001 * (at as f32 + 1.0)).collect();
        let scale_bytes: Vec<u8> = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
        let bytes = [&[1, 2, 3][..], &scale_bytes, &codes].concat();
        let expected = |row: usize, column: usize| {
            let scale = scales[row / block.0 * grid_width + column / block.1];
            round_bf16(widen_e4m3(codes[row * width + column]) * scale)
        };
        for direct in [false, true] {
            let (_file, file) = opened(&bytes, direct);
            let stored = Stored { file: Arc::clone(&file), position: 3 };
            let scales = Scales { stored, format: ScaleFormat::F32 };
            let packing = Packing::Rows { numbers: Numbers::E4m3, width, block, scales };
            let position = 3 + scale_bytes.len() as u64;
            for (top, bottom) in [(0, rows), (0, 1), (127, 129), (200, 300), (255, 257)] {
                let made = read(&packing, &file, position, top * width, (bottom - top) * width);
                let wanted: Vec<u16> = (top..bottom)
                    .flat_map(|row| (0..width).map(move |column| (row, column)))
                    .map(|(row, column)| expected(row, column))
                    .collect();
                assert_eq!(made, wanted, "rows {top} .. {bottom}");
            }
        }
    }

    #[test]
    fn four_bits_have_the_scale_of_their_block_in_any_piece() {
        let (elements, block, per_factor) = (64 * 700, 64, 256);
        let code: [f32; 16] = std::array::from_fn(|at| at as f32 / 7.5 - 1.0);
        let of_byte: [f32; 256] = std::array::from_fn(|at| at as f32 / 255.0);
        let packed: Vec<u8> = (0..elements / 2).map(|at| (at * 11 + at / 13) as u8).collect();
        let largest: Vec<u8> = (0..elements / block).map(|at| (at * 3) as u8).collect();
        let factors: Vec<f32> = (0..3).map(|at| 0.5 + at as f32).collect();
        let factor_bytes: Vec<u8> = factors.iter().flat_map(|factor| factor.to_le_bytes()).collect();
        let bytes = [&packed[..], &largest, &factor_bytes].concat();
        let (_file, file) = opened(&bytes, true);
        let stored = |position: usize| Stored { file: Arc::clone(&file), position: position as u64 };
        let nested = Nested {
            block: per_factor,
            factors: stored(packed.len() + largest.len()),
            code: of_byte,
            offset: 0.03,
        };
        let scales = Scales { stored: stored(packed.len()), format: ScaleFormat::Nested(Box::new(nested)) };
        let packing = Packing::FourBits { block, first: First::High, code, scales };
        for (begin, end) in [(0, elements), (0, 64), (64 * 255, 64 * 257), (64 * 699, elements)] {
            let wanted: Vec<u16> = (begin..end)
                .map(|at| {
                    let number = at / block;
                    let scale = of_byte[largest[number] as usize] * factors[number / per_factor] + 0.03;
                    let byte = packed[at / 2];
                    round_bf16(code[if at % 2 == 0 { byte >> 4 } else { byte & 0xF } as usize] * scale)
                })
                .collect();
            assert_eq!(read(&packing, &file, 0, begin, end - begin), wanted, "{begin} .. {end}");
        }
    }

    #[test]
    fn bytes_have_the_scale_of_their_block_in_any_piece() {
        let (elements, block) = (4096 * 3 + 70, 4096);
        let code: [f32; 256] = std::array::from_fn(|at| at as f32 / 127.5 - 1.0);
        let codes: Vec<u8> = (0..elements).map(|at| (at * 11 + at / 13) as u8).collect();
        let scales: Vec<f32> = (0..4).map(|at| 0.5 + at as f32).collect();
        let scale_bytes: Vec<u8> = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
        let bytes = [&[9][..], &codes, &scale_bytes].concat();
        let (_file, file) = opened(&bytes, true);
        let stored = Stored { file: Arc::clone(&file), position: 1 + codes.len() as u64 };
        let read_scales = Scales { stored, format: ScaleFormat::F32 };
        let packing = Packing::Bytes { block, code: Box::new(code), scales: read_scales };
        for (begin, end) in [(0, elements), (4096, 8192), (4096 * 2, elements)] {
            let wanted: Vec<u16> = (begin..end)
                .map(|at| round_bf16(code[usize::from(codes[at])] * scales[at / block]))
                .collect();
            assert_eq!(read(&packing, &file, 1, begin, end - begin), wanted, "{begin} .. {end}");
        }
    }

    #[test]
    fn a_window_has_room_for_a_piece_with_its_scales() {
        // With a scale for each number or two of them, far fewer elements than a piece has at most.
        let (rows, width) = (9, 40_000);
        let elements = rows * width;
        let codes: Vec<u8> = (0..elements).map(|at| (at * 7 + at / 31) as u8 & 0x7D).collect();
        let scale = |at: usize| 0.001 * (at % 1013 + 1) as f32;
        let scales: Vec<u8> = (0..elements).flat_map(|at| scale(at).to_le_bytes()).collect();
        let (_file, file) = opened(&[&scales[..], &codes].concat(), true);
        let stored = Stored { file: Arc::clone(&file), position: 0 };
        let scales_at = Scales { stored, format: ScaleFormat::F32 };
        let code: [f32; 16] = std::array::from_fn(|at| at as f32 - 7.5);
        let by_rows =
            Packing::Rows { numbers: Numbers::E4m3, width, block: (1, 1), scales: scales_at.clone() };
        let by_twos = Packing::FourBits { block: 2, first: First::Low, code, scales: scales_at };
        let byte = |at: usize| round_bf16(widen_e4m3(codes[at]) * scale(at));
        let nibble = |at: usize| usize::from(codes[at / 2] >> (at % 2 * 4) & 0xF);
        let named = |at: usize| round_bf16(code[nibble(at)] * scale(at / 2));
        let kinds: [(_, &dyn Fn(usize) -> u16); 2] = [(by_rows, &byte), (by_twos, &named)];
        for (packing, value) in kinds {
            assert!(packing.pieces(elements) > 1 && packing.fits_window());
            let made = read_pieces(&packing, &file, 4 * elements as u64, elements);
            assert!(made.into_iter().eq((0..elements).map(value)), "{packing:?}");
        }
        let stored = Stored { file, position: 0 };
        let scales = Scales { stored, format: ScaleFormat::F32 };
        let wide = Packing::Rows { numbers: Numbers::E4m3, width: 1 << 20, block: (1, 1), scales };
        assert!(!wide.fits_window());
    }

    #[test]
    fn scales_of_any_format_are_read() {
        let (elements, block) = (64 * 32, 32);
        let packed: Vec<u8> = (0..elements / 2).map(|at| (at * 11 + at / 13) as u8).collect();
        let code: [f32; 16] = std::array::from_fn(|at| at as f32 - 8.0);
        let raw: Vec<u8> = (0..128).map(|at| 60 + at as u8 / 2).collect();
        let wide =
            |number: usize| f32::from_bits(u32::from_le_bytes([0, 0, raw[2 * number], raw[2 * number + 1]]));
        let divisor = 3.7;
        let formats: [(ScaleFormat, &dyn Fn(usize) -> f32); 3] = [
            (ScaleFormat::Bf16, &wide),
            (ScaleFormat::Exponents, &|number| 2f32.powi(i32::from(raw[number]) - 127)),
            (ScaleFormat::E4m3 { divisor }, &|number| widen_e4m3(raw[number]) / divisor),
        ];
        let bytes = [&packed[..], &raw].concat();
        let (_file, file) = opened(&bytes, false);
        for (format, scale) in formats {
            let stored = Stored { file: Arc::clone(&file), position: packed.len() as u64 };
            let scales = Scales { stored, format };
            let packing = Packing::FourBits { block, first: First::Low, code, scales };
            for (begin, end) in [(0, elements), (32 * 7, 32 * 9)] {
                let wanted: Vec<u16> = (begin..end)
                    .map(|at| {
                        round_bf16(
                            code[usize::from(packed[at / 2] >> (at % 2 * 4) & 0xF)] * scale(at / block),
                        )
                    })
                    .collect();
                assert_eq!(read(&packing, &file, 0, begin, end - begin), wanted, "{begin} .. {end}");
            }
        }
    }

    #[test]
    fn whole_numbers_have_the_scale_of_their_row() {
        let (rows, width, step) = (40, 70, 1.0 / 127.0);
        let numbers: Vec<u8> = (0..rows * width).map(|at| (at * 7 + at / 31) as u8).collect();
        let scales: Vec<f32> = (0..rows).map(|row| 0.37 + row as f32).collect();
        let scale_bytes: Vec<u8> = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
        let (_file, file) = opened(&[&scale_bytes[..], &numbers].concat(), false);
        let stored = Stored { file: Arc::clone(&file), position: 0 };
        let packing = Packing::Rows {
            numbers: Numbers::Int8 { step },
            width,
            block: (1, width),
            scales: Scales { stored, format: ScaleFormat::F32 },
        };
        let wanted: Vec<u16> = (0..rows * width)
            .map(|at| round_bf16(f32::from(numbers[at] as i8) * scales[at / width] * step))
            .collect();
        assert_eq!(read(&packing, &file, scale_bytes.len() as u64, 0, rows * width), wanted);
    }
}
