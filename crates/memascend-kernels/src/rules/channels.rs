//! The step of APOLLO: each channel of a matrix has a factor of its own.

// As a step has them, with the instruction set and the factors.
#![allow(clippy::too_many_arguments)]

use std::marker::PhantomData;

use super::super::dispatch::Plain;
use super::super::dispatch::{KernelBody, Level, half_kernel};
#[cfg(target_arch = "x86_64")]
use super::super::dispatch::{Narrow, Wide};
use super::elementwise::Channelwise;
use super::fused::{self, UpdateLoop};
use super::scalars::Constants;
use super::stochastic::Randomness;
use super::{
    Algorithm, BLOCK, Moments, Rule, STAGED, StepScalars, bytes_of, follow, round_block, widen_block,
};

/// The factors of a matrix's channels in one step, by [`channel_factors`](crate::channel_factors).
#[derive(Clone, Debug, PartialEq)]
pub struct ChannelFactors {
    factors: Vec<f32>,
    columns: usize,
    by_column: bool,
}

impl ChannelFactors {
    /// Of a matrix with rows of `columns` elements, whose channels are its columns or its rows.
    ///
    /// # Panics
    /// When channels are columns, and there is not a factor for each.
    pub fn new(factors: Vec<f32>, columns: usize, by_column: bool) -> Self {
        assert!(!by_column || factors.len() == columns, "a factor for each column");
        Self { factors, columns, by_column }
    }

    /// The factors of the elements from `first` on.
    #[inline(always)]
    fn fill(&self, first: u64, target: &mut [f32]) {
        let (mut row, mut column) =
            ((first / self.columns as u64) as usize, (first % self.columns as u64) as usize);
        let mut rest = target;
        while !rest.is_empty() {
            let count = rest.len().min(self.columns - column);
            let (part, after) = std::mem::take(&mut rest).split_at_mut(count);
            if self.by_column {
                part.copy_from_slice(&self.factors[column..column + count]);
            } else {
                part.fill(self.factors[row]);
            }
            (rest, row, column) = (after, row + 1, 0);
        }
    }
}

half_kernel! {
    /// One step of [`Algorithm::Apollo`] on the elements `first_element ..` of a matrix, as many as
    /// `gradient` holds: as [`step`](super::step), with the factors of the matrix's channels.
    ///
    /// # Panics
    /// As [`step`](super::step), and when the rule or the scalars belong to another algorithm.
    pub fn step_channels / step_channels_with(
        rule: Rule,
        weight: &mut [u8],
        planes: &mut [&mut [u8]],
        gradient: &[u8],
        first_element: u64,
        scalars: &StepScalars,
        factors: &ChannelFactors,
    ) = step_body::<Wide>, step_body::<Narrow>, step_body::<Plain>;
}

#[inline(always)]
fn step_body<L: Level>(
    rule: Rule,
    weight: &mut [u8],
    planes: &mut [&mut [u8]],
    gradient: &[u8],
    first_element: u64,
    scalars: &StepScalars,
    factors: &ChannelFactors,
) {
    assert_eq!(rule.algorithm, Algorithm::Apollo, "a rule with factors of channels");
    assert_eq!(rule.moments, Moments::F32, "the planes of a step with factors are its master alone");
    let Constants::Apollo { negative_decay } = scalars.constants else {
        panic!("the scalars are those of another algorithm");
    };
    let element_bytes = rule.weight.bytes();
    let elements = gradient.len() / element_bytes;
    assert_eq!(gradient.len(), elements * element_bytes, "gradient");
    rule.check(&rule.layout(), weight.len(), planes, elements, first_element);
    let master = match planes {
        [master] => &mut **master,
        _ => &mut [],
    };
    let update = Channelwise { negative_decay };
    let matrix = Matrix { weight, master, gradient, first_element, factors, update, scalars };
    fused::step_matrix::<L>(rule.weight, matrix);
}

/// The arrays of a step with factors; lengths are checked.
pub(super) struct Matrix<'a> {
    weight: &'a mut [u8],
    master: &'a mut [u8],
    gradient: &'a [u8],
    first_element: u64,
    factors: &'a ChannelFactors,
    update: Channelwise,
    scalars: &'a StepScalars,
}

/// A step of one kind of weight. `HALVES` says that it is fp16, which is staged.
pub(super) struct MatrixPass<'a, L, R, const HALVES: bool> {
    pub(super) matrix: Matrix<'a>,
    pub(super) kinds: PhantomData<(L, R)>,
}

impl<L: Level, R: UpdateLoop, const HALVES: bool> KernelBody for MatrixPass<'_, L, R, HALVES> {
    #[inline(always)]
    fn run(self) {
        let Matrix { weight, master, gradient, first_element, factors, update, scalars } = self.matrix;
        let scalars = *scalars;
        let element_bytes = if HALVES { 2 } else { R::WEIGHT_BYTES };
        let elements = gradient.len() / element_bytes;
        let master_bytes = master.len().checked_div(elements).unwrap_or(0);
        let randomness = Randomness::new(scalars.seed, scalars.step);
        let mut staged_factors = [[0.0; BLOCK]; STAGED];
        let mut staged_gradient = [[0.0; BLOCK]; STAGED];
        let mut done = 0;
        while done < elements {
            let at = first_element + done as u64;
            // Random numbers need elements whose index has the same upper half.
            let unit = (STAGED * BLOCK) as u64;
            let count = (unit - at % unit).min((elements - done) as u64) as usize;
            factors.fill(at, &mut staged_factors.as_flattened_mut()[..count]);
            let of_channels = &mut bytes_of(&mut staged_factors)[..count * 4];
            let flat = done * element_bytes..(done + count) * element_bytes;
            let (index, keys) = (at as u32, randomness.keys(at));
            let (weight, gradient) = (&mut weight[flat.clone()], &gradient[flat]);
            let master = &mut master[done * master_bytes..(done + count) * master_bytes];
            let none = (&mut [][..], &mut [][..]);
            if HALVES {
                widen_block::<L::Half>(gradient, staged_gradient.as_flattened_mut());
                let gradient = &bytes_of(&mut staged_gradient)[..count * 4];
                follow::<L::Half>(master, weight);
                R::run(
                    master,
                    &mut [],
                    gradient,
                    of_channels,
                    none.0,
                    none.1,
                    index,
                    keys,
                    &update,
                    &scalars,
                );
                round_block::<L::Half>(master, weight);
            } else {
                R::run(weight, master, gradient, of_channels, none.0, none.1, index, keys, &update, &scalars);
            }
            done += count;
        }
    }
}
