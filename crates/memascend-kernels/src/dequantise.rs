//! Quantised weights to bf16, with the bits of the libraries that define their forms.

use super::bf16::round_bf16;
use super::dispatch::kernel;
use super::fp16::{round_f16, widen_f16};

/// The fp32 value of an FP8 number in e4m3fn.
#[inline(always)]
pub const fn widen_e4m3(code: u8) -> f32 {
    let magnitude = (code & 0x7F) as u32;
    // Exponent and mantissa at the place of an fp32's, whose exponent is then too small by 120. Numbers
    // without an exponent are such of fp32 too.
    let value = f32::from_bits(magnitude << 20) * f32::from_bits(247 << 23);
    let bits = if magnitude == 0x7F { f32::NAN.to_bits() } else { value.to_bits() };
    f32::from_bits(bits | ((code & 0x80) as u32) << 24)
}

kernel! {
    /// The bf16 of every FP8 number (e4m3fn) times `scale`, which is rounded once.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn dequantise_e4m3 / dequantise_e4m3_with(dst: &mut [u16], codes: &[u8], scale: f32) = e4m3_body;
}

#[inline(always)]
fn e4m3_body(dst: &mut [u16], codes: &[u8], scale: f32) {
    assert_eq!(dst.len(), codes.len(), "lengths");
    dst.iter_mut().zip(codes).for_each(|(bits, &code)| *bits = round_bf16(widen_e4m3(code) * scale));
}

kernel! {
    /// The bf16 of every whole number of a byte times `scale`, rounded to fp32, times `step`.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn dequantise_int8 / dequantise_int8_with(dst: &mut [u16], numbers: &[u8], scale: f32, step: f32)
        = int8_body;
}

#[inline(always)]
fn int8_body(dst: &mut [u16], numbers: &[u8], scale: f32, step: f32) {
    assert_eq!(dst.len(), numbers.len(), "lengths");
    let value = |byte: u8| f32::from(byte as i8) * scale * step;
    dst.iter_mut().zip(numbers).for_each(|(bits, &byte)| *bits = round_bf16(value(byte)));
}

kernel! {
    /// The bf16 of every whole number of a byte, whose bits in `flipped` are inverted first, less `zero`, times
    /// `scale`. It is rounded once where `zero` is a whole number too.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn dequantise_whole / dequantise_whole_with(
        dst: &mut [u16],
        numbers: &[u8],
        flipped: u8,
        zero: f32,
        scale: f32,
    ) = whole_body;
}

#[inline(always)]
fn whole_body(dst: &mut [u16], numbers: &[u8], flipped: u8, zero: f32, scale: f32) {
    assert_eq!(dst.len(), numbers.len(), "lengths");
    let value = |byte: u8| (f32::from(byte ^ flipped) - zero) * scale;
    dst.iter_mut().zip(numbers).for_each(|(bits, &byte)| *bits = round_bf16(value(byte)));
}

/// Which four bits of a byte are the first number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum First {
    /// The higher ones, as in bitsandbytes.
    High,
    /// The lower ones, as in compressed-tensors and MXFP4.
    Low,
}

kernel! {
    /// The bf16 of the number of `code` that each four bits of `packed` name, times `scale`.
    ///
    /// # Panics
    /// When `dst` has not two elements for each byte.
    pub fn dequantise_four_bits / dequantise_four_bits_with(
        dst: &mut [u16],
        packed: &[u8],
        first: First,
        code: &[f32; 16],
        scale: f32,
    ) = four_bits_body;
}

#[inline(always)]
fn four_bits_body(dst: &mut [u16], packed: &[u8], first: First, code: &[f32; 16], scale: f32) {
    assert_eq!(dst.len(), 2 * packed.len(), "lengths");
    // Each number of the code is multiplied and rounded once, not once for each element.
    let mut numbers = [0; 16];
    numbers.iter_mut().zip(code).for_each(|(bits, value)| *bits = round_bf16(value * scale));
    let (early, late) = if first == First::High { (4, 0) } else { (0, 4) };
    for (pair, byte) in dst.chunks_exact_mut(2).zip(packed) {
        pair[0] = numbers[(byte >> early & 0xF) as usize];
        pair[1] = numbers[(byte >> late & 0xF) as usize];
    }
}

