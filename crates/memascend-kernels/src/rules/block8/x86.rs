//! The same codes and values with AVX-512, whose permutations look up what other instruction sets
//! compute or gather.

use std::arch::x86_64::*;

use super::{BASE, BLOCK, Block, DECADES, END, Map, SLOPES};

/// Numbers below this have the code of zero, or of the least second moment.
const LEAST: f32 = f32::from_bits((127 - 30) << 23);

/// What is looked up.
pub(super) struct Tables {
    /// Bytes of the map's values: the lowest of each, and so on.
    bytes: [[[u8; 64]; 4]; 4],
    /// By the lower bits of a number's exponent: the one boundary between decades that lies there,
    /// or infinity.
    boundaries: [[f32; 16]; 2],
    /// As many decades begin below that.
    decades: [[u32; 16]; 2],
    /// By decades that begin below a number, see [`Map`].
    slopes: [f32; 16],
    pieces: [f32; 16],
}

impl Tables {
    pub(super) const fn new(
        values: &[f32; 256],
        below: &[f32; DECADES],
        pieces: &[f32; DECADES],
        none: f32,
    ) -> Self {
        let mut tables = Tables {
            bytes: [[[0; 64]; 4]; 4],
            boundaries: [[f32::INFINITY; 16]; 2],
            decades: [[0; 16]; 2],
            slopes: [0.0; 16],
            pieces: [none; 16],
        };
        let mut code = 0;
        while code < 256 {
            let value = values[code].to_bits().to_le_bytes();
            let mut i = 0;
            while i < 4 {
                tables.bytes[i][code / 64][code % 64] = value[i];
                i += 1;
            }
            code += 1;
        }
        let mut exponent = 127 - 30;
        let mut decade = 0;
        while exponent <= 127 {
            let at = exponent as usize % 32;
            tables.decades[at / 16][at % 16] = decade as u32;
            if decade < DECADES && below[decade].to_bits() >> 23 == exponent {
                tables.boundaries[at / 16][at % 16] = below[decade];
                decade += 1;
                assert!(
                    decade == DECADES || below[decade].to_bits() >> 23 > exponent,
                    "two boundaries beside each other"
                );
            }
            exponent += 1;
        }
        assert!(decade == DECADES, "a boundary was not seen");
        let mut decade = 0;
        while decade < DECADES {
            tables.slopes[decade + 1] = SLOPES[decade];
            tables.pieces[decade + 1] = pieces[decade];
            decade += 1;
        }
        tables
    }
}

/// [`Map::decode`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi")]
pub(super) fn decode(map: &Map, codes: &[u8; BLOCK], scale: f32, block: &mut Block) {
    let bytes = &map.tables.bytes;
    // The four bytes of a value come together by unpacking within quarters of a register: these are
    // dealt out first.
    let deal = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    let scale = _mm512_set1_ps(scale);
    for (codes, values) in codes.as_chunks::<64>().0.iter().zip(block.as_chunks_mut::<64>().0) {
        // SAFETY: 64 codes are read.
        let codes = _mm512_permutexvar_epi32(deal, unsafe { _mm512_loadu_si512(codes.as_ptr().cast()) });
        let upper = _mm512_movepi8_mask(codes);
        let mut looked_up = [_mm512_setzero_si512(); 4];
        for i in 0..4 {
            // SAFETY: each part of the table has 64 bytes.
            let [a, b, c, d] =
                [0, 1, 2, 3].map(|part: usize| unsafe { _mm512_loadu_si512(bytes[i][part].as_ptr().cast()) });
            looked_up[i] = _mm512_mask_blend_epi8(
                upper,
                _mm512_permutex2var_epi8(a, codes, b),
                _mm512_permutex2var_epi8(c, codes, d),
            );
        }
        let [b0, b1, b2, b3] = looked_up;
        let (low, high) = (_mm512_unpacklo_epi8(b0, b1), _mm512_unpackhi_epi8(b0, b1));
        let (low_top, high_top) = (_mm512_unpacklo_epi8(b2, b3), _mm512_unpackhi_epi8(b2, b3));
        let quarters = [
            _mm512_unpacklo_epi16(low, low_top),
            _mm512_unpackhi_epi16(low, low_top),
            _mm512_unpacklo_epi16(high, high_top),
            _mm512_unpackhi_epi16(high, high_top),
        ];
        for (quarter, values) in quarters.into_iter().zip(values.as_chunks_mut::<16>().0) {
            let value = _mm512_mul_ps(_mm512_castsi512_ps(quarter), scale);
            // SAFETY: 16 values are written.
            unsafe { _mm512_storeu_ps(values.as_mut_ptr(), _mm512_add_ps(value, _mm512_setzero_ps())) };
        }
    }
}

