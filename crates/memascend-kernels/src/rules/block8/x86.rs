//! The same codes and values with AVX-512 and AVX2, whose permutations replace the comparisons and gathers of
//! other instruction sets.

use std::arch::x86_64::*;

use super::{BASE, BLOCK, Block, DECADES, END, Map, SLOPES};

/// Numbers below this have the code of zero, or of the least second moment.
const LEAST: f32 = f32::from_bits((127 - 30) << 23);

/// The lookup tables.
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
    narrow: NarrowTables,
}

/// A table for eight lanes, indexed by the negative of the number of boundaries below; a permutation takes
/// three bits of it.
struct NarrowTables {
    /// By comparisons with the fourth boundary, counted twice, and with the second or the sixth: the one
    /// between those.
    boundaries: [f32; 8],
    /// By all three, counted four times, twice and once: see [`Map`]. The eighth boundary is 1's.
    slopes: [f32; 8],
    pieces: [f32; 8],
}

impl NarrowTables {
    const fn new(below: &[f32; DECADES], pieces: &[f32; DECADES], none: f32) -> Self {
        let mut tables = NarrowTables { boundaries: [0.0; 8], slopes: [0.0; 8], pieces: [none; 8] };
        let mut count = 0;
        while count < 8 {
            let at = (8 - count) % 8;
            if count < 4 {
                tables.boundaries[at] = below[2 * count];
            }
            if count > 0 {
                tables.slopes[at] = SLOPES[count - 1];
                tables.pieces[at] = pieces[count - 1];
            }
            count += 1;
        }
        tables
    }
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
            narrow: NarrowTables::new(below, pieces, none),
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

/// [`Map::decode`]. Not inlined, as the functions below: a loop by itself keeps its constants in registers.
#[inline(never)]
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
#[inline(never)]
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
    let offset = _mm512_set1_epi32(if SIGNED { 127 } else { -1 });
    for (values, codes) in block.as_chunks::<64>().0.iter().zip(codes.as_chunks_mut::<64>().0) {
        let (mut ranks, mut bits) = ([_mm512_setzero_si512(); 4], [_mm512_setzero_si512(); 4]);
        for (i, values) in values.as_chunks::<16>().0.iter().enumerate() {
            // SAFETY: 16 values are read.
            let value = unsafe { _mm512_loadu_ps(values.as_ptr()) };
            bits[i] = _mm512_castps_si512(value);
            let raised = if RAISED { _mm512_mul_ps(value, raise) } else { value };
            let number = _mm512_castps_si512(_mm512_mul_ps(raised, reciprocal));
            let magnitude = _mm512_castsi512_ps(_mm512_andnot_si512(sign, number));
            let exponent =
                _mm512_srli_epi32::<23>(_mm512_castps_si512(_mm512_max_ps(magnitude, _mm512_set1_ps(LEAST))));
            let boundary = _mm512_permutex2var_ps(boundaries, exponent, more_boundaries);
            let decade = _mm512_permutex2var_epi32(decades, exponent, more_decades);
            let beyond = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(magnitude, boundary);
            let decade = _mm512_mask_add_epi32(decade, beyond, decade, one);
            let (slope, pieces) =
                (_mm512_permutexvar_ps(decade, slopes), _mm512_permutexvar_ps(decade, pieces));
            let place = _mm512_fmadd_ps(magnitude, slope, _mm512_set1_ps(BASE));
            let place = _mm512_castps_si512(_mm512_mul_ps(_mm512_min_ps(place, _mm512_set1_ps(END)), pieces));
            let place = if SIGNED { _mm512_or_si512(place, _mm512_and_si512(number, sign)) } else { place };
            ranks[i] = _mm512_add_epi32(_mm512_cvttps_epi32(_mm512_castsi512_ps(place)), offset);
        }
        // There is no -1: below zero is zero, as for all that is packed.
        let mut packed = pack(ranks);
        if !SIGNED {
            // Numbers above zero are so as integers too, and packed.
            packed = _mm512_max_epu8(packed, _mm512_min_epu8(pack(bits), _mm512_set1_epi8(1)));
        }
        // Packing works in quarters of a register.
        let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        let packed = _mm512_permutexvar_epi32(order, packed);
        // SAFETY: 64 codes are written.
        unsafe { _mm512_storeu_si512(codes.as_mut_ptr().cast(), packed) };
    }
}