kernel! {
    /// The bf16 of the number of `code` that each two bits of `packed` name, the lowest first, times `scale`.
    ///
    /// # Panics
    /// When `dst` has not four elements for each byte.
    pub fn dequantise_two_bits / dequantise_two_bits_with(
        dst: &mut [u16],
        packed: &[u8],
        code: &[f32; 4],
        scale: f32,
    ) = two_bits_body;
}

#[inline(always)]
fn two_bits_body(dst: &mut [u16], packed: &[u8], code: &[f32; 4], scale: f32) {
    assert_eq!(dst.len(), 4 * packed.len(), "lengths");
    let mut numbers = [0; 4];
    numbers.iter_mut().zip(code).for_each(|(bits, value)| *bits = round_bf16(value * scale));
    for (four, byte) in dst.chunks_exact_mut(4).zip(packed) {
        for (place, bits) in four.iter_mut().enumerate() {
            *bits = numbers[(byte >> (2 * place) & 3) as usize];
        }
    }
}

kernel! {
    /// The bf16 of every number of four bits less `zero`, times `scale`, fp16, rounded to fp16.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn dequantise_half / dequantise_half_with(dst: &mut [u16], numbers: &[u8], zero: u8, scale: u16)
        = half_body;
}

#[inline(always)]
fn half_body(dst: &mut [u16], numbers: &[u8], zero: u8, scale: u16) {
    assert_eq!(dst.len(), numbers.len(), "lengths");
    let (scale, zero) = (widen_f16(scale), f32::from(zero));
    let made: [u16; 16] =
        std::array::from_fn(|number| round_bf16(widen_f16(round_f16((number as f32 - zero) * scale))));
    dst.iter_mut().zip(numbers).for_each(|(bits, &number)| *bits = made[usize::from(number & 0xF)]);
}

kernel! {
    /// The bf16 of every number less its zero, times its scale, fp16, rounded to fp16.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn dequantise_halves / dequantise_halves_with(
        dst: &mut [u16],
        numbers: &[u8],
        zeros: &[u8],
        scales: &[u16],
    ) = halves_body;
}

#[inline(always)]
fn halves_body(dst: &mut [u16], numbers: &[u8], zeros: &[u8], scales: &[u16]) {
    let lengths = (dst.len(), dst.len(), dst.len());
    assert_eq!((numbers.len(), zeros.len(), scales.len()), lengths, "lengths");
    for ((bits, (&number, &zero)), &scale) in dst.iter_mut().zip(numbers.iter().zip(zeros)).zip(scales) {
        let value = (f32::from(number) - f32::from(zero)) * widen_f16(scale);
        *bits = round_bf16(widen_f16(round_f16(value)));
    }
}

/// Rows of a tile of MXFP4 at most.
pub const MXFP4_ROWS: usize = 64;
/// Elements of MXFP4 that share a power of two, and bytes that they are stored in.
pub const MXFP4_BLOCK: usize = 32;
const MXFP4_BYTES: usize = MXFP4_BLOCK / 2;
/// The numbers of four bits e2m1.
pub const E2M1: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// The power of two that a byte stands for in MXFP4: 255 is infinite, as transformers computes it.
#[inline(always)]
pub const fn power_of_two(exponent: u8) -> f32 {
    // 2^-127 has no exponent in fp32.
    f32::from_bits(if exponent == 0 { 1 << 22 } else { (exponent as u32) << 23 })
}