/// The codes of a block's numbers times `raise` (1 unless `RAISED`) times `reciprocal`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) fn encode<const SIGNED: bool, const RAISED: bool>(
    map: &Map,
    block: &Block,
    raise: f32,
    reciprocal: f32,
    codes: &mut [u8; BLOCK],
) {
    let tables = &map.tables;
    // SAFETY: each array has 16 elements of 4 bytes.
    let [boundaries, more_boundaries, slopes, pieces] = unsafe {
        [&tables.boundaries[0], &tables.boundaries[1], &tables.slopes, &tables.pieces]
            .map(|table| _mm512_loadu_ps(table.as_ptr()))
    };
    // SAFETY: as above.
    let [decades, more_decades] = unsafe {
        [&tables.decades[0], &tables.decades[1]].map(|table| _mm512_loadu_si512(table.as_ptr().cast()))
    };
    let (raise, reciprocal) = (_mm512_set1_ps(raise), _mm512_set1_ps(reciprocal));
    let sign = _mm512_set1_epi32(i32::MIN);
    let one = _mm512_set1_epi32(1);
    for (values, codes) in block.as_chunks::<16>().0.iter().zip(codes.as_chunks_mut::<16>().0) {
        // SAFETY: 16 values are read.
        let value = unsafe { _mm512_loadu_ps(values.as_ptr()) };
        let raised = if RAISED { _mm512_mul_ps(value, raise) } else { value };
        let number = _mm512_castps_si512(_mm512_mul_ps(raised, reciprocal));
        let magnitude = _mm512_castsi512_ps(_mm512_andnot_si512(sign, number));
        let exponent =
            _mm512_srli_epi32::<23>(_mm512_castps_si512(_mm512_max_ps(magnitude, _mm512_set1_ps(LEAST))));
        let boundary = _mm512_permutex2var_ps(boundaries, exponent, more_boundaries);
        let decade = _mm512_permutex2var_epi32(decades, exponent, more_decades);
        let beyond = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(magnitude, boundary);
        let decade = _mm512_mask_add_epi32(decade, beyond, decade, one);
        let (slope, pieces) = (_mm512_permutexvar_ps(decade, slopes), _mm512_permutexvar_ps(decade, pieces));
        let place = _mm512_fmadd_ps(magnitude, slope, _mm512_set1_ps(BASE));
        let place = _mm512_mul_ps(_mm512_min_ps(place, _mm512_set1_ps(END)), pieces);
        let code = if SIGNED {
            let place = _mm512_or_si512(_mm512_castps_si512(place), _mm512_and_si512(number, sign));
            let rank = _mm512_cvttps_epi32(_mm512_castsi512_ps(place));
            _mm512_max_epi32(_mm512_add_epi32(rank, _mm512_set1_epi32(127)), _mm512_setzero_si512())
        } else {
            let rank = _mm512_sub_epi32(_mm512_cvttps_epi32(place), one);
            let above_zero = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(value, _mm512_setzero_ps());
            _mm512_mask_max_epi32(rank, above_zero, rank, one)
        };
        // SAFETY: 16 codes are written.
        unsafe { _mm_storeu_si128(codes.as_mut_ptr().cast(), _mm512_cvtepi32_epi8(code)) };
    }
}
