//! 8-bit moments: blocks of 256 elements, each a code of bitsandbytes' dynamic map times the block's
//! largest magnitude (Dettmers et al. 2022, arXiv 2110.02861).
//!
//! The map has seven decades, 1e-6 to 1: decade `i` has `2^i` evenly spaced magnitudes, twice as many where no sign is
//! needed, and 0 and 1 complete the 256. Codes ascend with their values. An element goes to the nearest, a tie to
//! the one nearer to zero, with one exception: a second moment above zero never becomes zero, because the step
//! is divided by it.
//!
//! A map's magnitudes are at least 2^-7 of their power of two apart, so among all numbers with the same
//! upper 16 bits there is at most one boundary between codes. One table, by those bits, therefore has all that is to
//! be known: the codes below, and the lower 16 bits of the boundary.

use super::super::bf16::NAN_BITS;
use super::{BLOCK, Block};

/// Elements of a record: a chunk of an update is a multiple of this.
pub(super) const RECORD: usize = super::super::GRADIENT_BLOCK;
/// The scales of a record, one fp32 for each of its blocks, lie in front of its codes in a page of their own.
pub(super) const SCALES_BYTES: usize = 4096;

/// One of the two maps.
pub(super) struct Map {
    values: [f32; 256],
    /// By the upper bits of a magnitude: in the low byte how many magnitudes of the map lie below the boundary, in the
    /// upper half the last number below it, by its lower bits.
    cells: [u32; 4096],
    /// Code of zero.
    zero: u8,
}

/// The map of numbers of either sign.
pub(super) static SIGNED: Map = Map::new(true);
/// The map of second moments.
pub(super) static UNSIGNED: Map = Map::new(false);

const TWO_TO_64: f32 = (1u128 << 64) as f32;

/// Upper half of the fp32 2^-23, below any boundary.
const LEAST_CELL: u32 = 0x3400;

impl Map {
    const fn new(signed: bool) -> Self {
        let zero = if signed { 127 } else { 0 };
        let magnitudes = magnitudes(signed);
        let mut values = [0.0; 256];
        let mut code = 0;
        while code < 256 {
            values[code] = if code < zero { -magnitudes[zero - code] } else { magnitudes[code - zero] };
            code += 1;
        }
        Map { values, cells: cells(&magnitudes, 256 - zero), zero: zero as u8 }
    }

    /// The values of a block's codes.
    #[inline(always)]
    pub(super) fn decode(&self, codes: &[u8; BLOCK], scale: f32, block: &mut Block) {
        for (value, &code) in block.iter_mut().zip(codes) {
            *value = self.values[code as usize] * scale;
        }
    }

    /// The block's codes and its scale. Where a number is infinite or NaN the scale is NaN, and so is then
    /// the whole block.
    #[inline(always)]
    pub(super) fn encode<const SIGNED: bool>(&self, block: &Block, codes: &mut [u8; BLOCK]) -> f32 {
        let mut peak = 0;
        for value in block {
            peak = (value.to_bits() & 0x7FFF_FFFF).max(peak);
        }
        if peak == 0 || peak >= 0x7F80_0000 {
            codes.fill(self.zero);
            return if peak == 0 { 0.0 } else { f32::from_bits(NAN_BITS) };
        }
        let scale = f32::from_bits(peak);
        // The reciprocal of a small denormal would be infinite.
        let raise = if peak < 0x0D80_0000 { TWO_TO_64 } else { 1.0 };
        let reciprocal = 1.0 / (scale * raise);
        // Encoded aside: nothing else can lie there, which the compiler has to know to vectorise.
        let mut encoded = [0; BLOCK];
        for (code, &value) in encoded.iter_mut().zip(block) {
            let bits = (value * raise * reciprocal).to_bits();
            let magnitude = bits & 0x7FFF_FFFF;
            let cell = self.cells[((magnitude >> 16).max(LEAST_CELL) - LEAST_CELL) as usize & 4095];
            let steps = (cell & 0xFF) + u32::from(magnitude & 0xFFFF > cell >> 16);
            *code = if !SIGNED {
                steps.max(u32::from(value > 0.0)) as u8
            } else if bits >> 31 != 0 {
                // There is no -1.
                (127 - steps.min(127)) as u8
            } else {
                (127 + steps) as u8
            };
        }
        *codes = encoded;
        scale
    }
}

