//! Quantised weights in files outside the store, which are dequantised as they are read.
//!
//! A thread reads packed numbers to the end of their place in the unit and dequantises from the beginning.
//! The 16-bit results never reach packed numbers that are not taken yet, so no other buffer is needed. Scales
//! are read for each piece: a whole model's are hundreds of megabytes.

mod scales;
mod transposed;
mod words;
mod zeros;

pub use memascend_kernels::First;
use memascend_kernels::{dequantise_bytes, dequantise_e4m3, dequantise_four_bits, dequantise_int8};
use memascend_kernels::{dequantise_two_bits, dequantise_whole};
use memascend_store::ExternalFile;

pub use scales::{Nested, ScaleFormat, Scales, Stored};
pub use transposed::Mxfp4;
pub use words::{Groups, WordOrder, Words};
pub use zeros::Zeros;

use crate::Result;

/// Bytes of numbers that are taken out of a buffer before it is written over.
const TAKEN_BYTES: usize = 4096;
/// Elements of four bits in a piece; blocks divide it.
const PIECE_ELEMENTS: usize = 1 << 18;
/// Elements of a byte in a piece; blocks divide it.
const BYTES_PIECE_ELEMENTS: usize = 1 << 19;
/// Elements of a byte by rows in a piece, but for the end of the last row.
const ROW_PIECE_ELEMENTS: usize = 1 << 19;

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
    /// Numbers in a byte.
    fn per_byte(&self) -> usize {
        match self {
            Self::E4m3 | Self::Int8 { .. } => 1,
            Self::Whole { bits, .. } => 8 / bits,
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
    /// Elements of a piece that is read at once.
    pub(crate) fn piece_elements(&self) -> usize {
        match self {
            Self::Rows { width, .. } => (ROW_PIECE_ELEMENTS / width).max(1) * width,
            Self::FourBits { .. } => PIECE_ELEMENTS,
            Self::Bytes { .. } => BYTES_PIECE_ELEMENTS,
            Self::Mxfp4(matrices) => matrices.elements(),
            Self::Words(matrix) => matrix.elements(),
        }
    }

    /// Bytes that `elements` take in the file, without their scales.
    pub(crate) fn stored_bytes(&self, elements: usize) -> usize {
        match self {
            Self::Rows { numbers, .. } => elements / numbers.per_byte(),
            Self::Bytes { .. } => elements,
            Self::FourBits { .. } | Self::Mxfp4(_) => elements.div_ceil(2),
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

    /// Reads the elements of a piece from number `first` on into `target`, bf16, through `window`. `position`
    /// is where the weights begin in `file`.
    ///
    /// # Errors
    /// If a read fails, or a file has changed.
    pub(crate) fn read(
        &self,
        file: &ExternalFile,
        position: u64,
        first: usize,
        target: &mut [u8],
        window: &mut [u8],
    ) -> Result<()> {
        match self {
            Self::Mxfp4(matrices) => {
                return matrices.read(file, position, first / matrices.elements(), target, window);
            }
            Self::Words(matrix) => return matrix.read(file, position, target, window),
            _ => {}
        }
        let elements = target.len() / 2;
        let stored = self.stored_bytes(elements);
        // To the end of the target: numbers that are not taken yet lie behind those that are written.
        let begin = target.len() - stored;
        file.read(position + self.stored_bytes(first) as u64, &mut target[begin..], window)?;
        let mut piece = Piece { target, begin, taken: [0; TAKEN_BYTES], made: [0; 2 * TAKEN_BYTES] };
        match self {
            Self::Rows { numbers, width, block: (rows, columns), scales } => {
                let grid_width = width.div_ceil(*columns);
                let top = first / width / rows;
                let count = ((first + elements).div_ceil(*width)).div_ceil(*rows) - top;
                let scales = scales.read(top * grid_width, count * grid_width, window)?;
                let zeros = match numbers {
                    Numbers::Whole { bits, zeros } => zeros.read(*bits, top, count, grid_width, window)?,
                    _ => Vec::new(),
                };
                for at in 0..elements / width {
                    for column in (0..*width).step_by(*columns) {
                        let end = (column + columns).min(*width);
                        let block = ((first / width + at) / rows - top) * grid_width + column / columns;
                        let scale = scales[block];
                        let (begin, end) = (at * width + column, at * width + end);
                        piece.unpack(begin, end, numbers.per_byte(), |dst, bytes| match numbers {
                            Numbers::E4m3 => dequantise_e4m3(dst, bytes, scale),
                            Numbers::Int8 { step } => dequantise_int8(dst, bytes, scale, *step),
                            Numbers::Whole { bits, zeros: of } => {
                                dequantise_numbers(dst, bytes, *bits, of.flipped(), zeros[block], scale);
                            }
                        });
                    }
                }
            }
            Self::FourBits { block, first: order, code, scales } => {
                let scales = scales.read(first / block, elements.div_ceil(*block), window)?;
                for (number, scale) in scales.iter().enumerate() {
                    let end = ((number + 1) * block).min(elements);
                    piece.unpack(number * block, end, 2, |dst, packed| {
                        dequantise_four_bits(dst, packed, *order, code, *scale);
                    });
                }
            }
            Self::Bytes { block, code, scales } => {
                let scales = scales.read(first / block, elements.div_ceil(*block), window)?;
                for (number, scale) in scales.iter().enumerate() {
                    let end = ((number + 1) * block).min(elements);
                    piece.unpack(number * block, end, 1, |dst, codes| {
                        dequantise_bytes(dst, codes, code, *scale);
                    });
                }
            }
            Self::Mxfp4(_) | Self::Words(_) => unreachable!("read above"),
        }
        Ok(())
    }
}

/// Whole numbers of `bits`, less `zero`, times `scale`, to bf16. `flipped` is of numbers of a byte.
fn dequantise_numbers(dst: &mut [u16], bytes: &[u8], bits: usize, flipped: u8, zero: f32, scale: f32) {
    match bits {
        2 => dequantise_two_bits(dst, bytes, &std::array::from_fn(|number| number as f32 - zero), scale),
        4 => {
            let code = std::array::from_fn(|number| number as f32 - zero);
            dequantise_four_bits(dst, bytes, First::Low, &code, scale);
        }
        _ => dequantise_whole(dst, bytes, flipped, zero, scale),
    }
}

/// A piece whose numbers lie in its own place, from `begin` on.
struct Piece<'a> {
    target: &'a mut [u8],
    begin: usize,
    /// Numbers that are taken out of the target, and their values in bf16.
    taken: [u8; TAKEN_BYTES],
    made: [u16; 2 * TAKEN_BYTES],
}

impl Piece<'_> {
    /// Writes the elements `first .. end` of the target, bf16, with `kernel`, `per_byte` elements to a byte.
    fn unpack(&mut self, first: usize, end: usize, per_byte: usize, kernel: impl Fn(&mut [u16], &[u8])) {
        let step = (TAKEN_BYTES * per_byte).min(self.made.len());
        for at in (first..end).step_by(step) {
            let elements = (end - at).min(step);
            let bytes = elements / per_byte;
            let (taken, made) = (&mut self.taken[..bytes], &mut self.made[..elements]);
            taken.copy_from_slice(&self.target[self.begin + at / per_byte..][..bytes]);
            kernel(made, taken);
            let written = self.target[2 * at..][..2 * elements].chunks_exact_mut(2);
            written.zip(made).for_each(|(pair, bits)| pair.copy_from_slice(&bits.to_ne_bytes()));
        }
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

    /// A file of `bytes`, and a window to read it through.
    pub(super) fn opened(bytes: &[u8], direct: bool) -> (tempfile::NamedTempFile, Arc<ExternalFile>) {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(bytes).unwrap();
        let seen = file.as_file().metadata().unwrap();
        let modified_ns = i128::from(seen.mtime()) * 1_000_000_000 + i128::from(seen.mtime_nsec());
        let external = ExternalFile::open(file.path(), bytes.len() as u64, modified_ns, direct).unwrap();
        (file, Arc::new(external))
    }

    /// Reads `elements` from number `first` on.
    pub(super) fn read(
        packing: &Packing,
        file: &ExternalFile,
        position: u64,
        first: usize,
        elements: usize,
    ) -> Vec<u16> {
        let block = PageableAllocator::default().allocate(1 << 20).unwrap();
        // SAFETY: the block is this function's own, and lives as long as the slice.
        let window = unsafe { std::slice::from_raw_parts_mut(block.address().as_ptr(), 1 << 20) };
        let mut target = vec![0xEE; 2 * elements];
        packing.read(file, position, first, &mut target, window).unwrap();
        target.chunks_exact(2).map(|pair| u16::from_ne_bytes([pair[0], pair[1]])).collect()
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
