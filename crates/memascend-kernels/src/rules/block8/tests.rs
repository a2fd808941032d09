//! 8-bit states against a search through the whole map.

use super::super::super::dispatch::Plain;
#[cfg(target_arch = "x86_64")]
use super::super::super::dispatch::{Narrow, Wide};
use super::super::super::testing::any_bits;
use super::*;
use proptest::prelude::*;

/// Encodes by the portable code and by every instruction set which runs here: the same.
fn encode(signed: bool, block: &Block, codes: &mut [u8; BLOCK]) -> f32 {
    let scale = Scale::of(block, signed);
    encode_with::<Plain>(signed, block, scale, codes);
    #[cfg(target_arch = "x86_64")]
    for isa in Isa::available() {
        let mut again = [0; BLOCK];
        match isa {
            Isa::Avx512 => encode_with::<Wide>(signed, block, scale, &mut again),
            Isa::Avx2 => encode_with::<Narrow>(signed, block, scale, &mut again),
            Isa::Baseline => continue,
        }
        assert_eq!(&again, codes, "{isa:?}");
    }
    scale.scale
}

fn encode_with<L: Level>(signed: bool, block: &Block, scale: Scale, codes: &mut [u8; BLOCK]) {
    match signed {
        true => SIGNED.encode::<true, L>(block, scale, codes),
        false => UNSIGNED.encode::<false, L>(block, scale, codes),
    }
}

/// Decodes by all.
fn decode(signed: bool, codes: &[u8; BLOCK], scale: f32) -> Block {
    let map = if signed { &SIGNED } else { &UNSIGNED };
    let mut block = [0.0; BLOCK];
    map.decode::<Plain>(codes, scale, &mut block);
    #[cfg(target_arch = "x86_64")]
    for isa in Isa::available() {
        let mut again = [0.0; BLOCK];
        match isa {
            Isa::Avx512 => map.decode::<Wide>(codes, scale, &mut again),
            Isa::Avx2 => map.decode::<Narrow>(codes, scale, &mut again),
            Isa::Baseline => continue,
        }
        if !scale.is_nan() {
            assert_eq!(again.map(f32::to_bits), block.map(f32::to_bits), "{isa:?}");
        }
    }
    block
}

/// The map by its definition in fp64: ascending values.
fn plain_map(signed: bool) -> Vec<f64> {
    let mut values = vec![0.0, 1.0];
    for decade in 0..7 {
        let pieces = if signed { 1 << decade } else { 2 << decade };
        for piece in 0..pieces {
            let value = 10f64.powi(decade - 6) * (0.1 + 0.9 * (f64::from(piece) + 0.5) / f64::from(pieces));
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
            assert!(error <= 2.0 * f64::from(f32::EPSILON) * exact.abs(), "code {code}: {value}, {exact}");
        }
        assert_eq!(map.values[map.zero as usize], 0.0);
    }
}

/// Encodes numbers whose scale is 1, by groups with a 1 in each.
fn codes(signed: bool, values: &[f32]) -> Vec<u8> {
    let mut all = Vec::new();
    for values in values.chunks(BLOCK - 1) {
        let mut block = [0.0; BLOCK];
        block[..values.len()].copy_from_slice(values);
        block[BLOCK - 1] = 1.0;
        let mut codes = [0; BLOCK];
        assert_eq!(encode(signed, &block, &mut codes), 1.0);
        assert_eq!(codes[BLOCK - 1], 255);
        all.extend_from_slice(&codes[..values.len()]);
    }
    all
}