/// The map's magnitudes, ascending: 129 of a signed map, 256 of an unsigned one. The fp32 arithmetic is that of
/// bitsandbytes (`torch.linspace`, means, a power of ten), for the same bits.
const fn magnitudes(signed: bool) -> [f32; 256] {
    const DECADES: [f32; 7] = [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0];
    let mut magnitudes = [0.0; 256];
    let mut filled = 1;
    let mut i = 0;
    while i < DECADES.len() {
        let pieces = if signed { 1 << i } else { 2 << i };
        let mut piece = 0;
        while piece < pieces {
            let mean = (boundary(piece, pieces) + boundary(piece + 1, pieces)) / 2.0;
            magnitudes[filled] = DECADES[i] * mean;
            filled += 1;
            piece += 1;
        }
        i += 1;
    }
    magnitudes[filled] = 1.0;
    magnitudes
}

/// Where piece number `piece` of `0.1..1` begins, as `torch.linspace` computes it: from the nearer end, fused.
const fn boundary(piece: usize, pieces: usize) -> f32 {
    let step = (1.0 - 0.1f32) / pieces as f32;
    // Exact in fp64 but for the last rounding.
    if piece < pieces.div_ceil(2) {
        (0.1f32 as f64 + step as f64 * piece as f64) as f32
    } else {
        (1.0 - step as f64 * (pieces - piece) as f64) as f32
    }
}

