//! Quantised weights to bf16, with the bits of the libraries that define their forms.
//!
//! A call takes many blocks, each with its own scale: the instruction set is chosen once for all.

mod few_bits;
mod fp16_scales;

pub use few_bits::{
    E2M1, First, dequantise_four_bits, dequantise_four_bits_with, dequantise_two_bits,
    dequantise_two_bits_with,
};
pub use fp16_scales::{
    dequantise_fp16, dequantise_fp16_with, unpack_awq, unpack_awq_with, unpack_gptq, unpack_gptq_with,
};

use super::bf16::round_bf16;
use super::dispatch::kernel;

/// Blocks of elements, each with a scale. The last one may be shorter.
#[derive(Clone, Copy, Debug)]
pub struct Blocks<'a> {
    /// Elements of a block.
    pub elements: usize,
    /// The scale of each.
    pub scales: &'a [f32],
}

impl Blocks<'_> {
    /// # Panics
    /// Unless there is a scale for each block of `elements`.
    #[inline(always)]
    fn check(&self, elements: usize) {
        assert_eq!(self.scales.len(), elements.div_ceil(self.elements), "a scale for each block");
    }
}

/// Added to an e4m3 exponent, at fp32's place, to make it an fp32 exponent.
const E4M3_REBIAS: u32 = (127 - 7) << 23;
/// 2^-9, the least number of e4m3 above zero.
const E4M3_UNIT: f32 = f32::from_bits((127 - 9) << 23);

/// The fp32 value of an FP8 number in e4m3fn.
#[inline(always)]
pub const fn widen_e4m3(code: u8) -> f32 {
    let magnitude = (code & 0x7F) as u32;
    // As in fp16: without denormals of fp32, which are slow.
    let denormal = (magnitude as i32 as f32 * E4M3_UNIT).to_bits();
    let normal = (magnitude << 20) + E4M3_REBIAS;
    let widened = if magnitude < 8 { denormal } else { normal };
    let bits = if magnitude == 0x7F { f32::NAN.to_bits() } else { widened };
    f32::from_bits(bits | ((code & 0x80) as u32) << 24)
}

/// The power of two that a byte stands for in e8m0: 255 is infinite, as transformers computes it.
#[inline(always)]
pub const fn power_of_two(exponent: u8) -> f32 {
    // 2^-127 has no exponent in fp32.
    f32::from_bits(if exponent == 0 { 1 << 22 } else { (exponent as u32) << 23 })
}

/// Writes the bf16 of `value(byte, scale)` for each byte and the scale of its block.
#[inline(always)]
fn by_blocks(dst: &mut [u16], bytes: &[u8], blocks: Blocks<'_>, value: impl Fn(u8, f32) -> f32) {
    assert_eq!(dst.len(), bytes.len(), "lengths");
    blocks.check(dst.len());
    let of_blocks = dst.chunks_mut(blocks.elements).zip(bytes.chunks(blocks.elements));
    for ((dst, bytes), &scale) in of_blocks.zip(blocks.scales) {
        dst.iter_mut().zip(bytes).for_each(|(bits, &byte)| *bits = round_bf16(value(byte, scale)));
    }
}

kernel! {
    /// The bf16 of every FP8 number (e4m3fn) times the scale of its block, which is rounded once.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn dequantise_e4m3 / dequantise_e4m3_with(dst: &mut [u16], codes: &[u8], blocks: Blocks<'_>) = e4m3_body;
}

#[inline(always)]
fn e4m3_body(dst: &mut [u16], codes: &[u8], blocks: Blocks<'_>) {
    by_blocks(dst, codes, blocks, |code, scale| widen_e4m3(code) * scale);
}

kernel! {
    /// The bf16 of every whole number of a byte times the scale of its block, rounded to fp32, times `step`.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn dequantise_int8 / dequantise_int8_with(
        dst: &mut [u16],
        numbers: &[u8],
        blocks: Blocks<'_>,
        step: f32,
    ) = int8_body;
}

#[inline(always)]
fn int8_body(dst: &mut [u16], numbers: &[u8], blocks: Blocks<'_>, step: f32) {
    by_blocks(dst, numbers, blocks, |byte, scale| f32::from(byte as i8) * scale * step);
}

kernel! {
    /// The bf16 of every whole number of a byte, whose bits in `flipped` are inverted first, less the zero of its
    /// block, times the scale. It is rounded once where the zero is a whole number too.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn dequantise_whole / dequantise_whole_with(
        dst: &mut [u16],
        numbers: &[u8],
        flipped: u8,
        blocks: Blocks<'_>,
        zeros: &[f32],
    ) = whole_body;
}

#[inline(always)]
fn whole_body(dst: &mut [u16], numbers: &[u8], flipped: u8, blocks: Blocks<'_>, zeros: &[f32]) {
    assert_eq!(dst.len(), numbers.len(), "lengths");
    assert_eq!(blocks.scales.len(), zeros.len(), "a zero for each block");
    blocks.check(dst.len());
    let of_blocks = dst.chunks_mut(blocks.elements).zip(numbers.chunks(blocks.elements));
    for ((dst, numbers), (&scale, &zero)) in of_blocks.zip(blocks.scales.iter().zip(zeros)) {
        let value = |byte: u8| (f32::from(byte ^ flipped) - zero) * scale;
        dst.iter_mut().zip(numbers).for_each(|(bits, &byte)| *bits = round_bf16(value(byte)));
    }
}