/// All boundaries and their neighbours, every code, and numbers from everywhere: to the nearest
/// code, where the middle between two is wide by a few units of the last place of the decade's end.
#[test]
fn every_number_goes_to_the_nearest_code() {
    for (map, signed) in [(&SIGNED, true), (&UNSIGNED, false)] {
        let mut values = map.values.to_vec();
        for pair in map.values.windows(2) {
            let middle = ((f64::from(pair[0]) + f64::from(pair[1])) / 2.0) as f32;
            values.extend((0..64).map(|i| f32::from_bits(middle.to_bits() + i - 32)));
        }
        let stride = if cfg!(debug_assertions) { 0x6001 } else { 0x0601 };
        values.extend((0x3000_0000..0x3F80_0000).step_by(stride).map(f32::from_bits));
        values.extend([f32::from_bits(1), f32::MIN_POSITIVE, 0.0]);
        values.retain(|value| value.abs() <= 1.0 && (signed || *value >= 0.0));
        if signed {
            values.extend(values.clone().iter().map(|value| -value));
        }
        for (&value, code) in values.iter().zip(codes(signed, &values)) {
            let distance = |code: u8| (f64::from(map.values[code as usize]) - f64::from(value)).abs();
            let least = (0..=255).map(distance).min_by(f64::total_cmp).unwrap();
            let decade_end = 10f64.powf(f64::from(value.abs()).log10().ceil());
            let slack = 4.0 * f64::from(f32::EPSILON) * decade_end;
            if !signed && value > 0.0 && code == 1 {
                assert!(distance(1) <= least + slack || distance(0) <= least, "{value:e}");
            } else {
                assert!(distance(code) <= least + slack, "{value:e} became {code}, signed: {signed}");
            }
            assert!(signed || value == 0.0 || code > 0, "{value:e}");
        }
    }
}

/// Error of an element, as a part of its block's largest: half of the widest gap, near the top.
#[test]
fn the_error_is_bounded() {
    for (signed, bound) in [(true, 0.00704f32), (false, 0.00353)] {
        for peak in [1e-38f32, 3e-7, 0.7, 5e20] {
            let mut block: Block = std::array::from_fn(|i| peak * (i as f32 / 255.0));
            if signed {
                block.iter_mut().step_by(2).for_each(|x| *x = -*x);
            }
            let mut codes = [0; BLOCK];
            let scale = encode(signed, &block, &mut codes);
            // The last is the largest, and of a signed block it is positive.
            assert_eq!(scale, peak);
            for (x, y) in block.iter().zip(decode(signed, &codes, scale)) {
                assert!((x - y).abs() <= bound * peak, "{x} became {y} of {peak}");
            }
        }
    }
}

#[test]
fn the_largest_number_of_a_block_is_kept_whatever_its_sign() {
    for peak in [3.7e-5f32, -3.7e-5] {
        let block: Block = std::array::from_fn(|i| if i == 99 { peak } else { SIGNED.values[i] * 3.0e-5 });
        let mut codes = [0; BLOCK];
        let scale = encode(true, &block, &mut codes);
        assert_eq!((scale, codes[99]), (peak, 255));
        assert_eq!(decode(true, &codes, scale)[99], peak);
    }
    // Of two the positive one.
    let mut block = [0.5; BLOCK];
    (block[7], block[9], block[11]) = (-2.0, 2.0, -2.0);
    let mut codes = [0; BLOCK];
    assert_eq!(encode(true, &block, &mut codes), 2.0);
    assert_eq!((codes[7], codes[9], codes[11]), (0, 255, 0));
}

#[test]
fn zeros_and_what_is_not_finite() {
    let mut codes = [9; BLOCK];
    assert_eq!(encode(true, &[-0.0; BLOCK], &mut codes).to_bits(), 0);
    assert_eq!(codes, [127; BLOCK]);
    for bad in [f32::NEG_INFINITY, f32::INFINITY, f32::NAN, -f32::NAN] {
        let mut block = [1.0; BLOCK];
        block[3] = bad;
        assert_eq!(encode(true, &block, &mut codes).to_bits(), NAN_BITS);
        assert_eq!(codes, [127; BLOCK]);
        assert!(decode(true, &codes, f32::NAN).iter().all(|value| value.is_nan()));
    }
    // Far below the least code, but not zero.
    let mut block = [0.0; BLOCK];
    (block[0], block[1]) = (1.0, 1e-30);
    encode(false, &block, &mut codes);
    assert_eq!(codes[..3], [255, 1, 0]);
}

/// Encodes a block that was decoded, and decodes that: the same bits.
fn assert_stays(signed: bool, codes: &[u8; BLOCK], scale: f32) {
    let block = decode(signed, codes, scale);
    let mut again = [0; BLOCK];
    let scale_again = encode(signed, &block, &mut again);
    let restored = decode(signed, &again, scale_again);
    assert_eq!(restored.map(f32::to_bits), block.map(f32::to_bits), "signed: {signed}, scale {scale:e}");
}