kernel! {
    /// The transpose of a tile of MXFP4, in bf16: a block of each row, whose powers of two are `exponents`.
    /// `packed` has them by rows, the lower four bits first; `dst` by columns.
    ///
    /// # Panics
    /// When there are more than [`MXFP4_ROWS`] rows, or the lengths are not those of so many.
    pub fn dequantise_mxfp4_tile / dequantise_mxfp4_tile_with(
        dst: &mut [u16],
        packed: &[u8],
        exponents: &[u8],
    ) = mxfp4_body;
}

#[inline(always)]
fn mxfp4_body(dst: &mut [u16], packed: &[u8], exponents: &[u8]) {
    let rows = exponents.len();
    assert!(rows <= MXFP4_ROWS && packed.len() == rows * MXFP4_BYTES, "a tile of {rows} rows");
    assert_eq!(dst.len(), rows * MXFP4_BLOCK, "lengths");
    // With these, no number of e2m1 leaves the exponents of bf16: they are added.
    let plain = exponents.iter().all(|exponent| (2..=252).contains(exponent));
    let mut shifts = [0u16; MXFP4_ROWS];
    shifts.iter_mut().zip(exponents).for_each(|(shift, &e)| *shift = u16::from(e).wrapping_sub(127) << 7);
    let mut bytes = [0u8; MXFP4_ROWS];
    let mut columns = [[0u16; MXFP4_ROWS]; 2];
    for pair in 0..MXFP4_BYTES {
        bytes.iter_mut().zip(packed.chunks_exact(MXFP4_BYTES)).for_each(|(byte, row)| *byte = row[pair]);
        for (column, low) in columns.iter_mut().zip([0, 4]) {
            if plain {
                for ((bits, byte), shift) in column.iter_mut().zip(&bytes).zip(&shifts) {
                    *bits = e2m1_shifted(u16::from(*byte >> low), *shift);
                }
            } else {
                for ((bits, byte), &exponent) in column.iter_mut().zip(&bytes).zip(exponents) {
                    *bits = round_bf16(E2M1[(byte >> low & 0xF) as usize] * power_of_two(exponent));
                }
            }
        }
        for (of_pair, column) in columns.iter().enumerate() {
            dst[(2 * pair + of_pair) * rows..][..rows].copy_from_slice(&column[..rows]);
        }
    }
}

/// The bf16 of the number that the lower four bits of `code` name, with `shift` added to its exponent.
#[inline(always)]
const fn e2m1_shifted(code: u16, shift: u16) -> u16 {
    let magnitude = code & 7;
    // From 1.0 on, codes count the numbers of one bit after the leading one; 0.5 is beside them, as is zero.
    let bits = if magnitude == 1 { 0x3F00 } else { 0x3F00 + (magnitude << 6) };
    let bits = if magnitude == 0 { 0 } else { bits.wrapping_add(shift) };
    bits | (code & 8) << 12
}

kernel! {
    /// The bf16 of the number of `code` that each byte of `codes` names, times `scale`.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn dequantise_bytes / dequantise_bytes_with(
        dst: &mut [u16],
        codes: &[u8],
        code: &[f32; 256],
        scale: f32,
    ) = bytes_body;
}

#[inline(always)]
fn bytes_body(dst: &mut [u16], codes: &[u8], code: &[f32; 256], scale: f32) {
    assert_eq!(dst.len(), codes.len(), "lengths");
    let mut numbers = [0; 256];
    numbers.iter_mut().zip(code).for_each(|(bits, value)| *bits = round_bf16(value * scale));
    dst.iter_mut().zip(codes).for_each(|(bits, &byte)| *bits = numbers[usize::from(byte)]);
}

#[cfg(test)]
mod tests {
    use super::super::Isa;
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
    fn products_are_rounded_once_on_every_isa() {
        let codes: Vec<u8> = (0..=u8::MAX).cycle().take(1021).collect();
        for scale in [1.0, 0.000_731, 3.3e-38, 1.7e36, -0.3] {
            let expected: Vec<u16> = codes.iter().map(|&code| round_bf16(widen_e4m3(code) * scale)).collect();
            for isa in Isa::available() {
                let mut bits = vec![7; codes.len()];
                dequantise_e4m3_with(isa, &mut bits, &codes, scale);
                assert_eq!(bits, expected, "{isa:?} {scale}");
            }
        }
    }

