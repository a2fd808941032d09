//! The projection of a gradient, element after element in the order of memory.

use std::ops::Range;
use std::sync::Arc;

use super::super::dispatch::kernel;
use super::super::dtype::Dtype;
use super::super::rules::mix;
use super::super::{widen_bf16_slice, widen_f16};
use super::matrix::{BLOCK, normal, normals};
use super::projected::Projected;
use super::scratch::{Numbers, Purpose, Scratch};

/// Ranks that are computed together: two registers of AVX2 for each channel.
const LANES: usize = 16;
/// Channels that are computed together.
const CHANNELS: usize = 4;
/// fp64 sums of one channel's squares, where its elements follow one another in memory.
pub(super) const SUMS: usize = 8;
/// Bytes of pieces that are put together before they are projected: with short ones the sums of many channels would
/// go through the caches again and again, and threads be started for little.
const MIN_BATCH_BYTES: usize = 1 << 20;
/// Elements that are widened together at most.
const MAX_WIDENED_ELEMENTS: usize = 1 << 15;
/// Products below which no other thread is started.
const SINGLE_THREAD_MAX_PRODUCTS: usize = 1 << 22;
/// Tiles of the random matrix below which no other thread is started.
const SINGLE_THREAD_MAX_TILES: usize = 1 << 11;

/// Keeps the matrix's numbers apart from stochastic rounding's.
const DOMAIN: u64 = 0x4150_4F4C_4C4F_2D50;

/// How the gradient of a matrix is projected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Projection {
    /// Rows of the gradient.
    pub rows: usize,
    /// Columns of the gradient.
    pub columns: usize,
    /// How many numbers stand for each channel.
    pub rank: usize,
    /// Of the run and of the tensor.
    pub seed: u64,
    /// How often the random matrix was drawn anew.
    pub redraw: u64,
}

impl Projection {
    /// Whether the channels are the columns.
    pub fn by_column(&self) -> bool {
        self.rows < self.columns
    }

    /// How many channels there are.
    pub fn channels(&self) -> usize {
        self.rows.max(self.columns)
    }

    /// How many elements the gradient has.
    pub fn elements(&self) -> usize {
        self.rows * self.columns
    }

    /// fp64 sums of each channel while it is measured.
    pub(super) fn sums_each(&self) -> usize {
        if self.by_column() { 1 } else { SUMS }
    }

    /// Elements of a channel.
    pub fn depth(&self) -> usize {
        self.rows.min(self.columns)
    }

    /// The random matrix, (depth, rank): normal with variance `1 / rank`.
    pub fn matrix(&self) -> Vec<f32> {
        (0..self.depth() * self.rank).map(|index| self.element(self.key(), index)).collect()
    }

    /// Of the random matrix: element `i` is made from `mix(key ^ i)`.
    pub fn key(&self) -> u64 {
        mix(mix(self.seed ^ DOMAIN) ^ self.redraw)
    }

    fn element(&self, key: u64, index: usize) -> f32 {
        (normal(mix(key ^ index as u64)) / (self.rank as f64).sqrt()) as f32
    }

    /// The random matrix as the loop reads it: [`LANES`] ranks at a time, those that are missing zero.
    pub(super) fn tiles(&self, threads: usize, scratch: &Arc<Scratch>) -> Numbers {
        let count = self.rank.div_ceil(LANES) * self.depth() * LANES;
        let mut numbers = scratch.take(Purpose::Matrix, count);
        let tiles = numbers.as_chunks_mut::<LANES>().0;
        let threads = if tiles.len() < SINGLE_THREAD_MAX_TILES { 1 } else { threads };
        let share = tiles.len().div_ceil(threads);
        std::thread::scope(|scope| {
            for (index, tiles) in tiles.chunks_mut(share).enumerate() {
                if threads == 1 {
                    self.fill(index * share, tiles);
                } else {
                    crate::threads::spawn_or_run(scope, move || self.fill(index * share, tiles));
                }
            }
        });
        numbers
    }

