//! The projection against sums in fp64, and the same bits for every cut, thread count and instruction
//! set.

use std::sync::Arc;

use proptest::prelude::*;

use super::super::rules::mix;
use super::super::{
    Algorithm, ChannelFactors, Dtype, Isa, Moments, Rule, StepScalars, Weight, step_channels_with,
};
use super::factors::{ProjectedScalars, step_projected_with};
use super::matrix::{BLOCK, normal, normals_with};
use super::projection::{Rectangle, SUMS, add_squares_with, project_with};
use super::{
    FactorOptions, Projected, Projection, Projector, Scratch, channel_factors, factors_of, squares_of,
};

fn gradient(elements: usize) -> Vec<f32> {
    (0..elements).map(|i| ((i * 2_654_435_761) % 1000) as f32 / 300.0 - 1.5).collect()
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_ne_bytes()).collect()
}

fn projector(projection: Projection, dtype: Dtype, threads: usize) -> Projector {
    Projector::new(projection, dtype, threads, &Arc::default())
}

fn bits(projector: Projector) -> (Vec<u32>, Vec<u64>) {
    let projected = projector.finish();
    let bits = projected.values().iter().map(|x| x.to_bits()).collect();
    (bits, projected.sums().iter().map(|x| x.to_bits()).collect())
}

#[test]
fn the_projection_is_the_product_with_the_random_matrix() {
    for (rows, columns) in [(70, 30), (30, 70), (17, 17), (1, 40), (40, 1)] {
        for rank in [1, 5, 16, 33] {
            let projection = Projection { rows, columns, rank, seed: 3, redraw: 2 };
            let (values, matrix) = (gradient(rows * columns), projection.matrix());
            let mut projector = projector(projection, Dtype::F32, 1);
            projector.add(&bytes(&values));
            let measured = projector.finish();
            let (projected, sums) = (measured.values(), measured.sums());
            let of = |channel: usize, at: usize| {
                let (row, column) = if projection.by_column() { (at, channel) } else { (channel, at) };
                f64::from(values[row * columns + column])
            };
            for channel in 0..projection.channels() {
                let squares: f64 = (0..projection.depth()).map(|at| of(channel, at).powi(2)).sum();
                assert!((sums[channel] - squares).abs() <= 1e-12 * squares);
                for number in 0..rank {
                    let terms = (0..projection.depth())
                        .map(|at| of(channel, at) * f64::from(matrix[at * rank + number]));
                    let expected: f64 = terms.sum();
                    let found = f64::from(projected[channel * rank + number]);
                    assert!((found - expected).abs() <= 1e-5 * squares.sqrt(), "{found} against {expected}");
                }
            }
        }
    }
}

#[test]
fn the_random_matrix_is_the_same_on_every_instruction_set() {
    for block in 0..512 {
        let (key, indices) = (mix(block), std::array::from_fn(|at| block * BLOCK as u64 + at as u64));
        let expected = indices.map(|index| ((normal(mix(key ^ index)) / 16.0) as f32).to_bits());
        for isa in Isa::available() {
            let mut numbers = [0.0; BLOCK];
            normals_with(isa, key, 16.0, &indices, &mut numbers);
            assert_eq!(numbers.map(f32::to_bits), expected, "{isa:?}");
        }
    }
}

/// Channels and tiles that fill no group, in both directions.
#[test]
fn products_and_squares_have_the_same_bits_on_every_instruction_set() {
    for (channels, depth, rank) in [(7, 90, 50), (4, 33, 16), (1, 5, 100)] {
        let projection = Projection { rows: 200, columns: 200, rank, seed: 5, redraw: 1 };
        let (values, tiles) = (gradient(channels * depth), projection.tiles(1, &Arc::default()));
        for strides in [(depth, 1), (1, channels)] {
            let rectangle = Rectangle {
                values: &values,
                channels,
                strides,
                first: 20,
                count: depth,
                depth: projection.depth(),
                rank,
                tiles: tiles.as_chunks().0,
            };
            let run = |isa: Isa| {
                let mut projected = vec![0.5; channels * rank];
                project_with(isa, &rectangle, &mut projected);
                let mut squares = vec![0.25; channels * if strides.1 > 1 { 1 } else { SUMS }];
                add_squares_with(isa, &rectangle, &mut squares);
                (projected, squares)
            };
            for isa in Isa::available() {
                assert_eq!(run(isa), run(Isa::Baseline), "{isa:?}");
            }
        }
    }
}

