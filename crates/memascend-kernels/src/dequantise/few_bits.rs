//! Numbers of four and of two bits. The numbers of a block's code are multiplied and rounded once, and then looked up:
//! x86-64 from AVX2 on, and arm64, look up a register of them at a time.

use super::super::bf16::round_bf16;
use super::super::dispatch::half_kernel;
use super::Blocks;

/// Which four bits of a byte are the first number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum First {
    /// The higher ones, as in bitsandbytes.
    High,
    /// The lower ones, as in compressed-tensors and MXFP4.
    Low,
}

/// The numbers of four bits e2m1.
pub const E2M1: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

half_kernel! {
    /// The bf16 of the number of `code` that each four bits of `packed` name, less the zero of its block, times the
    /// scale. Without `zeros` they are 0.
    ///
    /// # Panics
    /// When `dst` has not two elements for each byte, or a block no whole bytes.
    pub fn dequantise_four_bits / dequantise_four_bits_with(
        dst: &mut [u16],
        packed: &[u8],
        first: First,
        code: &[f32; 16],
        blocks: Blocks<'_>,
        zeros: Option<&[f32]>,
    ) = x86::four_bits, x86::four_bits, plain::four_bits;
}

half_kernel! {
    /// The bf16 of each two bits of `packed`, the lowest first, less the zero of its block, times the scale.
    ///
    /// # Panics
    /// When `dst` has not four elements for each byte, or a block no whole bytes.
    pub fn dequantise_two_bits / dequantise_two_bits_with(
        dst: &mut [u16],
        packed: &[u8],
        blocks: Blocks<'_>,
        zeros: &[f32],
    ) = x86::two_bits, x86::two_bits, plain::two_bits;
}

/// Calls `look_up` for each block, with the bf16 of the numbers that `N` codes stand for in it.
#[inline(always)]
fn by_blocks<const N: usize>(
    dst: &mut [u16],
    packed: &[u8],
    per_byte: usize,
    code: &[f32; N],
    blocks: Blocks<'_>,
    zeros: Option<&[f32]>,
    look_up: impl Fn(&mut [u16], &[u8], &[u16; N]),
) {
    let Blocks { elements, scales } = blocks;
    assert_eq!(dst.len(), per_byte * packed.len(), "lengths");
    assert!(elements.is_multiple_of(per_byte), "blocks of {elements} elements");
    assert!(zeros.is_none_or(|zeros| zeros.len() == scales.len()), "a zero for each block");
    blocks.check(dst.len());
    let of_blocks = dst.chunks_mut(elements).zip(packed.chunks(elements / per_byte));
    for (number, ((dst, packed), &scale)) in of_blocks.zip(scales).enumerate() {
        let zero = zeros.map_or(0.0, |zeros| zeros[number]);
        // A difference from 0.0 is the number itself: -0.0 too.
        let mut numbers = [0; N];
        for (bits, value) in numbers.iter_mut().zip(code) {
            *bits = round_bf16((value - zero) * scale);
        }
        look_up(dst, packed, &numbers);
    }
}

/// The numbers of two bits.
const TWO_BITS: [f32; 4] = [0.0, 1.0, 2.0, 3.0];

mod plain {
    //! One element after the other, or, on arm64, a register of them.

    use super::{Blocks, First, TWO_BITS, by_blocks};

    #[inline(always)]
    pub(super) fn four_bits(
        dst: &mut [u16],
        packed: &[u8],
        first: First,
        code: &[f32; 16],
        blocks: Blocks<'_>,
        zeros: Option<&[f32]>,
    ) {
        by_blocks(dst, packed, 2, code, blocks, zeros, |dst, packed, numbers| {
            #[cfg(target_arch = "aarch64")]
            let (dst, packed) = super::arm::four_bits(dst, packed, first, numbers);
            four_bits_of_block(dst, packed, first, numbers);
        });
    }

    #[inline(always)]
    pub(super) fn four_bits_of_block(dst: &mut [u16], packed: &[u8], first: First, numbers: &[u16; 16]) {
        let (early, late) = if first == First::High { (4, 0) } else { (0, 4) };
        for (pair, byte) in dst.as_chunks_mut::<2>().0.iter_mut().zip(packed) {
            *pair = [numbers[(byte >> early & 0xF) as usize], numbers[(byte >> late & 0xF) as usize]];
        }
    }