    /// Makes the tiles from number `first` on.
    fn fill(&self, first: usize, tiles: &mut [[f32; LANES]]) {
        let (depth, key, divisor) = (self.depth(), self.key(), (self.rank as f64).sqrt());
        let mut numbers = [0.0; BLOCK];
        for (block, tiles) in tiles.chunks_mut(BLOCK / LANES).enumerate() {
            // The depth and the first rank of each tile.
            let begin = first + block * (BLOCK / LANES);
            let place = |tile: usize| ((begin + tile) % depth, (begin + tile) / depth * LANES);
            let index = |number: usize| {
                let (at, rank) = place(number / LANES);
                (at * self.rank + rank + number % LANES) as u64
            };
            normals(key, divisor, &std::array::from_fn(index), &mut numbers);
            for (tile, (lanes, numbers)) in tiles.iter_mut().zip(numbers.as_chunks::<LANES>().0).enumerate() {
                let width = LANES.min(self.rank - place(tile).1);
                lanes[..width].copy_from_slice(&numbers[..width]);
                lanes[width..].fill(0.0);
            }
        }
    }
}

/// Projects a gradient, or elements that follow one another in it, which pass by in pieces of any length.
///
/// Each number is the sum of a channel's products, in fp32 and in the channel's order; each sum of
/// squares is in fp64. So the bits depend on neither pieces nor threads.
pub struct Projector {
    pub(super) projection: Projection,
    dtype: Dtype,
    tiles: Numbers,
    threads: usize,
    /// Of the channels that the elements are in.
    pub(super) projected: Projected,
    /// (channels, `SUMS` or 1)
    pub(super) sums: Vec<f64>,
    /// The first element, and that after the last.
    pub(super) share: Range<usize>,
    next: usize,
    /// Elements from number `next` on that wait for more.
    waiting: Vec<u8>,
}

/// Elements of a gradient that form a rectangle, in fp32.
pub(super) struct Rectangle<'a> {
    pub(super) values: &'a [f32],
    pub(super) channels: usize,
    /// How far two channels, and two elements of a channel, lie apart.
    pub(super) strides: (usize, usize),
    /// First row and row count of the elements in the random matrix, and its total row count.
    pub(super) first: usize,
    pub(super) count: usize,
    pub(super) depth: usize,
    pub(super) rank: usize,
    pub(super) tiles: &'a [[f32; LANES]],
}

impl Projector {
    /// Before the first element of a gradient of `dtype`.
    ///
    /// # Panics
    /// When the matrix has no elements, or the rank is 0.
    pub fn new(projection: Projection, dtype: Dtype, threads: usize, scratch: &Arc<Scratch>) -> Self {
        Self::of_share(projection, 0..projection.elements(), dtype, threads, scratch)
    }

    /// Before the first of the elements `share` of a gradient of `dtype`.
    ///
    /// # Panics
    /// As [`Projector::new`], and when the gradient has fewer elements.
    pub fn of_share(
        projection: Projection,
        share: Range<usize>,
        dtype: Dtype,
        threads: usize,
        scratch: &Arc<Scratch>,
    ) -> Self {
        assert!(projection.depth() > 0 && projection.rank > 0, "a matrix and a rank that are not empty");
        assert!(share.end <= projection.elements(), "elements of the gradient");
        let channels = projection.channels_of(&share).len();
        let mut projected = Projected::room_of(projection, channels, scratch);
        projected.values_mut().fill(0.0);
        Self {
            projection,
            dtype,
            tiles: projection.tiles(threads.max(1), scratch),
            threads: threads.max(1),
            projected,
            sums: vec![0.0; channels * projection.sums_each()],
            next: share.start,
            share,
            waiting: Vec::new(),
        }
    }

    /// Bytes that a projector of the elements `share` of a gradient takes.
    pub fn bytes(projection: &Projection, share: &Range<usize>) -> usize {
        let numbers = (projection.rank + 2) * size_of::<f32>() + projection.sums_each() * size_of::<f64>();
        let tiles = projection.rank.div_ceil(LANES) * projection.depth() * size_of::<[f32; LANES]>();
        projection.channels_of(share).len() * numbers + tiles + MIN_BATCH_BYTES
    }