/// Ranks that fill no tile, and a matrix that several threads make.
#[test]
fn tiles_hold_the_random_matrix() {
    for (depth, rank) in [(40, 1), (7, 33), (900, 100), (2048, 17)] {
        let projection = Projection { rows: depth, columns: depth, rank, seed: 5, redraw: 1 };
        let matrix = projection.matrix();
        for threads in [1, 3] {
            // In memory that was used before.
            let scratch = Arc::default();
            projection.tiles(1, &scratch).fill(f32::NAN);
            let tiles = projection.tiles(threads, &scratch);
            for (tile, lanes) in tiles.as_chunks::<16>().0.iter().enumerate() {
                let (at, first) = (tile % depth, tile / depth * lanes.len());
                let width = lanes.len().min(rank - first);
                assert_eq!(lanes[..width], matrix[at * rank + first..][..width]);
                assert!(lanes[width..].iter().all(|&lane| lane == 0.0));
            }
        }
    }
}

/// Sums of a channel that fill no register, and moments that several threads update.
#[test]
fn factors_have_the_same_bits_on_every_instruction_set_and_with_any_threads() {
    for (channels, rank) in [(9, 1), (5, 37), (301, 256)] {
        let projection = Projection { rows: channels, columns: 1, rank, seed: 1, redraw: 0 };
        let mut measured = Projected::room(projection, &Arc::new(Scratch::default()));
        measured.numbers_mut().copy_from_slice(&gradient(channels * (rank + 2)));
        let sums: Vec<f64> = (1..=channels).map(|channel| channel as f64).collect();
        measured.set_sums(sums.iter().copied());
        assert_eq!(measured.sums(), sums);
        let moments = || (vec![0.25; channels * rank], vec![0.5; channels * rank]);
        let scalars = ProjectedScalars::new(0.01, (0.9, 0.999), 1e-6, 3, 0.7);
        let step = |isa: Isa| {
            let ((mut first, mut second), mut squares) = (moments(), vec![(0.0, 0.0); channels]);
            step_projected_with(isa, &scalars, measured.values(), &mut first, &mut second, &mut squares);
            (first, second, squares)
        };
        let expected = step(Isa::Baseline);
        for isa in Isa::available() {
            assert_eq!(step(isa), expected, "{isa:?}");
        }
        for whole in [false, true] {
            let options = FactorOptions {
                lr: 0.01,
                betas: (0.9, 0.999),
                eps: 1e-6,
                scale: 4.0,
                whole,
                scale_front: false,
                step: 3,
                grad_scale: 0.7,
                norm_before: Some(0.1),
            };
            let factors = |threads: usize| {
                let ((mut first, mut second), mut factors) = (moments(), vec![0.0; channels]);
                let norm =
                    channel_factors(&options, &measured, &mut first, &mut second, &mut factors, threads);
                (norm, factors, first, second)
            };
            assert_eq!(factors(3), factors(1));
            assert_eq!((factors(1).2, factors(1).3), (expected.0.clone(), expected.1.clone()));
        }
    }
}

/// Gradients large enough that threads are started, and that pieces are put together.
#[test]
fn large_gradients_have_the_same_bits_in_pieces_and_with_threads() {
    for (rows, columns) in [(1000, 300), (300, 1000)] {
        let projection = Projection { rows, columns, rank: 20, seed: 9, redraw: 0 };
        let values = bytes(&gradient(rows * columns));
        let project = |threads: usize, piece: usize| {
            let mut projector = projector(projection, Dtype::F32, threads);
            values.chunks(piece).for_each(|piece| projector.add(piece));
            bits(projector)
        };
        for (threads, piece) in [(3, values.len()), (3, 40_000), (1, 700_000)] {
            assert_eq!(project(threads, piece), project(1, values.len()));
        }
    }
}

