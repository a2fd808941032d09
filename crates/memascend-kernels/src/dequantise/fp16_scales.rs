//! AWQ and GPTQ: numbers in words of 32 bits. Each column has a zero and a scale in fp16.

use super::super::bf16::round_bf16;
use super::super::dispatch::{half_kernel, kernel};
use super::super::fp16::{round_f16, widen_f16};

half_kernel! {
    /// The bf16 of every number less the zero of its column, times the column's scale, fp16, rounded to fp16. The
    /// numbers are rows of as many columns as there are zeros.
    ///
    /// # Panics
    /// When the lengths differ, or there is no whole row.
    pub fn dequantise_fp16 / dequantise_fp16_with(dst: &mut [u16], numbers: &[u8], zeros: &[u8], scales: &[u16])
        = x86::body, x86::body, body;
}

#[inline(always)]
fn check(dst: &[u16], numbers: &[u8], zeros: &[u8], scales: &[u16]) {
    assert_eq!((numbers.len(), scales.len()), (dst.len(), zeros.len()), "lengths");
    assert!(dst.len().is_multiple_of(zeros.len()), "rows of {}", zeros.len());
}

#[inline(always)]
fn body(dst: &mut [u16], numbers: &[u8], zeros: &[u8], scales: &[u16]) {
    check(dst, numbers, zeros, scales);
    columns_from(0, dst, numbers, zeros, scales);
}

/// Dequantises the columns from `first` on.
#[inline(always)]
fn columns_from(first: usize, dst: &mut [u16], numbers: &[u8], zeros: &[u8], scales: &[u16]) {
    let columns = zeros.len();
    let (zeros, scales) = (&zeros[first..], &scales[first..]);
    for (dst, numbers) in dst.chunks_exact_mut(columns).zip(numbers.chunks_exact(columns)) {
        let of_columns = numbers[first..].iter().zip(zeros).zip(scales);
        for (bits, ((&number, &zero), &scale)) in dst[first..].iter_mut().zip(of_columns) {
            let value = (f32::from(number) - f32::from(zero)) * widen_f16(scale);
            *bits = round_bf16(widen_f16(round_f16(value)));
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    //! Eight columns at a time, whose zeros and scales stay in registers.

    use std::arch::x86_64::*;

    use super::super::super::bf16::NAN_BITS;
    use super::{check, columns_from};

    /// `round_bf16` of eight numbers.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn round(values: __m256) -> __m128i {
        let nan = _mm256_castsi256_ps(_mm256_set1_epi32(NAN_BITS as i32));
        let values = _mm256_blendv_ps(values, nan, _mm256_cmp_ps::<_CMP_UNORD_Q>(values, values));
        let bits = _mm256_castps_si256(values);
        let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
        let sum = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
        let rounded = _mm256_srli_epi32::<16>(sum);
        _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256::<1>(rounded))
    }

    /// Eight whole numbers.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn numbers_of(bytes: [u8; 8]) -> __m256 {
        _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(i64::from_le_bytes(bytes))))
    }

    /// With AVX2 and F16C. NaNs may differ in fp16: in bf16 there is one.
    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    pub(super) fn body(dst: &mut [u16], numbers: &[u8], zeros: &[u8], scales: &[u16]) {
        check(dst, numbers, zeros, scales);
        let columns = zeros.len();
        let (of_zeros, rest) = zeros.as_chunks::<8>();
        for (eight, (zeros, scales)) in of_zeros.iter().zip(scales.as_chunks::<8>().0).enumerate() {
            // SAFETY: eight scales are read.
            let scales = unsafe { _mm256_cvtph_ps(_mm_loadu_si128(scales.as_ptr().cast())) };
            let zeros = numbers_of(*zeros);
            for (dst, numbers) in dst.chunks_exact_mut(columns).zip(numbers.chunks_exact(columns)) {
                let (dst, numbers) =
                    (&mut dst.as_chunks_mut::<8>().0[eight], &numbers.as_chunks::<8>().0[eight]);
                let values = _mm256_mul_ps(_mm256_sub_ps(numbers_of(*numbers), zeros), scales);
                let halves = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(values);
                // SAFETY: eight elements are written.
                unsafe { _mm_storeu_si128(dst.as_mut_ptr().cast(), round(_mm256_cvtph_ps(halves))) };
            }
        }
        columns_from(columns - rest.len(), dst, numbers, zeros, scales);
    }
}

kernel! {
    /// Unpacks AWQ's words, which have eight columns of a row each, in their order. `words` begins with the first
    /// row's first word, and has `stride` bytes between rows. `numbers` are rows of `columns`.
    ///
    /// # Panics
    /// When there are too few words, or columns are no whole words.
    pub fn unpack_awq / unpack_awq_with(numbers: &mut [u8], columns: usize, words: &[u8], stride: usize) = awq_body;
}