    /// The next elements of the gradient, of its dtype.
    ///
    /// # Panics
    /// When the gradient has fewer elements left, or the bytes are not whole elements.
    pub fn add(&mut self, gradient: &[u8]) {
        let bytes = self.dtype.bytes();
        assert!(gradient.len().is_multiple_of(bytes), "whole elements");
        let end = self.next + (self.waiting.len() + gradient.len()) / bytes;
        assert!(end <= self.share.end, "the gradient has fewer elements");
        if self.waiting.len() + gradient.len() > MIN_BATCH_BYTES {
            self.add_waiting();
        }
        if gradient.len() >= MIN_BATCH_BYTES {
            self.add_now(gradient);
        } else {
            self.waiting.reserve_exact(MIN_BATCH_BYTES - self.waiting.len());
            self.waiting.extend_from_slice(gradient);
        }
    }

    fn add_waiting(&mut self) {
        let mut waiting = std::mem::take(&mut self.waiting);
        self.add_now(&waiting);
        waiting.clear();
        self.waiting = waiting;
    }

    pub(super) fn add_now(&mut self, gradient: &[u8]) {
        let bytes = self.dtype.bytes();
        let elements = gradient.len() / bytes;
        let columns = self.projection.columns;
        let mut done = 0;
        while done < elements {
            // A part of a row, or whole rows.
            let (row, column) = (self.next / columns, self.next % columns);
            let left = elements - done;
            let count = if column > 0 || left < columns {
                left.min(columns - column)
            } else {
                left / columns * columns
            };
            let piece = &gradient[done * bytes..(done + count) * bytes];
            self.add_rows(piece, row, column, count);
            self.next += count;
            done += count;
        }
    }

    /// The measurements.
    ///
    /// # Panics
    /// When elements are missing.
    pub fn finish(mut self) -> Projected {
        self.complete();
        assert_eq!(self.share, 0..self.projection.elements(), "a whole gradient");
        self.set_sums();
        self.projected
    }

    /// Adds the elements that wait for more.
    ///
    /// # Panics
    /// When elements are missing.
    pub(super) fn complete(&mut self) {
        self.add_waiting();
        assert_eq!(self.next, self.share.end, "all elements");
    }

    /// Adds up the sums of each channel, whether it is complete or not.
    pub(super) fn set_sums(&mut self) {
        if self.projection.by_column() {
            self.projected.set_sums(self.sums.iter().copied());
        } else {
            let sum = |s: &[f64; SUMS]| ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
            self.projected.set_sums(self.sums.as_chunks().0.iter().map(sum));
        }
    }

    /// Whole rows, or a part of one that begins at `column`.
    fn add_rows(&mut self, piece: &[u8], row: usize, column: usize, count: usize) {
        let Self { projection, dtype, tiles, threads, projected, sums, share, .. } = self;
        let rank = projection.rank;
        let begin = projection.channels_of(share).start;
        let width = count.min(projection.columns);
        let rows = count / width;
        let threads = if count * rank < SINGLE_THREAD_MAX_PRODUCTS { 1 } else { *threads };
        let (channels, first_channel) =
            if projection.by_column() { (width, column) } else { (rows, row - begin) };
        let sums_each = projection.sums_each();
        let share = channels.div_ceil(threads).max(1).next_multiple_of(CHANNELS);
        let projected = &mut projected.values_mut()[first_channel * rank..][..channels * rank];
        let tiles = tiles.as_chunks().0;
        let sums = &mut sums[first_channel * sums_each..][..channels * sums_each];
        std::thread::scope(|scope| {
            let parts = projected.chunks_mut(share * rank).zip(sums.chunks_mut(share * sums_each));
            for (index, (projected, sums)) in parts.enumerate() {
                let (projection, dtype) = (&*projection, *dtype);
                let mut run = move || {
                    let piece =
                        GradientPiece { projection, dtype, tiles, bytes: piece, width, rows, row, column };
                    piece.add(index * share, projected, sums);
                };
                if channels <= share {
                    run();
                } else {
                    crate::threads::spawn_or_run(scope, run);
                }
            }
        });
    }
}

