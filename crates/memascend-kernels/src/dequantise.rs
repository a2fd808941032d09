//! Quantised weights to bf16, with the bits of the libraries that define their forms.

use super::bf16::round_bf16;
use super::dispatch::kernel;

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
    /// The bf16 of the number of `code` that each four bits of `packed` name, the higher ones first, times `scale`.
    ///
    /// # Panics
    /// When `dst` has not two elements for each byte.
    pub fn dequantise_four_bits / dequantise_four_bits_with(
        dst: &mut [u16],
        packed: &[u8],
        code: &[f32; 16],
        scale: f32,
    ) = four_bits_body;
}

#[inline(always)]
fn four_bits_body(dst: &mut [u16], packed: &[u8], code: &[f32; 16], scale: f32) {
    assert_eq!(dst.len(), 2 * packed.len(), "lengths");
    // Each number of the code is multiplied and rounded once, not once for each element.
    let mut numbers = [0; 16];
    numbers.iter_mut().zip(code).for_each(|(bits, value)| *bits = round_bf16(value * scale));
    for (pair, byte) in dst.chunks_exact_mut(2).zip(packed) {
        pair[0] = numbers[(byte >> 4) as usize];
        pair[1] = numbers[(byte & 0xF) as usize];
    }
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
    fn the_higher_four_bits_come_first_on_every_isa() {
        let code: [f32; 16] = std::array::from_fn(|index| (index as f32 - 7.3) / 8.1);
        let packed: Vec<u8> = (0..=u8::MAX).chain(3..40).collect();
        let scale = 0.0137;
        let expected: Vec<u16> = packed
            .iter()
            .flat_map(|byte| [byte >> 4, byte & 0xF])
            .map(|index| round_bf16(code[index as usize] * scale))
            .collect();
        for isa in Isa::available() {
            let mut bits = vec![7; expected.len()];
            dequantise_four_bits_with(isa, &mut bits, &packed, &code, scale);
            assert_eq!(bits, expected, "{isa:?}");
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