proptest! {
    /// Pieces that begin and end within rows, of 16-bit numbers too.
    #[test]
    fn neither_pieces_nor_threads_change_a_bit(
        rows in 1..40usize,
        columns in 1..40usize,
        rank in 1..20usize,
        cuts in prop::collection::vec(0..1600usize, 0..6),
        half in any::<bool>(),
    ) {
        let projection = Projection { rows, columns, rank, seed: 9, redraw: 0 };
        let values = gradient(rows * columns);
        let (dtype, bytes) = if half {
            let halves = values.iter().flat_map(|value| ((value.to_bits() >> 16) as u16).to_ne_bytes());
            (Dtype::Bf16, halves.collect())
        } else {
            (Dtype::F32, bytes(&values))
        };
        let mut whole = projector(projection, dtype, 1);
        whole.add(&bytes);
        let mut pieces = projector(projection, dtype, 3);
        let mut ends: Vec<usize> = cuts.into_iter().map(|cut| cut.min(rows * columns)).collect();
        ends.push(rows * columns);
        ends.sort_unstable();
        let mut start = 0;
        for end in ends {
            pieces.add_now(&bytes[start * dtype.bytes()..end * dtype.bytes()]);
            start = end;
        }
        prop_assert_eq!(bits(pieces), bits(whole));
    }

    /// Shares that begin and end anywhere, some of them empty, of matrices in both directions.
    #[test]
    fn shares_that_are_carried_on_have_the_same_bits(
        rows in 1..40usize,
        columns in 1..40usize,
        rank in 1..20usize,
        cuts in prop::collection::vec(0..1600usize, 0..6),
    ) {
        let projection = Projection { rows, columns, rank, seed: 9, redraw: 0 };
        let bytes = bytes(&gradient(rows * columns));
        let mut whole = projector(projection, Dtype::F32, 1);
        whole.add(&bytes);
        let expected = bits(whole);
        let mut ends: Vec<usize> = cuts.into_iter().map(|cut| cut.min(rows * columns)).collect();
        ends.push(rows * columns);
        ends.sort_unstable();
        let (scratch, mut carried, mut start) = (Arc::default(), Vec::new(), 0);
        let mut found = (Vec::new(), Vec::new());
        for end in ends {
            if start == end {
                continue;
            }
            let mut share = Projector::of_share(projection, start..end, Dtype::F32, 1, &scratch);
            share.go_on(&carried);
            share.add(&bytes[start * 4..end * 4]);
            carried = vec![0; projection.carried_bytes(end)];
            let measured = share.hand_on(&mut carried, &scratch);
            prop_assert_eq!(measured.channels(), projection.completed(&(start..end)).len());
            found.0.extend(measured.values().iter().map(|x| x.to_bits()));
            found.1.extend(measured.sums().iter().map(|x| x.to_bits()));
            start = end;
        }
        prop_assert!(carried.is_empty());
        prop_assert_eq!(found, expected);
    }

    /// Channels whose moments are apart.
    #[test]
    fn squares_of_parts_make_the_factors_of_the_whole(
        channels in 1..40usize,
        rank in 1..20usize,
        cut in 0..40usize,
        whole in any::<bool>(),
        scale_front in any::<bool>(),
    ) {
        let projection = Projection { rows: channels, columns: 1, rank, seed: 9, redraw: 0 };
        let scratch = Arc::new(Scratch::default());
        let mut measured = Projected::room(projection, &scratch);
        measured.numbers_mut().copy_from_slice(&gradient(channels * (rank + 2)));
        measured.set_sums((1..=channels).map(|channel| channel as f64));
        let options = FactorOptions {
            lr: 0.01,
            betas: (0.9, 0.999),
            eps: 1e-6,
            scale: 4.0,
            whole,
            scale_front,
            step: 3,
            grad_scale: 0.7,
            norm_before: Some(0.1),
        };
        let ((mut first, mut second), mut factors) = ((vec![0.25; channels * rank], vec![0.5; channels * rank]), vec![0.0; channels]);
        let norm = channel_factors(&options, &measured, &mut first, &mut second, &mut factors, 1);
        let cut = cut.min(channels);
        let (mut squares, mut parts) = (Vec::new(), (Vec::new(), Vec::new()));
        for range in [0..cut, cut..channels] {
            let mut part = Projected::room_of(projection, range.len(), &scratch);
            measured.copy_part(range.clone(), part.numbers_mut());
            let (mut first, mut second) = (vec![0.25; range.len() * rank], vec![0.5; range.len() * rank]);
            squares.extend(squares_of(&options, &part, &mut first, &mut second, 1));
            parts.0.extend(first);
            parts.1.extend(second);
        }
        let mut found = vec![0.0; channels];
        prop_assert_eq!(factors_of(&options, &squares, &mut found), norm);
        prop_assert_eq!((found, parts.0, parts.1), (factors, first, second));
    }

    /// A step in pieces, on every instruction set, for each kind of weight.
    #[test]
    fn a_step_has_the_same_bits_in_pieces(
        rows in 1..30usize,
        columns in 1..30usize,
        cut in 0..900usize,
        decays in any::<bool>(),
    ) {
        let elements = rows * columns;
        let by_column = rows < columns;
        let factors = (0..rows.max(columns)).map(|i| 0.01 + i as f32 / 100.0).collect();
        let factors = ChannelFactors::new(factors, columns, by_column);
        let decay = if decays { 0.1 } else { 0.0 };
        let scalars = StepScalars::apollo(0.01, decay, 3).with_grad_scale(0.7).with_seed(5);
        for weight in [Weight::F32, Weight::Bf16Split, Weight::Bf16, Weight::F16Master] {
            let rule = Rule { algorithm: Algorithm::Apollo, moments: Moments::F32, weight };
            let element = weight.bytes();
            let begin: Vec<u8> = (0..elements * element).map(|i| if i % element == element - 1 { 0x3C } else { i as u8 }).collect();
            let gradient: Vec<u8> = begin.iter().rev().map(|byte| byte ^ 3).collect();
            let master = rule.planes().first().map_or(0, |plane| plane.bytes(1));
            let run = |isa: Isa, cut: usize| {
                let (mut weights, mut planes) = (begin.clone(), vec![0; elements * master]);
                for (first, end) in [(0, cut), (cut, elements)] {
                    let plane = &mut planes[first * master..end * master];
                    let mut planes: Vec<&mut [u8]> = if master > 0 { vec![plane] } else { vec![] };
                    let range = first * element..end * element;
                    let weights = &mut weights[range.clone()];
                    step_channels_with(isa, rule, weights, &mut planes, &gradient[range], first as u64, &scalars, &factors);
                }
                (weights, planes)
            };
            let expected = run(Isa::Baseline, elements);
            for isa in Isa::available() {
                prop_assert_eq!(&run(isa, cut.min(elements)), &expected);
            }
        }
    }
}

#[test]
fn each_channel_has_its_factor() {
    let rule = Rule { algorithm: Algorithm::Apollo, moments: Moments::F32, weight: Weight::F32 };
    for (rows, columns) in [(3, 2), (2, 3)] {
        let factors = ChannelFactors::new(vec![1.0, 10.0, 100.0], columns, rows < columns);
        let (mut weights, gradient) = (bytes(&[0.0; 6]), bytes(&[1.0; 6]));
        let scalars = StepScalars::apollo(0.1, 0.0, 1);
        step_channels_with(Isa::best(), rule, &mut weights, &mut [], &gradient, 0, &scalars, &factors);
        let found: Vec<f32> = weights.as_chunks().0.iter().map(|&bytes| f32::from_ne_bytes(bytes)).collect();
        let expected = if rows > columns {
            [-1.0, -1.0, -10.0, -10.0, -100.0, -100.0]
        } else {
            [-1.0, -10.0, -100.0, -1.0, -10.0, -100.0]
        };
        assert_eq!(found, expected);
    }
}
