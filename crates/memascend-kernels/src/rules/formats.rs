//! The formats of planes, and the conversion of their blocks to and from fp32.

use std::ops::Range;

use super::super::bf16::{canonical_nan, round_bf16, widen_bf16};
use super::super::dispatch::{Level, Plain};
use super::block8::{RECORD, SCALES_BYTES, SIGNED, Scale, UNSIGNED};
use super::{BLOCK, Block};

/// Bytes that every chunk of a plane is a multiple of, since drives transfer whole blocks.
pub(super) const PAGE: usize = 4096;

/// How the elements of a plane are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PlaneFormat {
    /// fp32.
    F32,
    /// bf16.
    Bf16,
    /// The low half of a split master, 2 bytes.
    Low,
    /// Codes of the signed dynamic map, in records of 65,536 elements: a page of 4,096 bytes that
    /// begins with one fp32 scale per block of 256 elements, then the codes. The last record ends
    /// after its codes, at a multiple of 4,096.
    Block8Signed,
    /// The same for second moments: codes of the unsigned map.
    Block8Unsigned,
}

/// One array of numbers kept beside the weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Plane {
    /// Its name in a state dictionary.
    pub name: &'static str,
    /// How its elements are kept.
    pub format: PlaneFormat,
}

impl PlaneFormat {
    /// Bytes of an element, where all are alike.
    const fn element_bytes(self) -> Option<usize> {
        match self {
            Self::F32 => Some(4),
            Self::Bf16 | Self::Low => Some(2),
            Self::Block8Signed | Self::Block8Unsigned => None,
        }
    }
}

impl Plane {
    /// Bytes of a plane of `elements`.
    pub fn bytes(&self, elements: usize) -> usize {
        self.span(0, elements).end
    }

    /// The bytes of a plane that a step on `elements` from `first` on needs. In 8 bits they begin
    /// with the record of `first`, whose scales are needed, so spans of steps in the same record
    /// overlap.
    pub fn span(&self, first: usize, elements: usize) -> Range<usize> {
        if let Some(bytes) = self.format.element_bytes() {
            return first * bytes..(first + elements) * bytes;
        }
        let start = first / RECORD * RECORD_BYTES;
        if elements == 0 {
            return start..start;
        }
        let last = first + elements - 1;
        start..last / RECORD * RECORD_BYTES + SCALES_BYTES + (last % RECORD + 1).next_multiple_of(PAGE)
    }

    /// Length of [`Plane::span`].
    ///
    /// # Panics
    /// When a plane of 8 bits is entered within a block.
    pub(super) fn span_len(&self, first: u64, elements: usize) -> usize {
        if self.format.element_bytes().is_none() {
            assert!(first.is_multiple_of(BLOCK as u64), "8-bit moments are updated in whole blocks of 256");
        }
        self.span((first % RECORD as u64) as usize, elements).len()
    }

    /// Whether it is kept in records of [`GRADIENT_BLOCK`](super::super::GRADIENT_BLOCK) elements,
    /// which are read and written whole.
    pub fn has_records(&self) -> bool {
        self.format.element_bytes().is_none()
    }

    /// Whether the plane is a master or a part of one.
    #[cfg(test)]
    pub(super) fn is_master(&self) -> bool {
        matches!(self.name, "master" | "master_low")
    }

    /// The elements `first ..` in fp32; `bytes` are the range of [`Plane::span`].
    ///
    /// # Panics
    /// When the length is wrong, and for the low half of a master, which is not a number by itself.
    pub fn read(&self, bytes: &[u8], first: usize, values: &mut [f32]) {
        assert_eq!(bytes.len(), self.span_len(first as u64, values.len()), "{}", self.name);
        let mut block = [0.0; BLOCK];
        for (place, values) in PlaneBlock::whole(first, values.len()).blocks().zip(values.chunks_mut(BLOCK)) {
            load_plane::<Plain>(self.format, bytes, place, &mut block);
            values.copy_from_slice(&block[..values.len()]);
        }
    }

    /// Writes the elements `first ..`, rounded to the nearest; `bytes` are the range of [`Plane::span`].
    ///
    /// # Panics
    /// As [`Plane::read`].
    pub fn write(&self, bytes: &mut [u8], first: usize, values: &[f32]) {
        assert_eq!(bytes.len(), self.span_len(first as u64, values.len()), "{}", self.name);
        let mut block = [0.0; BLOCK];
        for (place, values) in PlaneBlock::whole(first, values.len()).blocks().zip(values.chunks(BLOCK)) {
            block[..values.len()].copy_from_slice(values);
            block[values.len()..].fill(0.0);
            store_plane::<Plain>(self.format, bytes, place, &block);
        }
    }
}

/// Bytes of a whole record.
const RECORD_BYTES: usize = SCALES_BYTES + RECORD;