#[inline(always)]
fn awq_body(numbers: &mut [u8], columns: usize, words: &[u8], stride: usize) {
    assert!(columns.is_multiple_of(8) && numbers.len().is_multiple_of(columns), "rows of {columns}");
    for (row, numbers) in numbers.chunks_exact_mut(columns).enumerate() {
        let words = words[row * stride..][..columns / 2].as_chunks::<4>().0;
        for (eight, word) in numbers.as_chunks_mut::<8>().0.iter_mut().zip(words) {
            let word = u64::from(u32::from_le_bytes(*word));
            // The even columns are in the lower half, in order, and the odd ones in the higher half.
            *eight = (spread(word & 0xFFFF) | spread(word >> 16) << 8).to_le_bytes();
        }
    }
}

/// Four numbers of four bits, 16 bits apart.
#[inline(always)]
const fn spread(half: u64) -> u64 {
    let bytes = (half | half << 24) & 0x0000_00FF_0000_00FF;
    (bytes | bytes << 12) & 0x000F_000F_000F_000F
}

kernel! {
    /// Unpacks GPTQ's words, which have some rows of a column each, the first one lowest. `words` begins with the
    /// first rows' first word, and has `stride` bytes between rows of words. `numbers` of `bits`, 2, 4 or 8, are rows
    /// of `columns`.
    ///
    /// # Panics
    /// When there are too few words, or rows are no whole words.
    pub fn unpack_gptq / unpack_gptq_with(
        numbers: &mut [u8],
        columns: usize,
        bits: usize,
        words: &[u8],
        stride: usize,
    ) = gptq_body;
}

#[inline(always)]
fn gptq_body(numbers: &mut [u8], columns: usize, bits: usize, words: &[u8], stride: usize) {
    match bits {
        2 => gptq_body_of::<2>(numbers, columns, words, stride),
        4 => gptq_body_of::<4>(numbers, columns, words, stride),
        _ => gptq_body_of::<8>(numbers, columns, words, stride),
    }
}

#[inline(always)]
fn gptq_body_of<const BITS: usize>(numbers: &mut [u8], columns: usize, words: &[u8], stride: usize) {
    let of_words = 32 / BITS * columns;
    assert!(numbers.len().is_multiple_of(of_words), "rows of {columns} in words of {BITS} bits");
    for (row, numbers) in numbers.chunks_exact_mut(of_words).enumerate() {
        let words = words[row * stride..][..4 * columns].as_chunks::<4>().0;
        for (place, numbers) in numbers.chunks_exact_mut(columns).enumerate() {
            for (number, word) in numbers.iter_mut().zip(words) {
                *number = (u32::from_le_bytes(*word) >> (BITS * place)) as u8 & (0xFF >> (8 - BITS)) as u8;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::super::Isa;
    use super::*;

    proptest! {
        #[test]
        fn every_isa_rounds_each_element_twice(
            of_columns in prop::collection::vec((any::<u8>(), any::<u16>()), 1..150),
            rows in 0usize..5,
            numbers in prop::collection::vec(any::<u8>(), 600),
        ) {
            let (zeros, scales): (Vec<u8>, Vec<u16>) = of_columns.into_iter().unzip();
            let columns = zeros.len();
            let numbers = &numbers[..rows.min(600 / columns) * columns];
            let expected: Vec<u16> = numbers.iter().enumerate().map(|(at, &number)| {
                let value = (f32::from(number) - f32::from(zeros[at % columns])) * widen_f16(scales[at % columns]);
                round_bf16(widen_f16(round_f16(value)))
            }).collect();
            for isa in Isa::available() {
                let mut made = vec![7; expected.len()];
                dequantise_fp16_with(isa, &mut made, numbers, &zeros, &scales);
                prop_assert_eq!(&made, &expected, "{:?}", isa);
            }
        }

        #[test]
        fn every_isa_unpacks_each_number_by_itself(
            words in prop::collection::vec(any::<u8>(), 1000),
            eights in 1usize..9,
            rows in 0usize..4,
            beside in 0usize..40,
        ) {
            let (columns, begin) = (8 * eights, beside % 5);
            let words = &words[begin..];
            let stride = columns / 2 + beside;
            let awq = [0, 4, 1, 5, 2, 6, 3, 7];
            let expected: Vec<u8> = (0..rows * columns).map(|at| {
                let (row, column) = (at / columns, at % columns);
                let bit = 4 * awq[column % 8];
                words[row * stride + column / 8 * 4 + bit / 8] >> (bit % 8) & 0xF
            }).collect();
            for isa in Isa::available() {
                let mut made = vec![7; expected.len()];
                unpack_awq_with(isa, &mut made, columns, words, stride);
                prop_assert_eq!(&made, &expected, "{:?}", isa);
            }
            let columns = eights;
            let stride = 4 * columns + beside;
            for bits in [2, 4, 8] {
                let per_word = 32 / bits;
                let expected: Vec<u8> = (0..rows * per_word * columns).map(|at| {
                    let (row, column) = (at / columns, at % columns);
                    let bit = row % per_word * bits;
                    let byte = words[row / per_word * stride + 4 * column + bit / 8];
                    byte >> (bit % 8) & (0xFF >> (8 - bits)) as u8
                }).collect();
                for isa in Isa::available() {
                    let mut made = vec![7; expected.len()];
                    unpack_gptq_with(isa, &mut made, columns, bits, words, stride);
                    prop_assert_eq!(&made, &expected, "{:?}, {} bits", isa, bits);
                }
            }
        }
    }
}