    #[inline(always)]
    pub(super) fn two_bits(dst: &mut [u16], packed: &[u8], blocks: Blocks<'_>, zeros: &[f32]) {
        by_blocks(dst, packed, 4, &TWO_BITS, blocks, Some(zeros), two_bits_of_block);
    }

    #[inline(always)]
    pub(super) fn two_bits_of_block(dst: &mut [u16], packed: &[u8], numbers: &[u16; 4]) {
        for (four, byte) in dst.as_chunks_mut::<4>().0.iter_mut().zip(packed) {
            for (place, bits) in four.iter_mut().enumerate() {
                *bits = numbers[(byte >> (2 * place) & 3) as usize];
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    //! A shuffle of bytes looks up 16 bytes in 16: once for the lower bytes of bf16, and once for the higher ones.

    use std::arch::x86_64::*;

    use super::{Blocks, First, TWO_BITS, by_blocks, plain};

    /// The lower and the higher bytes of 16 numbers, twice.
    #[derive(Clone, Copy)]
    struct Table(__m256i, __m256i);

    impl Table {
        #[inline]
        #[target_feature(enable = "avx2")]
        fn new(numbers: &[u16; 16]) -> Self {
            // SAFETY: 16 numbers are read.
            let numbers = unsafe { _mm256_loadu_si256(numbers.as_ptr().cast()) };
            let low = _mm256_and_si256(numbers, _mm256_set1_epi16(0xFF));
            let high = _mm256_srli_epi16::<8>(numbers);
            // In each half of the register the lower bytes of 8 numbers, then the higher ones of the same.
            let bytes = _mm256_packus_epi16(low, high);
            Self(
                _mm256_permute4x64_epi64::<0b10_00_10_00>(bytes),
                _mm256_permute4x64_epi64::<0b11_01_11_01>(bytes),
            )
        }

        /// Writes the numbers that 32 bytes name.
        #[inline]
        #[target_feature(enable = "avx2")]
        fn write(self, names: __m256i, dst: &mut [u16; 32]) {
            let (low, high) = (_mm256_shuffle_epi8(self.0, names), _mm256_shuffle_epi8(self.1, names));
            let (early, late) = (_mm256_unpacklo_epi8(low, high), _mm256_unpackhi_epi8(low, high));
            let [first, second] = [
                _mm256_permute2x128_si256::<0x20>(early, late),
                _mm256_permute2x128_si256::<0x31>(early, late),
            ];
            let to: *mut __m256i = dst.as_mut_ptr().cast();
            // SAFETY: 32 elements are written.
            unsafe {
                _mm256_storeu_si256(to, first);
                _mm256_storeu_si256(to.add(1), second);
            }
        }

        /// Writes the numbers that 16 bytes name.
        #[inline]
        #[target_feature(enable = "avx2")]
        fn write_half(self, names: __m128i, dst: &mut [u16; 16]) {
            let [low, high] = [self.0, self.1].map(|bytes| _mm256_castsi256_si128(bytes));
            let (low, high) = (_mm_shuffle_epi8(low, names), _mm_shuffle_epi8(high, names));
            let to: *mut __m128i = dst.as_mut_ptr().cast();
            // SAFETY: 16 elements are written.
            unsafe {
                _mm_storeu_si128(to, _mm_unpacklo_epi8(low, high));
                _mm_storeu_si128(to.add(1), _mm_unpackhi_epi8(low, high));
            }
        }
    }

    /// With AVX2.
    #[inline]
    #[target_feature(enable = "avx2")]
    pub(super) fn four_bits(
        dst: &mut [u16],
        packed: &[u8],
        first: First,
        code: &[f32; 16],
        blocks: Blocks<'_>,
        zeros: Option<&[f32]>,
    ) {
        by_blocks(dst, packed, 2, code, blocks, zeros, |dst, packed, numbers| {
            let table = Table::new(numbers);
            let (wholes, rest) = dst.as_chunks_mut::<32>();
            let (of_wholes, packed) = packed.as_chunks::<16>();
            for (dst, packed) in wholes.iter_mut().zip(of_wholes) {
                // SAFETY: 16 bytes are read.
                let bytes = unsafe { _mm_loadu_si128(packed.as_ptr().cast()) };
                let words = _mm256_cvtepu8_epi16(bytes);
                let names = match first {
                    First::Low => _mm256_or_si256(words, _mm256_slli_epi16::<4>(words)),
                    First::High => {
                        _mm256_or_si256(_mm256_srli_epi16::<4>(words), _mm256_slli_epi16::<8>(words))
                    }
                };
                table.write(_mm256_and_si256(names, _mm256_set1_epi8(0xF)), dst);
            }
            let (halves, rest) = rest.as_chunks_mut::<16>();
            let (of_halves, packed) = packed.as_chunks::<8>();
            for (dst, packed) in halves.iter_mut().zip(of_halves) {
                let words = _mm_cvtepu8_epi16(_mm_cvtsi64_si128(i64::from_le_bytes(*packed)));
                let names = match first {
                    First::Low => _mm_or_si128(words, _mm_slli_epi16::<4>(words)),
                    First::High => _mm_or_si128(_mm_srli_epi16::<4>(words), _mm_slli_epi16::<8>(words)),
                };
                table.write_half(_mm_and_si128(names, _mm_set1_epi8(0xF)), dst);
            }
            plain::four_bits_of_block(rest, packed, first, numbers);
        });
    }

    /// With AVX2.
    #[inline]
    #[target_feature(enable = "avx2")]
    pub(super) fn two_bits(dst: &mut [u16], packed: &[u8], blocks: Blocks<'_>, zeros: &[f32]) {
        by_blocks(dst, packed, 4, &TWO_BITS, blocks, Some(zeros), |dst, packed, numbers| {
            let mut repeated = [0; 16];
            repeated.as_chunks_mut::<4>().0.fill(*numbers);
            let table = Table::new(&repeated);
            let (wholes, rest) = dst.as_chunks_mut::<32>();
            let (of_wholes, packed) = packed.as_chunks::<8>();
            for (dst, packed) in wholes.iter_mut().zip(of_wholes) {
                let bytes = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(i64::from_le_bytes(*packed)));
                let early = _mm256_or_si256(bytes, _mm256_slli_epi32::<6>(bytes));
                let late = _mm256_or_si256(_mm256_slli_epi32::<12>(bytes), _mm256_slli_epi32::<18>(bytes));
                let names = _mm256_and_si256(_mm256_or_si256(early, late), _mm256_set1_epi8(3));
                table.write(names, dst);
            }
            plain::two_bits_of_block(rest, packed, numbers);
        });
    }
}

#[cfg(target_arch = "aarch64")]
mod arm {
    //! As on x86-64, with NEON's look-up of 16 bytes.

    use std::arch::aarch64::*;

    use super::First;

    /// Writes whole groups of 32 elements, and returns the rest.
    #[inline(always)]
    pub(super) fn four_bits<'a, 'b>(
        dst: &'a mut [u16],
        packed: &'b [u8],
        first: First,
        numbers: &[u16; 16],
    ) -> (&'a mut [u16], &'b [u8]) {
        let low: [u8; 16] = numbers.map(|bits| bits as u8);
        let high: [u8; 16] = numbers.map(|bits| (bits >> 8) as u8);
        let (wholes, rest) = dst.as_chunks_mut::<32>();
        let (of_wholes, packed) = packed.as_chunks::<16>();
        // SAFETY: NEON is on every arm64; 16 bytes are read at a time, and 32 elements written.
        unsafe {
            let (low, high) = (vld1q_u8(low.as_ptr()), vld1q_u8(high.as_ptr()));
            for (dst, packed) in wholes.iter_mut().zip(of_wholes) {
                let bytes = vld1q_u8(packed.as_ptr());
                let (lower, higher) = (vandq_u8(bytes, vdupq_n_u8(0xF)), vshrq_n_u8::<4>(bytes));
                let (early, late) = if first == First::Low { (lower, higher) } else { (higher, lower) };
                for (half, names) in [vzip1q_u8(early, late), vzip2q_u8(early, late)].into_iter().enumerate()
                {
                    // Bytes interleaved as they are stored: the lower one first.
                    let pair = uint8x16x2_t(vqtbl1q_u8(low, names), vqtbl1q_u8(high, names));
                    vst2q_u8(dst.as_mut_ptr().add(16 * half).cast(), pair);
                }
            }
        }
        (rest, packed)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::super::Isa;
    use super::super::super::testing::any_bit_pattern;
    use super::super::power_of_two;
    use super::*;

    proptest! {
        /// Blocks of any length at any place, and numbers, zeros and scales of any bits.
        #[test]
        fn every_isa_has_the_bits_of_each_element_by_itself(
            code in prop::array::uniform16(any_bit_pattern()),
            of_blocks in prop::collection::vec((any_bit_pattern(), -8.0f32..24.0), 1..9),
            block_bytes in 1usize..70,
            bytes in prop::collection::vec(any::<u8>(), 640),
            shorter in 0usize..70,
            begin in 0usize..9,
            with_zeros in any::<bool>(),
        ) {
            let code = code.map(f32::from_bits);
            let scales: Vec<f32> = of_blocks.iter().map(|(bits, _)| f32::from_bits(*bits)).collect();
            let zeros: Vec<f32> = of_blocks.iter().map(|(_, zero)| zero.round()).collect();
            let length = block_bytes * scales.len() - shorter % block_bytes;
            let packed = &bytes[begin..][..length];
            let zero = |block: usize| if with_zeros { zeros[block] } else { 0.0 };
            let four = Blocks { elements: 2 * block_bytes, scales: &scales };
            let two = Blocks { elements: 4 * block_bytes, scales: &scales };
            for first in [First::High, First::Low] {
                let nibbles = |byte: u8| if first == First::High { [byte >> 4, byte & 0xF] } else { [byte & 0xF, byte >> 4] };
                let expected: Vec<u16> = packed.iter().enumerate().flat_map(|(at, &byte)| {
                    let block = at / block_bytes;
                    nibbles(byte).map(|name| round_bf16((code[usize::from(name)] - zero(block)) * scales[block]))
                }).collect();
                for isa in Isa::available() {
                    let mut made = vec![7; begin + expected.len()];
                    let zeros = with_zeros.then_some(&zeros[..]);
                    dequantise_four_bits_with(isa, &mut made[begin..], packed, first, &code, four, zeros);
                    prop_assert_eq!(&made[begin..], &expected, "{:?} {:?}", isa, first);
                }
            }
            let expected: Vec<u16> = packed.iter().enumerate().flat_map(|(at, &byte)| {
                let block = at / block_bytes;
                [0, 2, 4, 6].map(|bit| round_bf16((f32::from(byte >> bit & 3) - zeros[block]) * scales[block]))
            }).collect();
            for isa in Isa::available() {
                let mut made = vec![7; begin + expected.len()];
                dequantise_two_bits_with(isa, &mut made[begin..], packed, two, &zeros);
                prop_assert_eq!(&made[begin..], &expected, "{:?}", isa);
            }
        }
    }

    /// Also at both ends, where numbers are rounded, and with the infinite one.
    #[test]
    fn every_number_of_mxfp4_has_every_power_on_every_isa() {
        let packed: Vec<u8> = (0..256 * 16).map(|at| (at * 7 + at / 16) as u8).collect();
        let powers: Vec<f32> = (0..=u8::MAX).map(power_of_two).collect();
        let value = |at: usize| E2M1[usize::from(packed[at / 2] >> (at % 2 * 4) & 0xF)] * powers[at / 32];
        let expected: Vec<u16> = (0..256 * 32).map(|at| round_bf16(value(at))).collect();
        for isa in Isa::available() {
            let mut made = vec![7; expected.len()];
            let blocks = Blocks { elements: 32, scales: &powers };
            dequantise_four_bits_with(isa, &mut made, &packed, First::Low, &E2M1, blocks, None);
            assert_eq!(made, expected, "{isa:?}");
        }
    }

    #[test]
    #[should_panic(expected = "a scale for each block")]
    fn a_block_without_a_scale_is_refused() {
        let blocks = Blocks { elements: 8, scales: &[1.0] };
        dequantise_four_bits(&mut [0; 10], &[0; 5], First::Low, &E2M1, blocks, None);
    }
}
