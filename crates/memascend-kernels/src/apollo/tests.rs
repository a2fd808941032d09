//! The projection against sums in fp64, and the same bits for every cut, thread count and instruction
//! set.

use proptest::prelude::*;

use super::super::{
    Algorithm, ChannelFactors, Dtype, Isa, Moments, Rule, StepScalars, Weight, step_channels_with,
};
use super::{Projection, Projector};

fn gradient(elements: usize) -> Vec<f32> {
    (0..elements).map(|i| ((i * 2_654_435_761) % 1000) as f32 / 300.0 - 1.5).collect()
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_ne_bytes()).collect()
}

fn bits(projector: Projector) -> (Vec<u32>, Vec<u64>) {
    let (projected, sums) = projector.finish();
    (projected.iter().map(|x| x.to_bits()).collect(), sums.iter().map(|x| x.to_bits()).collect())
}

#[test]
fn the_projection_is_the_product_with_the_random_matrix() {
    for (rows, columns) in [(70, 30), (30, 70), (17, 17), (1, 40), (40, 1)] {
        for rank in [1, 5, 16, 33] {
            let projection = Projection { rows, columns, rank, seed: 3, redraw: 2 };
            let (values, matrix) = (gradient(rows * columns), projection.matrix());
            let mut projector = Projector::new(projection, Dtype::F32, 1);
            projector.add(&bytes(&values));
            let (projected, sums) = projector.finish();
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
        let mut whole = Projector::new(projection, dtype, 1);
        whole.add(&bytes);
        let mut pieces = Projector::new(projection, dtype, 3);
        let mut ends: Vec<usize> = cuts.into_iter().map(|cut| cut.min(rows * columns)).collect();
        ends.push(rows * columns);
        ends.sort_unstable();
        let mut start = 0;
        for end in ends {
            pieces.add(&bytes[start * dtype.bytes()..end * dtype.bytes()]);
            start = end;
        }
        prop_assert_eq!(bits(pieces), bits(whole));
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
