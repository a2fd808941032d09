//! Scales of quantised weights. They are read for each piece: a whole model's are hundreds of megabytes.

use std::sync::Arc;

use memascend_kernels::{power_of_two, widen_bf16, widen_e4m3};
use memascend_store::ExternalFile;

use super::places::{Need, Window};
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
    /// Reads `bytes` bytes from byte `first` on into `window`.
    pub(super) fn read<'a>(&self, first: usize, bytes: usize, window: &mut Window<'a>) -> Result<&'a [u8]> {
        window.read(&self.file, self.position + first as u64, bytes)
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

impl ScaleFormat {
    /// Bytes of a scale.
    fn bytes(&self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
            Self::Exponents | Self::E4m3 { .. } | Self::Nested(_) => 1,
        }
    }
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
    /// The need of `count` scales, beside other reads.
    pub(super) fn need(&self, count: usize, beside: Need) -> Need {
        let need = beside.and(count * self.format.bytes());
        match &self.format {
            ScaleFormat::Nested(nested) => need.and(4 * (count.div_ceil(nested.block) + 1)),
            _ => need,
        }
    }

    /// Reads `count` scales from number `first` on into `window`.
    pub(super) fn read<'a, 'w: 'a>(
        &'a self,
        first: usize,
        count: usize,
        window: &mut Window<'w>,
    ) -> Result<ReadScales<'a>> {
        let size = self.format.bytes();
        let stored = self.stored.read(size * first, size * count, window)?;
        let factors = match &self.format {
            ScaleFormat::Nested(nested) => {
                let top = first / nested.block;
                let count = (first + count).div_ceil(nested.block) - top;
                nested.factors.read(4 * top, 4 * count, window)?
            }
            _ => &[],
        };
        Ok(ReadScales { format: &self.format, stored, first, factors })
    }
}

/// Some scales in a window.
pub(super) struct ReadScales<'a> {
    format: &'a ScaleFormat,
    stored: &'a [u8],
    /// The number of the first one.
    first: usize,
    /// The factors of nested ones, from the first scale's on.
    factors: &'a [u8],
}

impl ReadScales<'_> {
    /// Fills `values` with the scales from the one on that is number `at` of these.
    pub(super) fn fill(&self, at: usize, values: &mut [f32]) {
        match self.format {
            ScaleFormat::F32 => {
                let words = &self.stored.as_chunks().0[at..];
                values.iter_mut().zip(words).for_each(|(value, word)| *value = f32::from_le_bytes(*word));
            }
            ScaleFormat::Bf16 => {
                let pairs = &self.stored.as_chunks().0[at..];
                values
                    .iter_mut()
                    .zip(pairs)
                    .for_each(|(value, pair)| *value = widen_bf16(u16::from_le_bytes(*pair)));
            }
            ScaleFormat::Exponents => self.each(at, values, |_, byte| power_of_two(byte)),
            ScaleFormat::E4m3 { divisor } => self.each(at, values, |_, byte| widen_e4m3(byte) / divisor),
            ScaleFormat::Nested(nested) => {
                let factors = self.factors.as_chunks().0;
                let top = self.first / nested.block;
                self.each(at, values, |number, byte| {
                    let factor = f32::from_le_bytes(factors[(self.first + number) / nested.block - top]);
                    nested.code[usize::from(byte)] * factor + nested.offset
                });
            }
        }
    }

    /// Fills `values` with `value` of the number and the byte of each.
    fn each(&self, at: usize, values: &mut [f32], value: impl Fn(usize, u8) -> f32) {
        let bytes = self.stored[at..].iter().enumerate();
        values.iter_mut().zip(bytes).for_each(|(made, (number, &byte))| *made = value(at + number, byte));
    }
}