/// Where `count` elements, a block or several, lie in the span of a step.
#[derive(Clone, Copy)]
pub(super) struct PlaneBlock {
    /// First element of the step.
    pub first_element: u64,
    /// First of the elements.
    pub at: u64,
    pub count: usize,
}

impl PlaneBlock {
    /// All of a step.
    fn whole(first: usize, count: usize) -> Self {
        Self { first_element: first as u64, at: first as u64, count }
    }

    /// The blocks of 256 elements that it consists of.
    #[inline(always)]
    pub(super) fn blocks(self) -> impl Iterator<Item = PlaneBlock> {
        (0..self.count).step_by(BLOCK).map(move |done| PlaneBlock {
            at: self.at + done as u64,
            count: BLOCK.min(self.count - done),
            ..self
        })
    }

    /// Its bytes in a plane whose elements are all alike.
    #[inline(always)]
    pub(super) fn range(self, format: PlaneFormat) -> Range<usize> {
        let bytes = format.element_bytes().expect("elements are all alike");
        let start = (self.at - self.first_element) as usize * bytes;
        start..start + self.count * bytes
    }

    /// Where its scale and its codes are in a plane of records.
    #[inline(always)]
    fn record(self) -> (usize, usize) {
        let records = self.at / RECORD as u64 - self.first_element / RECORD as u64;
        let record = records as usize * RECORD_BYTES;
        let within = self.at as usize % RECORD;
        (record + within / BLOCK * 4, record + SCALES_BYTES + within)
    }
}

/// A block of any plane but the low half of a master.
#[inline(always)]
pub(super) fn load_plane<L: Level>(format: PlaneFormat, bytes: &[u8], place: PlaneBlock, block: &mut Block) {
    let map = match format {
        PlaneFormat::Block8Signed => &SIGNED,
        PlaneFormat::Block8Unsigned => &UNSIGNED,
        _ => return load(format, &bytes[place.range(format)], block),
    };
    let (scale, codes) = place.record();
    let scale = f32::from_ne_bytes(*bytes[scale..].first_chunk().expect("a scale"));
    map.decode::<L>(bytes[codes..].first_chunk().expect("codes in whole blocks"), scale, block);
    // Values behind the last element come from codes of no element.
    block[place.count..].fill(0.0);
}

/// Stores a block of any plane but the low half of a master, rounded to the nearest.
#[inline(always)]
pub(super) fn store_plane<L: Level>(format: PlaneFormat, bytes: &mut [u8], place: PlaneBlock, block: &Block) {
    if format.element_bytes().is_some() {
        return store(format, &mut bytes[place.range(format)], block);
    }
    store_block8::<L>(format, bytes, place, block, Scale::of(block, format == PlaneFormat::Block8Signed));
}

/// Stores a block of 8 bits whose scale is known.
#[inline(always)]
pub(super) fn store_block8<L: Level>(
    format: PlaneFormat,
    bytes: &mut [u8],
    place: PlaneBlock,
    block: &Block,
    scale: Scale,
) {
    let (scale_at, codes) = place.record();
    let codes = bytes[codes..].first_chunk_mut().expect("codes in whole blocks");
    match format {
        PlaneFormat::Block8Signed => SIGNED.encode::<true, L>(block, scale, codes),
        _ => UNSIGNED.encode::<false, L>(block, scale, codes),
    }
    bytes[scale_at..][..4].copy_from_slice(&scale.scale.to_ne_bytes());
}

/// Up to a block of elements that are all alike.
#[inline(always)]
fn load(format: PlaneFormat, bytes: &[u8], block: &mut Block) {
    match format {
        PlaneFormat::F32 => load_each(bytes, block, f32::from_ne_bytes),
        PlaneFormat::Bf16 => load_each(bytes, block, |bytes| widen_bf16(u16::from_ne_bytes(bytes))),
        _ => panic!("not a format of numbers by themselves"),
    }
}

/// Stores up to a block of elements that are all alike.
#[inline(always)]
fn store(format: PlaneFormat, bytes: &mut [u8], block: &Block) {
    match format {
        PlaneFormat::F32 => store_each(bytes, block, |value| canonical_nan(value).to_ne_bytes()),
        PlaneFormat::Bf16 => store_each(bytes, block, |value| round_bf16(value).to_ne_bytes()),
        _ => panic!("not a format of numbers by themselves"),
    }
}

#[inline(always)]
fn load_each<const N: usize>(bytes: &[u8], block: &mut Block, value: impl Fn([u8; N]) -> f32) {
    for (slot, &element) in block.iter_mut().zip(bytes.as_chunks::<N>().0) {
        *slot = value(element);
    }
}

#[inline(always)]
fn store_each<const N: usize>(bytes: &mut [u8], block: &Block, value: impl Fn(f32) -> [u8; N]) {
    for (element, &number) in bytes.as_chunks_mut::<N>().0.iter_mut().zip(block) {
        *element = value(number);
    }
}
