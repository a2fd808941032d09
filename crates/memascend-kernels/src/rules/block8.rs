//! 8-bit moments: blocks of 256 elements, each a code of bitsandbytes' dynamic map (Dettmers et al.
//! 2022, arXiv 2110.02861) times the block's scale.
//!
//! The map has seven decades, 1e-6 to 1: decade `i` has `2^i` evenly spaced magnitudes, twice as
//! many where no sign is needed, and 0 and 1 complete the 256. Codes ascend with their values. An
//! element goes to the nearest, with one exception: a second moment above zero never becomes zero,
//! because the step is divided by it.
//!
//! The signed map has 1, but no -1. The scale is therefore the element of the largest magnitude
//! with its sign (the positive one of two), where bitsandbytes takes the magnitude: the largest
//! element is always code 255, and kept exactly. So a block that was read and is written again does
//! not change, as when a state is saved in fp32 and loaded. The price is paid by a negative twin of
//! the largest element, which loses 0.7 %, as every negative peak does in bitsandbytes.
//!
//! Codes are computed, not looked up: a table of boundaries would take all of the first-level
//! cache, and gathering from it more time than all the rest. A number as near to the middle between
//! two codes as a few units of the last place of its decade's end may go to either; which one is
//! the same everywhere.

#[cfg(target_arch = "x86_64")]
use super::super::Isa;
use super::super::bf16::NAN_BITS;
use super::super::dispatch::Level;
use super::{BLOCK, Block};

#[cfg(target_arch = "x86_64")]
mod x86;

/// Elements of a record: a chunk of an update is a multiple of this.
pub(super) const RECORD: usize = super::super::GRADIENT_BLOCK;
/// The scales of a record, one fp32 for each of its blocks, lie in front of its codes in a page of
/// their own.
pub(super) const SCALES_BYTES: usize = super::formats::PAGE;

/// One of the two maps.
pub(super) struct Map {
    values: [f32; 256],
    /// Greatest number below each decade. The first is below all numbers but zero, the last below
    /// 1.
    below: [f32; DECADES],
    /// Pieces of each decade, or twice as many where the sign takes no code: also the number of its
    /// first magnitude.
    pieces: [f32; DECADES],
    /// Code of zero.
    zero: u8,
    #[cfg(target_arch = "x86_64")]
    tables: x86::Tables,
}

/// The seven decades, and 1 as the only number of its own.
const DECADES: usize = 8;

/// The map of numbers of either sign.
pub(super) static SIGNED: Map = Map::new(true);
/// The map of second moments.
pub(super) static UNSIGNED: Map = Map::new(false);

const TWO_TO_64: f32 = (1u128 << 64) as f32;

/// A number of decade `i` times this, plus [`BASE`], is between 1 and 2: evenly, from the decade's
/// beginning to its end.
const SLOPES: [f32; DECADES] =
    [1e6 / 0.9, 1e5 / 0.9, 1e4 / 0.9, 1e3 / 0.9, 1e2 / 0.9, 1e1 / 0.9, 1.0 / 0.9, 0.1125];
const BASE: f32 = 8.0 / 9.0;
/// Below 2.
const END: f32 = f32::from_bits(0x3FFF_FFFF);

/// The scale of a block.
#[derive(Clone, Copy, Default)]
pub(super) struct Scale {
    /// Factor of the codes' values: NaN where a number is infinite or NaN, which makes the whole block NaN.
    pub scale: f32,
    /// A number times this, times `reciprocal`, is between -1 and 1: the reciprocal of a small denormal would
    /// be infinite, and a huge number's a denormal.
    raise: f32,
    reciprocal: f32,
}

