//! Quantised weights in files outside the store, which are dequantised as they are read.
//!
//! A thread reads packed numbers to the end of their place in the unit and dequantises from the beginning.
//! The 16-bit results never reach packed numbers that are not taken yet, so no other buffer is needed. Scales
//! are read for each piece: a whole model's are hundreds of megabytes.

use std::sync::Arc;

use memascend_kernels::{dequantise_bytes, dequantise_e4m3, dequantise_four_bits};
use memascend_store::ExternalFile;

use crate::Result;

/// Elements of FP8, or bytes of four bits, that are taken out of a buffer before it is written over.
const TAKEN_BYTES: usize = 4096;
/// Elements of four bits in a piece; blocks divide it.
const PIECE_ELEMENTS: usize = 1 << 18;
/// Elements of a byte in a piece; blocks divide it.
const BYTES_PIECE_ELEMENTS: usize = 1 << 19;
/// Elements of FP8 in a piece, but for the end of the last row.
const ROW_PIECE_ELEMENTS: usize = 1 << 19;

/// Where numbers lie in a file.
#[derive(Debug, Clone)]
pub struct Stored {
    /// The file.
    pub file: Arc<ExternalFile>,
    /// Where they begin, in bytes.
    pub position: u64,
}

impl Stored {
    /// Reads `bytes` bytes from the byte `first` on, through `window`.
    fn read(&self, first: usize, bytes: usize, window: &mut [u8]) -> Result<Vec<u8>> {
        let mut values = vec![0; bytes];
        self.file.read(self.position + first as u64, &mut values, window)?;
        Ok(values)
    }

    /// Reads `count` fp32 numbers from number `first` on, through `window`.
    fn floats(&self, first: usize, count: usize, window: &mut [u8]) -> Result<Vec<f32>> {
        let bytes = self.read(4 * first, 4 * count, window)?;
        Ok(bytes
            .chunks_exact(4)
            .map(|word| f32::from_le_bytes(word.try_into().expect("four bytes")))
            .collect())
    }
}

/// Quantised scales of four-bit numbers.
#[derive(Debug, Clone)]
pub struct Nested {
    /// Scales for which there is one factor.
    pub block: usize,
    /// The factors, fp32.
    pub factors: Stored,
    /// The value of each byte.
    pub code: [f32; 256],
    /// Added to each scale.
    pub offset: f32,
}

/// How a part of a unit's weights, in bf16 there, is stored in its file.
#[derive(Debug, Clone)]
pub enum Packing {
    /// FP8 (e4m3fn) by rows, with an fp32 scale for each block of some rows and columns.
    Float8 {
        /// Elements of a row.
        width: usize,
        /// Rows and columns of a block.
        block: (usize, usize),
        /// The scales, by rows of blocks.
        scales: Stored,
    },
    /// Numbers of four bits that name a number of a code, with a scale for each block.
    FourBits {
        /// Elements of a block; divides 4,096.
        block: usize,
        /// The numbers.
        code: [f32; 16],
        /// The scales: fp32, or bytes where they are quantised too.
        scales: Stored,
        /// The format of the bytes.
        nested: Option<Box<Nested>>,
    },
    /// Bytes that name a number of a code, with an fp32 scale for each block.
    Bytes {
        /// Elements of a block; divides 4,096.
        block: usize,
        /// The numbers.
        code: Box<[f32; 256]>,
        /// The scales.
        scales: Stored,
    },
}

impl Packing {
    /// Elements of a piece that is read at once.
    pub(crate) fn piece_elements(&self) -> usize {
        match self {
            Self::Float8 { width, .. } => (ROW_PIECE_ELEMENTS / width).max(1) * width,
            Self::FourBits { .. } => PIECE_ELEMENTS,
            Self::Bytes { .. } => BYTES_PIECE_ELEMENTS,
        }
    }