/// The nearest bytes of 64 integers: by quarters of the first register, of the second, and so on.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn pack([a, b, c, d]: [__m512i; 4]) -> __m512i {
    _mm512_packus_epi16(_mm512_packs_epi32(a, b), _mm512_packs_epi32(c, d))
}

/// [`encode`] with AVX2.
#[inline(never)]
#[target_feature(enable = "avx2,fma")]
pub(super) fn encode_narrow<const SIGNED: bool, const RAISED: bool>(
    map: &Map,
    block: &Block,
    raise: f32,
    reciprocal: f32,
    codes: &mut [u8; BLOCK],
) {
    let tables = &map.tables.narrow;
    // SAFETY: each array has 8 elements of 4 bytes.
    let [boundaries, slopes, pieces] = unsafe {
        [&tables.boundaries, &tables.slopes, &tables.pieces].map(|table| _mm256_loadu_ps(table.as_ptr()))
    };
    let [second, fourth, sixth, eighth] =
        [map.below[1], map.below[3], map.below[5], map.below[7]].map(|below| _mm256_set1_ps(below));
    let (raise, reciprocal) = (_mm256_set1_ps(raise), _mm256_set1_ps(reciprocal));
    let (base, end) = (_mm256_set1_ps(BASE), _mm256_set1_ps(END));
    let sign = _mm256_set1_ps(-0.0);
    let offset = _mm256_set1_epi32(if SIGNED { 127 } else { -1 });
    for (values, codes) in block.as_chunks::<32>().0.iter().zip(codes.as_chunks_mut::<32>().0) {
        let (mut ranks, mut bits) = ([_mm256_setzero_si256(); 4], [_mm256_setzero_si256(); 4]);
        for (i, values) in values.as_chunks::<8>().0.iter().enumerate() {
            // SAFETY: 8 values are read.
            let value = unsafe { _mm256_loadu_ps(values.as_ptr()) };
            bits[i] = _mm256_castps_si256(value);
            let raised = if RAISED { _mm256_mul_ps(value, raise) } else { value };
            let number = _mm256_mul_ps(raised, reciprocal);
            let magnitude = _mm256_andnot_ps(sign, number);
            // Comparisons give -1 where they hold.
            let above_fourth = _mm256_cmp_ps::<_CMP_GT_OQ>(magnitude, fourth);
            let boundary = _mm256_blendv_ps(second, sixth, above_fourth);
            let above = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_GT_OQ>(magnitude, boundary));
            let above_fourth = _mm256_castps_si256(above_fourth);
            let count = _mm256_add_epi32(_mm256_add_epi32(above_fourth, above_fourth), above);
            let boundary = _mm256_permutevar8x32_ps(boundaries, count);
            let above = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_GT_OQ>(magnitude, boundary));
            let count = _mm256_add_epi32(_mm256_add_epi32(count, count), above);
            let slope = _mm256_permutevar8x32_ps(slopes, count);
            let pieces = _mm256_permutevar8x32_ps(pieces, count);
            let place = _mm256_mul_ps(_mm256_min_ps(_mm256_fmadd_ps(magnitude, slope, base), end), pieces);
            // Beyond the eighth boundary is the number behind the seventh decade's end. There is no
            // -1: a negative number has the decade's last.
            let (place, number) = match SIGNED {
                true => (_mm256_or_ps(place, _mm256_and_ps(number, sign)), number),
                false => (place, magnitude),
            };
            let above_eighth = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_GT_OQ>(number, eighth));
            let rank = _mm256_sub_epi32(_mm256_cvttps_epi32(place), above_eighth);
            ranks[i] = _mm256_add_epi32(rank, offset);
        }
        let mut packed = pack_narrow(ranks);
        if !SIGNED {
            // As in `encode`.
            packed = _mm256_max_epu8(packed, _mm256_min_epu8(pack_narrow(bits), _mm256_set1_epi8(1)));
        }
        // Packing works in halves of a register.
        let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        let packed = _mm256_permutevar8x32_epi32(packed, order);
        // SAFETY: 32 codes are written.
        unsafe { _mm256_storeu_si256(codes.as_mut_ptr().cast(), packed) };
    }
}

/// [`pack`] of 32 integers, in halves of a register.
#[inline]
#[target_feature(enable = "avx2")]
fn pack_narrow([a, b, c, d]: [__m256i; 4]) -> __m256i {
    _mm256_packus_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d))
}