    #[test]
    fn four_bits_of_either_order_are_numbers_of_the_code_on_every_isa() {
        let code: [f32; 16] = std::array::from_fn(|index| (index as f32 - 7.3) / 8.1);
        let packed: Vec<u8> = (0..=u8::MAX).chain(3..40).collect();
        let scale = 0.0137;
        let high: Vec<u16> = packed
            .iter()
            .flat_map(|byte| [byte >> 4, byte & 0xF])
            .map(|index| round_bf16(code[index as usize] * scale))
            .collect();
        let low: Vec<u16> = high.chunks_exact(2).flat_map(|pair| [pair[1], pair[0]]).collect();
        for (first, expected) in [(First::High, &high), (First::Low, &low)] {
            for isa in Isa::available() {
                let mut bits = vec![7; expected.len()];
                dequantise_four_bits_with(isa, &mut bits, &packed, first, &code, scale);
                assert_eq!(&bits, expected, "{isa:?} {first:?}");
            }
        }
    }

    #[test]
    fn whole_numbers_are_multiplied_twice_on_every_isa() {
        let numbers: Vec<u8> = (0..=u8::MAX).chain(3..40).collect();
        for (scale, step) in [(0.0137, 1.0 / 127.0), (3.1, 1.0), (3.1e-39, 0.3)] {
            let value = |byte: &u8| round_bf16(f32::from(*byte as i8) * scale * step);
            let expected: Vec<u16> = numbers.iter().map(value).collect();
            for isa in Isa::available() {
                let mut bits = vec![7; expected.len()];
                dequantise_int8_with(isa, &mut bits, &numbers, scale, step);
                assert_eq!(bits, expected, "{isa:?} {scale}");
            }
        }
    }

    #[test]
    fn numbers_with_scales_in_fp16_are_rounded_twice_on_every_isa() {
        let numbers: Vec<u8> = (0..16).cycle().take(77).collect();
        for (zero, scale) in [(7, 0x2123), (0, 0x0003), (15, 0x7BFF), (1, 0xB123)] {
            let value = |number: u8| (f32::from(number) - f32::from(zero)) * widen_f16(scale);
            let expected: Vec<u16> =
                numbers.iter().map(|&number| round_bf16(widen_f16(round_f16(value(number))))).collect();
            for isa in Isa::available() {
                let mut bits = vec![7; expected.len()];
                dequantise_half_with(isa, &mut bits, &numbers, zero, scale);
                assert_eq!(bits, expected, "{isa:?} {zero} {scale:#x}");
            }
        }
    }

    #[test]
    fn numbers_with_scales_of_their_own_are_rounded_twice_on_every_isa() {
        let numbers: Vec<u8> = (0..=u8::MAX).chain(3..40).collect();
        let zeros: Vec<u8> = (0..numbers.len()).map(|at| (at * 89 + 3) as u8).collect();
        let scales: Vec<u16> = (0..numbers.len()).map(|at| 0x0003 + (at * 211 % 0x4000) as u16).collect();
        let value = |at: usize| (f32::from(numbers[at]) - f32::from(zeros[at])) * widen_f16(scales[at]);
        let expected: Vec<u16> =
            (0..numbers.len()).map(|at| round_bf16(widen_f16(round_f16(value(at))))).collect();
        for isa in Isa::available() {
            let mut bits = vec![7; expected.len()];
            dequantise_halves_with(isa, &mut bits, &numbers, &zeros, &scales);
            assert_eq!(bits, expected, "{isa:?}");
        }
    }