impl Scale {
    /// The map of a block of either sign, or of second moments.
    #[inline(always)]
    pub(super) fn of(block: &Block, signed: bool) -> Self {
        // As integers, positive numbers are in their order, and negative ones above them, by magnitude.
        let (mut positive, mut negative) = (0, i32::MIN as u32);
        for value in block {
            positive = (value.to_bits() as i32).max(positive);
            negative = value.to_bits().max(negative);
        }
        let (positive, negative) = (positive as u32, negative & i32::MAX as u32);
        let magnitude = positive.max(negative);
        if magnitude == 0 || magnitude >= 0x7F80_0000 {
            let scale = if magnitude == 0 { 0.0 } else { f32::from_bits(NAN_BITS) };
            return Self { scale, raise: 1.0, reciprocal: 0.0 };
        }
        // The positive one of two.
        let sign = if signed && negative > positive { 1 << 31 } else { 0 };
        let scale = f32::from_bits(magnitude | sign);
        let raise = match magnitude {
            ..0x0D80_0000 => TWO_TO_64,
            0x6000_0000.. => 1.0 / TWO_TO_64,
            _ => 1.0,
        };
        Self { scale, raise, reciprocal: 1.0 / (scale * raise) }
    }
}

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
        let (mut below, mut pieces) = ([0.0; DECADES], [0.0; DECADES]);
        let mut decade = 0;
        while decade < DECADES {
            let first = if signed { 1 << decade } else { (2 << decade) - 1 };
            pieces[decade] = if signed { first } else { first + 1 } as f32;
            below[decade] = ((magnitudes[first - 1] as f64 + magnitudes[first] as f64) / 2.0) as f32;
            decade += 1;
        }
        Map {
            values,
            below,
            pieces,
            zero: zero as u8,
            #[cfg(target_arch = "x86_64")]
            tables: x86::Tables::new(&values, &below, &pieces, pieces_of_zero(signed)),
        }
    }

    /// The values of a block's codes. None is a negative zero, whatever the sign of the scale.
    #[inline(always)]
    pub(super) fn decode<L: Level>(&self, codes: &[u8; BLOCK], scale: f32, block: &mut Block) {
        #[cfg(target_arch = "x86_64")]
        if matches!(L::ISA, Isa::Avx512) && is_x86_feature_detected!("avx512vbmi") {
            // SAFETY: the machine has AVX-512 and VBMI.
            return unsafe { x86::decode(self, codes, scale, block) };
        }
        for (value, &code) in block.iter_mut().zip(codes) {
            *value = self.values[code as usize] * scale + 0.0;
        }
    }

    /// The codes of a block with that scale.
    #[inline(always)]
    pub(super) fn encode<const SIGNED: bool, L: Level>(
        &self,
        block: &Block,
        scale: Scale,
        codes: &mut [u8; BLOCK],
    ) {
        let Scale { scale, raise, reciprocal } = scale;
        if scale == 0.0 || scale.is_nan() {
            codes.fill(self.zero);
            return;
        }
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the machine has what the code of the instruction set runs with.
        unsafe {
            match (L::ISA, raise == 1.0) {
                (Isa::Avx512, true) => {
                    return x86::encode::<SIGNED, false>(self, block, raise, reciprocal, codes);
                }
                (Isa::Avx512, false) => {
                    return x86::encode::<SIGNED, true>(self, block, raise, reciprocal, codes);
                }
                (Isa::Avx2, true) => {
                    return x86::encode_narrow::<SIGNED, false>(self, block, raise, reciprocal, codes);
                }
                (Isa::Avx2, false) => {
                    return x86::encode_narrow::<SIGNED, true>(self, block, raise, reciprocal, codes);
                }
                (Isa::Baseline, _) => {}
            }
        }
        // Encoded aside: nothing else can lie there, which the compiler has to know to vectorise.
        let mut encoded = [0; BLOCK];
        for (code, &value) in encoded.iter_mut().zip(block) {
            *code = self.code::<SIGNED>(value * raise * reciprocal, value > 0.0);
        }
        *codes = encoded;
    }

    /// The code of a number between -1 and 1.
    #[inline(always)]
    fn code<const SIGNED: bool>(&self, number: f32, above_zero: bool) -> u8 {
        let magnitude = number.abs();
        // Below the first decade is zero.
        let (mut slope, mut pieces) = (0.0, pieces_of_zero(SIGNED));
        for ((&below, &slope_here), &pieces_here) in self.below.iter().zip(&SLOPES).zip(&self.pieces) {
            let within = magnitude > below;
            slope = if within { slope_here } else { slope };
            pieces = if within { pieces_here } else { pieces };
        }
        let place = magnitude.mul_add(slope, BASE).min(END) * pieces;
        // SAFETY: it is between 0 and 256.
        let rank = unsafe { if SIGNED { place.copysign(number) } else { place }.to_int_unchecked::<i32>() };
        if SIGNED {
            // There is no -1.
            (rank + 127).max(0) as u8
        } else {
            (rank - 1).max(i32::from(above_zero)) as u8
        }
    }
}

/// Instead of [`Map::pieces`], for numbers below the first decade: times [`BASE`] they are below the
/// first magnitude's number.
const fn pieces_of_zero(signed: bool) -> f32 {
    if signed { 0.0 } else { 1.25 }
}

/// The map's magnitudes, ascending: 129 of a signed map, 256 of an unsigned one. The fp32 arithmetic follows
/// bitsandbytes (`torch.linspace`, means, a power of ten), for the same bits.
const fn magnitudes(signed: bool) -> [f32; 256] {
    const TENS: [f32; 7] = [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0];
    let mut magnitudes = [0.0; 256];
    let mut filled = 1;
    let mut i = 0;
    while i < TENS.len() {
        let pieces = if signed { 1 << i } else { 2 << i };
        let mut piece = 0;
        while piece < pieces {
            let mean = (boundary(piece, pieces) + boundary(piece + 1, pieces)) / 2.0;
            magnitudes[filled] = TENS[i] * mean;
            filled += 1;
            piece += 1;
        }
        i += 1;
    }
    magnitudes[filled] = 1.0;
    magnitudes
}

/// Where piece number `piece` of `0.1..1` begins, as `torch.linspace` computes it: from the nearer
/// end, fused.
const fn boundary(piece: usize, pieces: usize) -> f32 {
    let step = (1.0 - 0.1f32) / pieces as f32;
    // Exact in fp64 but for the last rounding.
    if piece < pieces.div_ceil(2) {
        (0.1f32 as f64 + step as f64 * piece as f64) as f32
    } else {
        (1.0 - step as f64 * (pieces - piece) as f64) as f32
    }
}

#[cfg(test)]
mod tests;