/// Whole rows of a gradient, or a part of one.
struct GradientPiece<'a> {
    projection: &'a Projection,
    dtype: Dtype,
    tiles: &'a [[f32; LANES]],
    bytes: &'a [u8],
    width: usize,
    rows: usize,
    row: usize,
    column: usize,
}

impl GradientPiece<'_> {
    /// Adds the channels from number `first` of the piece on, as many as there is room for.
    fn add(&self, first: usize, projected: &mut [f32], sums: &mut [f64]) {
        let Self { projection, tiles, width, rows, .. } = *self;
        let rank = projection.rank;
        let channels = projected.len() / rank;
        let by_column = projection.by_column();
        let sums_each = projection.sums_each();
        // Rectangles of some channels, and of as much of their depth as fits.
        let depth = if by_column { rows } else { width };
        let depth_step = depth.min(if by_column { 64 } else { MAX_WIDENED_ELEMENTS / CHANNELS });
        let channel_step = (MAX_WIDENED_ELEMENTS / depth_step / CHANNELS * CHANNELS).max(CHANNELS);
        let mut values = Vec::new();
        for at in (0..channels).step_by(channel_step) {
            let count = channel_step.min(channels - at);
            let projected = &mut projected[at * rank..][..count * rank];
            let sums = &mut sums[at * sums_each..][..count * sums_each];
            for begin in (0..depth).step_by(depth_step) {
                let deep = depth_step.min(depth - begin);
                values.clear();
                if by_column {
                    (begin..begin + deep)
                        .for_each(|row| self.widen(row * width + first + at, count, &mut values));
                } else {
                    (first + at..first + at + count)
                        .for_each(|row| self.widen(row * width + begin, deep, &mut values));
                }
                let strides = if by_column { (1, count) } else { (deep, 1) };
                let first_depth = begin + if by_column { self.row } else { self.column };
                let rectangle = Rectangle {
                    values: &values,
                    channels: count,
                    strides,
                    first: first_depth,
                    count: deep,
                    depth: projection.depth(),
                    rank,
                    tiles,
                };
                project(&rectangle, projected);
                add_squares(&rectangle, sums);
            }
        }
    }

    /// Appends elements of the piece, in fp32.
    fn widen(&self, first: usize, count: usize, values: &mut Vec<f32>) {
        let bytes = self.dtype.bytes();
        let source = &self.bytes[first * bytes..(first + count) * bytes];
        let start = values.len();
        values.resize(start + count, 0.0);
        let target = &mut values[start..];
        let (pairs, quadruples) = (source.as_chunks::<2>().0, source.as_chunks::<4>().0);
        match self.dtype {
            Dtype::F32 => {
                target
                    .iter_mut()
                    .zip(quadruples)
                    .for_each(|(value, &bytes)| *value = f32::from_ne_bytes(bytes));
            }
            Dtype::F16 => target
                .iter_mut()
                .zip(pairs)
                .for_each(|(value, &bytes)| *value = widen_f16(u16::from_ne_bytes(bytes))),
            // SAFETY: any bytes are numbers.
            Dtype::Bf16 => match unsafe { source.align_to::<u16>() } {
                ([], halves, []) => widen_bf16_slice(target, halves),
                _ => target.iter_mut().zip(pairs).for_each(|(value, &bytes)| {
                    *value = f32::from_bits(u32::from(u16::from_ne_bytes(bytes)) << 16);
                }),
            },
        }
    }
}