    #[test]
    fn whole_numbers_have_a_zero_on_every_isa() {
        let numbers: Vec<u8> = (0..=u8::MAX).chain(3..40).collect();
        for (flipped, zero, scale) in [(0, 128.0, 0.0137), (0x80, 131.0, 3.1), (0, 255.0, 3.1e-39)] {
            // With the highest bit inverted, a signed number is an unsigned one more by 128.
            let number = |byte: u8| {
                if flipped == 0 { f32::from(byte) } else { f32::from(byte as i8) + 128.0 }
            };
            let expected: Vec<u16> =
                numbers.iter().map(|&byte| round_bf16((number(byte) - zero) * scale)).collect();
            for isa in Isa::available() {
                let mut bits = vec![7; expected.len()];
                dequantise_whole_with(isa, &mut bits, &numbers, flipped, zero, scale);
                assert_eq!(bits, expected, "{isa:?} {flipped} {zero}");
            }
        }
    }

    #[test]
    fn two_bits_are_numbers_of_the_code_on_every_isa() {
        let (code, scale) = ([-2.0, -1.0, 0.37, 1.0], 0.0137);
        let packed: Vec<u8> = (0..=u8::MAX).chain(3..40).collect();
        let expected: Vec<u16> = packed
            .iter()
            .flat_map(|byte| [byte & 3, byte >> 2 & 3, byte >> 4 & 3, byte >> 6])
            .map(|index| round_bf16(code[usize::from(index)] * scale))
            .collect();
        for isa in Isa::available() {
            let mut bits = vec![7; expected.len()];
            dequantise_two_bits_with(isa, &mut bits, &packed, &code, scale);
            assert_eq!(bits, expected, "{isa:?}");
        }
    }

    #[test]
    fn every_power_of_two_is_what_its_byte_says() {
        for exponent in 0..=u8::MAX {
            assert_eq!(power_of_two(exponent), 2f64.powi(i32::from(exponent) - 127) as f32, "{exponent}");
        }
    }

    #[test]
    fn every_number_of_mxfp4_has_every_power_on_every_isa() {
        let per_tile = |rows: usize, begin: usize| {
            let exponents: Vec<u8> = (begin..begin + rows).map(|at| at as u8).collect();
            let packed: Vec<u8> = (0..rows * 16).map(|at| (at * 7 + at / 16) as u8).collect();
            (exponents, packed)
        };
        // Tiles with all powers, also at both ends, where numbers are rounded; and with fewer rows.
        for (rows, begin) in
            (0..256).step_by(64).map(|begin| (64, begin)).chain([(1, 127), (37, 100), (0, 0)])
        {
            let (exponents, packed) = per_tile(rows, begin);
            let mut expected = vec![0; rows * 32];
            for row in 0..rows {
                for column in 0..32 {
                    let code = packed[row * 16 + column / 2] >> (column % 2 * 4) & 0xF;
                    expected[column * rows + row] =
                        round_bf16(E2M1[usize::from(code)] * power_of_two(exponents[row]));
                }
            }
            for isa in Isa::available() {
                let mut bits = vec![7; expected.len()];
                dequantise_mxfp4_tile_with(isa, &mut bits, &packed, &exponents);
                assert_eq!(bits, expected, "{isa:?} {rows} rows from {begin}");
            }
        }
    }

    #[test]
    fn every_byte_names_its_number_on_every_isa() {
        let code: [f32; 256] = std::array::from_fn(|index| (index as f32 - 127.3) / 129.1);
        let codes: Vec<u8> = (0..=u8::MAX).chain(3..40).collect();
        for scale in [0.0137, 0.0, 3.1e-39] {
            let expected: Vec<u16> =
                codes.iter().map(|&byte| round_bf16(code[usize::from(byte)] * scale)).collect();
            for isa in Isa::available() {
                let mut bits = vec![7; expected.len()];
                dequantise_bytes_with(isa, &mut bits, &codes, &code, scale);
                assert_eq!(bits, expected, "{isa:?} {scale}");
            }
        }
    }
}