    /// Bytes that `elements` take in the file.
    pub(crate) fn stored_bytes(&self, elements: usize) -> usize {
        match self {
            Self::Float8 { .. } | Self::Bytes { .. } => elements,
            Self::FourBits { .. } => elements.div_ceil(2),
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
        let elements = target.len() / 2;
        let stored = self.stored_bytes(elements);
        // To the end of the target: numbers that are not taken yet lie behind those that are written.
        let begin = target.len() - stored;
        file.read(position + self.stored_bytes(first) as u64, &mut target[begin..], window)?;
        match self {
            Self::Float8 { width, block: (rows, columns), scales } => {
                let grid_width = width.div_ceil(*columns);
                let top = first / width / rows;
                let count = ((first + elements).div_ceil(*width)).div_ceil(*rows) - top;
                let scales = scales.floats(top * grid_width, count * grid_width, window)?;
                let scale = |row: usize, column: usize| {
                    scales[((first / width + row) / rows - top) * grid_width + column / columns]
                };
                for at in 0..elements / width {
                    for column in (0..*width).step_by(*columns) {
                        let end = (column + columns).min(*width);
                        let scale = scale(at, column);
                        unpack(target, begin, at * width + column, at * width + end, 1, |dst, codes| {
                            dequantise_e4m3(dst, codes, scale);
                        });
                    }
                }
            }
            Self::FourBits { block, code, scales, nested } => {
                let scales = four_bit_scales(
                    scales,
                    nested.as_deref(),
                    first / block,
                    elements.div_ceil(*block),
                    window,
                )?;
                for (number, scale) in scales.iter().enumerate() {
                    let end = ((number + 1) * block).min(elements);
                    unpack(target, begin, number * block, end, 2, |dst, packed| {
                        dequantise_four_bits(dst, packed, code, *scale);
                    });
                }
            }
            Self::Bytes { block, code, scales } => {
                let scales = scales.floats(first / block, elements.div_ceil(*block), window)?;
                for (number, scale) in scales.iter().enumerate() {
                    let end = ((number + 1) * block).min(elements);
                    unpack(target, begin, number * block, end, 1, |dst, codes| {
                        dequantise_bytes(dst, codes, code, *scale);
                    });
                }
            }
        }
        Ok(())
    }
}

/// Returns `count` scales of four-bit numbers from number `first` on.
fn four_bit_scales(
    scales: &Stored,
    nested: Option<&Nested>,
    first: usize,
    count: usize,
    window: &mut [u8],
) -> Result<Vec<f32>> {
    let Some(nested) = nested else { return scales.floats(first, count, window) };
    let bytes = scales.read(first, count, window)?;
    let top = first / nested.block;
    let factors = nested.factors.floats(top, (first + count).div_ceil(nested.block) - top, window)?;
    let scale = |(number, byte): (usize, &u8)| {
        nested.code[usize::from(*byte)] * factors[(first + number) / nested.block - top] + nested.offset
    };
    Ok(bytes.iter().enumerate().map(scale).collect())
}

/// Writes the elements `first .. end` of `target`, bf16, with `kernel`, from its own bytes from `begin` on,
/// `per_byte` elements to a byte.
fn unpack(
    target: &mut [u8],
    begin: usize,
    first: usize,
    end: usize,
    per_byte: usize,
    kernel: impl Fn(&mut [u16], &[u8]),
) {
    let (mut taken, mut made) = ([0; TAKEN_BYTES], [0; 2 * TAKEN_BYTES]);
    for at in (first..end).step_by(TAKEN_BYTES * per_byte) {
        let elements = (end - at).min(TAKEN_BYTES * per_byte);
        let bytes = elements / per_byte;
        taken[..bytes].copy_from_slice(&target[begin + at / per_byte..][..bytes]);
        kernel(&mut made[..elements], &taken[..bytes]);
        let written = &mut target[2 * at..][..2 * elements];
        written
            .chunks_exact_mut(2)
            .zip(&made)
            .for_each(|(pair, bits)| pair.copy_from_slice(&bits.to_ne_bytes()));
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::fs::MetadataExt;

    use memascend_kernels::{round_bf16, widen_e4m3};
    use memascend_mem::{HostAllocator, PageableAllocator};

    use super::*;

    /// A file of `bytes`, and a window to read it through.
    fn opened(bytes: &[u8], direct: bool) -> (tempfile::NamedTempFile, Arc<ExternalFile>) {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(bytes).unwrap();
        let seen = file.as_file().metadata().unwrap();
        let modified_ns = i128::from(seen.mtime()) * 1_000_000_000 + i128::from(seen.mtime_nsec());
        let external = ExternalFile::open(file.path(), bytes.len() as u64, modified_ns, direct).unwrap();
        (file, Arc::new(external))
    }

    /// Reads `elements` from number `first` on.
    fn read(
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
            let scales = Stored { file: Arc::clone(&file), position: 3 };
            let packing = Packing::Float8 { width, block, scales };
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
        let packing =
            Packing::FourBits { block, code, scales: stored(packed.len()), nested: Some(Box::new(nested)) };
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
        let packing = Packing::Bytes { block, code: Box::new(code), scales: stored };
        for (begin, end) in [(0, elements), (4096, 8192), (4096 * 2, elements)] {
            let wanted: Vec<u16> = (begin..end)
                .map(|at| round_bf16(code[usize::from(codes[at])] * scales[at / block]))
                .collect();
            assert_eq!(read(&packing, &file, 1, begin, end - begin), wanted, "{begin} .. {end}");
        }
    }
}