/// Every scale of few units of the least denormal, where many codes have one value; every power of
/// two, and around it.
#[test]
fn what_was_read_is_written_as_it_was() {
    let every: [u8; BLOCK] = std::array::from_fn(|code| code as u8);
    let stride = if cfg!(debug_assertions) { 9973 } else { 97 };
    let small = (1..4096).chain((4096..1 << 24).step_by(stride));
    let powers = (1..255u32).flat_map(|exponent| (0..256).map(move |i| (exponent << 23) + i - 128));
    for bits in small.chain(powers) {
        for (signed, sign) in [(true, 0), (true, 1 << 31), (false, 0)] {
            assert_stays(signed, &every, f32::from_bits(bits | sign));
        }
    }
}

/// A block by bitsandbytes' rule, plainly: the largest magnitude, and the nearest code.
fn plain(block: &Block) -> Block {
    let peak = block.iter().fold(0.0f32, |peak, value| value.abs().max(peak));
    block.map(|value| {
        let distance = |code: &f32| (f64::from(*code) - f64::from(value / peak)).abs();
        peak * SIGNED.values.iter().copied().min_by(|a, b| distance(a).total_cmp(&distance(b))).unwrap()
    })
}

/// No worse than bitsandbytes' rule: the same where the largest element is positive, and better on
/// the whole.
#[test]
fn the_sign_of_the_scale_costs_nothing() {
    let mut state = 1u64;
    let mut uniform = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    for terms in [1, 12] {
        let (mut ours, mut theirs) = (0.0, 0.0);
        let mut negative = 0;
        for _ in 0..500 {
            // Uniform numbers, and almost normal ones.
            let block: Block = std::array::from_fn(|_| (0..terms).map(|_| uniform()).sum());
            let mut codes = [0; BLOCK];
            let scale = encode(true, &block, &mut codes);
            let error = |restored: Block| -> f64 {
                block.iter().zip(restored).map(|(x, y)| f64::from(x - y).powi(2)).sum()
            };
            let (mine, plain) = (error(decode(true, &codes, scale)), error(plain(&block)));
            if scale > 0.0 {
                assert!(mine <= plain * (1.0 + 1e-6), "{mine} against {plain}");
            }
            negative += usize::from(scale < 0.0);
            ours += mine;
            theirs += plain;
        }
        println!("{terms} terms: {ours:e} against {theirs:e}");
        assert!(negative > 100 && ours < theirs, "{ours} against {theirs}");
    }
}

proptest! {
    /// Any codes that encoding can give: the largest is there, unless all are zero.
    #[test]
    fn blocks_stay(codes in prop::collection::vec(any::<u8>(), BLOCK), at in 0..BLOCK, bits in 1u32..0x7F80_0000, negative: bool) {
        let mut codes: [u8; BLOCK] = codes.try_into().unwrap();
        codes[at] = 255;
        assert_stays(true, &codes, f32::from_bits(bits | u32::from(negative) << 31));
        assert_stays(false, &codes, f32::from_bits(bits));
        assert_stays(true, &[127; BLOCK], 0.0);
        assert_stays(false, &[0; BLOCK], 0.0);
    }

    /// Any numbers: read after the first writing, they do not change by the second.
    #[test]
    fn numbers_stay(bits in any_bits(BLOCK), unit in 1u32..0x7F00_0000, zeros in 0..BLOCK, ties in 0..4usize) {
        let unit = f32::from_bits(unit);
        let mut block: Block = std::array::from_fn(|i| f32::from_bits(bits[i]));
        // Of one scale: fractions of the unit.
        let mut fractions = block.map(|x| if x.abs() <= 8.0 { x / 8.0 * unit } else { unit });
        for block in [&mut block, &mut fractions] {
            block[..zeros].fill(-0.0);
            let peak = block.iter().fold(0.0f32, |peak, x| x.abs().max(peak));
            for i in 0..ties {
                block[zeros + i * (BLOCK - zeros) / 4] = if i % 2 == 0 { -peak } else { peak };
            }
            for signed in [true, false] {
                let block = if signed { *block } else { block.map(f32::abs) };
                let mut codes = [0; BLOCK];
                let scale = encode(signed, &block, &mut codes);
                if !scale.is_nan() {
                    assert_stays(signed, &codes, scale);
                }
            }
        }
    }
}