/// Elements of a block from which on the numbers of a code are multiplied by its scale before they are looked up.
const TABLE_ELEMENTS_MIN: usize = 256;

kernel! {
    /// The bf16 of the number of `code` that each byte of `codes` names, times the scale of its block.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn dequantise_bytes / dequantise_bytes_with(
        dst: &mut [u16],
        codes: &[u8],
        code: &[f32; 256],
        blocks: Blocks<'_>,
    ) = bytes_body;
}

#[inline(always)]
fn bytes_body(dst: &mut [u16], codes: &[u8], code: &[f32; 256], blocks: Blocks<'_>) {
    if blocks.elements < TABLE_ELEMENTS_MIN {
        return by_blocks(dst, codes, blocks, |byte, scale| code[usize::from(byte)] * scale);
    }
    assert_eq!(dst.len(), codes.len(), "lengths");
    blocks.check(dst.len());
    let mut numbers = [0; 256];
    let of_blocks = dst.chunks_mut(blocks.elements).zip(codes.chunks(blocks.elements));
    for ((dst, codes), &scale) in of_blocks.zip(blocks.scales) {
        numbers.iter_mut().zip(code).for_each(|(bits, value)| *bits = round_bf16(value * scale));
        dst.iter_mut().zip(codes).for_each(|(bits, &byte)| *bits = numbers[usize::from(byte)]);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::Isa;
    use super::super::testing::any_bit_pattern;
    use super::*;

    /// The value by its definition.
    fn e4m3(code: u8) -> f64 {
        let (exponent, mantissa) = (i32::from(code >> 3 & 0xF), f64::from(code & 7));
        let magnitude = match exponent {
            0 => mantissa / 8.0 * 2f64.powi(-6),
            _ => (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
        };
        if code & 0x80 == 0 { magnitude } else { -magnitude }
    }

    #[test]
    fn every_e4m3_is_what_its_bits_say() {
        for code in 0..=u8::MAX {
            let value = widen_e4m3(code);
            if code & 0x7F == 0x7F {
                assert!(value.is_nan());
            } else {
                assert_eq!(f64::from(value).to_bits(), e4m3(code).to_bits(), "{code:#04x}");
            }
        }
        assert_eq!(widen_e4m3(0x7E), 448.0);
    }

    #[test]
    fn every_power_of_two_is_what_its_byte_says() {
        for exponent in 0..=u8::MAX {
            assert_eq!(power_of_two(exponent), 2f64.powi(i32::from(exponent) - 127) as f32, "{exponent}");
        }
    }

    proptest! {
        /// Blocks of any length at any place, and scales of any bits.
        #[test]
        fn every_isa_has_the_bits_of_each_element_by_itself(
            of_blocks in prop::collection::vec((any_bit_pattern(), 0u8..), 1..6),
            elements in prop_oneof![1usize..100, 250usize..300],
            shorter in 0usize..300,
            bytes in prop::collection::vec(any::<u8>(), 1800),
            begin in 0usize..9,
            (step, flipped) in (any_bit_pattern(), any::<u8>()),
            code in prop::collection::vec(any_bit_pattern(), 256),
        ) {
            let scales: Vec<f32> = of_blocks.iter().map(|(bits, _)| f32::from_bits(*bits)).collect();
            let zeros: Vec<f32> = of_blocks.iter().map(|(_, zero)| f32::from(*zero)).collect();
            let bytes = &bytes[begin..][..elements * scales.len() - shorter % elements];
            let blocks = Blocks { elements, scales: &scales };
            let step = f32::from_bits(step);
            let code: [f32; 256] = std::array::from_fn(|at| f32::from_bits(code[at]));
            type Kernel<'a> = (&'a dyn Fn(Isa, &mut [u16]), &'a dyn Fn(u8, usize) -> f32);
            let kernels: [Kernel<'_>; 4] = [
                (&|isa, made| dequantise_e4m3_with(isa, made, bytes, blocks), &|byte, block| {
                    widen_e4m3(byte) * scales[block]
                }),
                (&|isa, made| dequantise_int8_with(isa, made, bytes, blocks, step), &|byte, block| {
                    f32::from(byte as i8) * scales[block] * step
                }),
                (&|isa, made| dequantise_whole_with(isa, made, bytes, flipped, blocks, &zeros), &|byte, block| {
                    (f32::from(byte ^ flipped) - zeros[block]) * scales[block]
                }),
                (&|isa, made| dequantise_bytes_with(isa, made, bytes, &code, blocks), &|byte, block| {
                    code[usize::from(byte)] * scales[block]
                }),
            ];
            for (number, (kernel, value)) in kernels.into_iter().enumerate() {
                let expected: Vec<u16> =
                    bytes.iter().enumerate().map(|(at, &byte)| round_bf16(value(byte, at / elements))).collect();
                for isa in Isa::available() {
                    let mut made = vec![7; begin + expected.len()];
                    kernel(isa, &mut made[begin..]);
                    prop_assert_eq!(&made[begin..], &expected, "{:?}, kernel {}", isa, number);
                }
            }
        }
    }
}