kernel! {
    /// Adds the products of a rectangle's elements with the random matrix.
    pub fn project / project_with(rectangle: &Rectangle<'_>, projected: &mut [f32]) = project_body::<2>, project_body::<1>;
}

kernel! {
    /// Adds the squares of a rectangle's elements: (channels, [`SUMS`]), or (channels) where channels
    /// lie side by side.
    pub fn add_squares / add_squares_with(rectangle: &Rectangle<'_>, sums: &mut [f64]) = squares_body;
}

/// `TILES` are read at a time: two of them and [`CHANNELS`] fill the registers of AVX-512, one fills AVX2's.
#[inline(always)]
fn project_body<const TILES: usize>(rectangle: &Rectangle<'_>, projected: &mut [f32]) {
    let tiles = rectangle.rank.div_ceil(LANES);
    for tile in (0..tiles / TILES * TILES).step_by(TILES) {
        project_tiles::<TILES>(rectangle, tile, projected);
    }
    for tile in tiles / TILES * TILES..tiles {
        project_tiles::<1>(rectangle, tile, projected);
    }
}

#[inline(always)]
fn project_tiles<const TILES: usize>(rectangle: &Rectangle<'_>, tile: usize, projected: &mut [f32]) {
    let Rectangle { first, count, depth, rank, tiles, .. } = *rectangle;
    let numbers: [&[[f32; LANES]]; TILES] =
        std::array::from_fn(|k| &tiles[(tile + k) * depth + first..][..count]);
    let lanes = tile * LANES;
    let width = (TILES * LANES).min(rank - lanes);
    let whole = rectangle.channels / CHANNELS * CHANNELS;
    for channel in (0..whole).step_by(CHANNELS) {
        let projected = &mut projected[channel * rank + lanes..];
        add_channels::<CHANNELS, TILES>(rectangle, channel, numbers, projected, width);
    }
    for channel in whole..rectangle.channels {
        let projected = &mut projected[channel * rank + lanes..];
        add_channels::<1, TILES>(rectangle, channel, numbers, projected, width);
    }
}

/// Some channels times as many ranks as the tiles have; `width` of them count.
#[inline(always)]
fn add_channels<const N: usize, const TILES: usize>(
    rectangle: &Rectangle<'_>,
    channel: usize,
    numbers: [&[[f32; LANES]]; TILES],
    projected: &mut [f32],
    width: usize,
) {
    let Rectangle { values, strides: (apart, along), rank, count, .. } = *rectangle;
    let mut sums = [[[0.0; LANES]; TILES]; N];
    for (k, sums) in sums.iter_mut().enumerate() {
        sums.as_flattened_mut()[..width].copy_from_slice(&projected[k * rank..][..width]);
    }
    for at in 0..count {
        let factors: [f32; N] = std::array::from_fn(|k| values[(channel + k) * apart + at * along]);
        for (tile, numbers) in numbers.iter().enumerate() {
            for (sums, factor) in sums.iter_mut().zip(factors) {
                sums[tile] = add_products(sums[tile], factor, &numbers[at]);
            }
        }
    }
    for (k, sums) in sums.iter().enumerate() {
        projected[k * rank..][..width].copy_from_slice(&sums.as_flattened()[..width]);
    }
}

/// By value, so that the compiler keeps the sums in registers: through a reference to an array of them it computed lane
/// after lane, 15 times slower with AVX-512.
#[inline(always)]
fn add_products(mut sums: [f32; LANES], factor: f32, numbers: &[f32; LANES]) -> [f32; LANES] {
    for (sum, number) in sums.iter_mut().zip(numbers) {
        *sum = factor.mul_add(*number, *sum);
    }
    sums
}

#[inline(always)]
fn squares_body(rectangle: &Rectangle<'_>, sums: &mut [f64]) {
    let Rectangle { values, channels, strides: (_, along), first, count, .. } = *rectangle;
    let square = |value: f32| f64::from(value) * f64::from(value);
    if along > 1 || sums.len() == channels {
        for row in values.chunks(channels) {
            sums.iter_mut().zip(row).for_each(|(sum, &value)| *sum += square(value));
        }
        return;
    }
    for (sums, row) in sums.as_chunks_mut::<SUMS>().0.iter_mut().zip(values.chunks(count)) {
        // An element's sum depends on its place in the channel, and on nothing else.
        let head = (SUMS - first % SUMS) % SUMS;
        let (head, rest) = row.split_at(head.min(row.len()));
        head.iter().enumerate().for_each(|(k, &value)| sums[(first + k) % SUMS] += square(value));
        let (groups, tail) = rest.as_chunks::<SUMS>();
        for group in groups {
            sums.iter_mut().zip(group).for_each(|(sum, &value)| *sum += square(value));
        }
        sums.iter_mut().zip(tail).for_each(|(sum, &value)| *sum += square(value));
    }
}
