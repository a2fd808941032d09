//! Scales of quantised weights. They are read for each piece: a whole model's are hundreds of megabytes.

use std::sync::Arc;

use memascend_kernels::{power_of_two, widen_bf16, widen_e4m3};
use memascend_store::ExternalFile;

use crate::Result;

/// Where numbers lie in a file.
#[derive(Debug, Clone)]
pub struct Stored {
    /// The file.
    pub file: Arc<ExternalFile>,
    /// Where they begin, in bytes.
    pub position: u64,
}

impl Stored {
    /// Fills `values` with the bytes from `first` on, through `window`.
    pub(super) fn read_into(&self, first: usize, values: &mut [u8], window: &mut [u8]) -> Result<()> {
        Ok(self.file.read(self.position + first as u64, values, window)?)
    }

    pub(super) fn read(&self, first: usize, bytes: usize, window: &mut [u8]) -> Result<Vec<u8>> {
        let mut values = vec![0; bytes];
        self.read_into(first, &mut values, window)?;
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

/// How scales are stored.
#[derive(Debug, Clone)]
pub enum ScaleFormat {
    /// fp32.
    F32,
    /// bf16.
    Bf16,
    /// Powers of two, e8m0.
    Exponents,
    /// FP8 (e4m3fn), each divided by a number.
    E4m3 {
        /// The number.
        divisor: f32,
    },
    /// Bytes that name numbers of a code.
    Nested(Box<Nested>),
}

/// The scales of a weight.
#[derive(Debug, Clone)]
pub struct Scales {
    /// Where they lie.
    pub stored: Stored,
    /// How.
    pub format: ScaleFormat,
}

impl Scales {
    /// Reads `count` scales from number `first` on, through `window`.
    pub(super) fn read(&self, first: usize, count: usize, window: &mut [u8]) -> Result<Vec<f32>> {
        let stored = &self.stored;
        let nested = match &self.format {
            ScaleFormat::F32 => return stored.floats(first, count, window),
            ScaleFormat::Bf16 => {
                let bytes = stored.read(2 * first, 2 * count, window)?;
                let widened = |pair: &[u8]| widen_bf16(u16::from_le_bytes([pair[0], pair[1]]));
                return Ok(bytes.chunks_exact(2).map(widened).collect());
            }
            ScaleFormat::Exponents => {
                let bytes = stored.read(first, count, window)?;
                return Ok(bytes.into_iter().map(power_of_two).collect());
            }
            ScaleFormat::E4m3 { divisor } => {
                let bytes = stored.read(first, count, window)?;
                return Ok(bytes.into_iter().map(|code| widen_e4m3(code) / divisor).collect());
            }
            ScaleFormat::Nested(nested) => nested,
        };
        let bytes = stored.read(first, count, window)?;
        let top = first / nested.block;
        let factors = nested.factors.floats(top, (first + count).div_ceil(nested.block) - top, window)?;
        let scale = |(number, byte): (usize, &u8)| {
            nested.code[usize::from(*byte)] * factors[(first + number) / nested.block - top] + nested.offset
        };
        Ok(bytes.iter().enumerate().map(scale).collect())
    }
}