/// [`Map::cells`] of `count` ascending magnitudes.
const fn cells(magnitudes: &[f32; 256], count: usize) -> [u32; 4096] {
    let mut cells = [0; 4096];
    let mut below = 0;
    let mut cell = 0;
    while cell < cells.len() {
        let mut last = 0xFFFF;
        let mut codes = below;
        if below + 1 < count {
            let middle = (magnitudes[below] as f64 + magnitudes[below + 1] as f64) / 2.0;
            let mut bits = (middle as f32).to_bits();
            if f32::from_bits(bits) as f64 > middle {
                bits -= 1;
            }
            assert!(bits >> 16 >= LEAST_CELL + cell as u32, "two boundaries in a cell");
            if bits >> 16 == LEAST_CELL + cell as u32 {
                last = bits & 0xFFFF;
                codes = below + 1;
            }
        }
        cells[cell] = last << 16 | below as u32;
        below = codes;
        cell += 1;
    }
    cells
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The map by its definition in fp64: ascending values.
    fn plain_map(signed: bool) -> Vec<f64> {
        let mut values = vec![0.0, 1.0];
        for decade in 0..7 {
            let pieces = if signed { 1 << decade } else { 2 << decade };
            for piece in 0..pieces {
                let value =
                    10f64.powi(decade - 6) * (0.1 + 0.9 * (f64::from(piece) + 0.5) / f64::from(pieces));
                values.push(value);
                if signed {
                    values.push(-value);
                }
            }
        }
        values.sort_by(f64::total_cmp);
        values
    }

    #[test]
    fn the_maps_are_the_dynamic_maps() {
        for (map, signed) in [(&SIGNED, true), (&UNSIGNED, false)] {
            let plain = plain_map(signed);
            assert_eq!(plain.len(), 256);
            for (code, (&value, exact)) in map.values.iter().zip(plain).enumerate() {
                let error = (f64::from(value) - exact).abs();
                assert!(
                    error <= 2.0 * f64::from(f32::EPSILON) * exact.abs(),
                    "code {code}: {value}, {exact}"
                );
            }
            assert_eq!(map.values[map.zero as usize], 0.0);
        }
    }

    /// Encodes numbers whose scale is 1, by groups with a 1 in each.
    fn codes(map: &Map, signed: bool, values: &[f32]) -> Vec<u8> {
        let mut all = Vec::new();
        for values in values.chunks(BLOCK - 1) {
            let mut block = [0.0; BLOCK];
            block[..values.len()].copy_from_slice(values);
            block[BLOCK - 1] = 1.0;
            let mut codes = [0; BLOCK];
            let scale = if signed {
                map.encode::<true>(&block, &mut codes)
            } else {
                map.encode::<false>(&block, &mut codes)
            };
            assert_eq!(scale, 1.0);
            assert_eq!(codes[BLOCK - 1], 255);
            all.extend_from_slice(&codes[..values.len()]);
        }
        all
    }

    /// The nearest by looking at all, a tie to the one nearer to zero.
    fn plain_code(map: &Map, value: f32) -> u8 {
        let distance = |code: u8| (f64::from(map.values[code as usize]) - f64::from(value)).abs();
        let size = |code: u8| map.values[code as usize].abs();
        let nearer =
            |a: &u8, b: &u8| distance(*a).total_cmp(&distance(*b)).then(size(*a).total_cmp(&size(*b)));
        (0..=255).min_by(nearer).unwrap()
    }

    /// All boundaries and their neighbours, every code, and a number from every part of every cell.
    #[test]
    fn every_number_goes_to_the_nearest_code() {
        for (map, signed) in [(&SIGNED, true), (&UNSIGNED, false)] {
            let mut values = map.values.to_vec();
            for pair in map.values.windows(2) {
                let middle = ((f64::from(pair[0]) + f64::from(pair[1])) / 2.0) as f32;
                values.extend([
                    middle,
                    f32::from_bits(middle.to_bits() + 1),
                    f32::from_bits(middle.to_bits() - 1),
                ]);
            }
            let stride = if cfg!(debug_assertions) { 0x6001 } else { 0x0601 };
            values.extend((0x3000_0000..0x3F80_0000).step_by(stride).map(f32::from_bits));
            values.extend([f32::from_bits(1), f32::MIN_POSITIVE, 0.0]);
            values.retain(|value| value.abs() <= 1.0 && (signed || *value >= 0.0));
            if signed {
                values.extend(values.clone().iter().map(|value| -value));
            }
            let mut ties = 0;
            for (&value, code) in values.iter().zip(codes(map, signed, &values)) {
                let mut expected = plain_code(map, value);
                if !signed && value > 0.0 {
                    expected = expected.max(1);
                }
                assert_eq!(code, expected, "{value:e}, signed: {signed}");
                let other = if signed && value < 0.0 { code.wrapping_sub(1) } else { code.wrapping_add(1) };
                let distance = |code: u8| (f64::from(map.values[code as usize]) - f64::from(value)).abs();
                ties += usize::from(distance(code) == distance(other));
            }
            assert!(ties > 0, "ties are among them");
        }
    }

    /// What an element loses, as a part of its block's largest: half of the widest gap, near the top.
    #[test]
    fn the_error_is_bounded() {
        for (map, signed, bound) in [(&SIGNED, true, 0.00704f32), (&UNSIGNED, false, 0.00353)] {
            for peak in [1e-38f32, 3e-7, 0.7, 5e20] {
                let mut block: Block = std::array::from_fn(|i| peak * (i as f32 / 255.0));
                if signed {
                    block.iter_mut().step_by(2).for_each(|x| *x = -*x);
                }
                let mut codes = [0; BLOCK];
                let scale = if signed {
                    map.encode::<true>(&block, &mut codes)
                } else {
                    map.encode::<false>(&block, &mut codes)
                };
                assert_eq!(scale, peak);
                let mut restored = [0.0; BLOCK];
                map.decode(&codes, scale, &mut restored);
                for (x, y) in block.iter().zip(restored) {
                    assert!((x - y).abs() <= bound * peak, "{x} became {y} of {peak}");
                }
            }
        }
    }

    #[test]
    fn the_largest_number_of_a_block_is_kept_and_codes_stay() {
        let block: Block = std::array::from_fn(|i| if i == 99 { 3.7e-5 } else { SIGNED.values[i] * 3.0e-5 });
        let mut codes = [0; BLOCK];
        let scale = SIGNED.encode::<true>(&block, &mut codes);
        let mut restored = [0.0; BLOCK];
        SIGNED.decode(&codes, scale, &mut restored);
        assert_eq!(restored[99], 3.7e-5);
        let mut again = [0; BLOCK];
        assert_eq!(SIGNED.encode::<true>(&restored, &mut again), scale);
        assert_eq!(again, codes);
    }

    #[test]
    fn zeros_and_what_is_not_finite() {
        let mut codes = [9; BLOCK];
        assert_eq!(SIGNED.encode::<true>(&[-0.0; BLOCK], &mut codes), 0.0);
        assert_eq!(codes, [127; BLOCK]);
        let mut block = [1.0; BLOCK];
        block[3] = f32::NEG_INFINITY;
        assert_eq!(SIGNED.encode::<true>(&block, &mut codes).to_bits(), NAN_BITS);
        assert_eq!(codes, [127; BLOCK]);
        // Far below the least code, but not zero.
        let mut block = [0.0; BLOCK];
        (block[0], block[1]) = (1.0, 1e-30);
        UNSIGNED.encode::<false>(&block, &mut codes);
        assert_eq!(codes[..3], [255, 1, 0]);
    }
}
