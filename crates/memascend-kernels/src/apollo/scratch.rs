//! Memory of projections, used again by the next ones: the first use of fresh pages takes as long as half of a
//! projection's products.

use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, PoisonError};

/// Purpose of numbers. Memory is reused for the same purpose, which needs about as many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// The random matrix.
    Matrix,
    /// A projected gradient.
    Projected,
    /// The moments of a projected gradient.
    Moments,
}

/// Memory that is free at the moment; it goes back to the system with the scratch.
#[derive(Debug, Default)]
pub struct Scratch {
    free: Mutex<[Vec<Vec<f32>>; 3]>,
}

impl Scratch {
    /// As many numbers, of any value.
    pub fn take(self: &Arc<Self>, purpose: Purpose, count: usize) -> Numbers {
        let free = self.free.lock().unwrap_or_else(PoisonError::into_inner)[purpose as usize].pop();
        let mut values = free.unwrap_or_default();
        if values.capacity() < count {
            // Not by growing, which would copy.
            values = Vec::with_capacity(count);
        }
        values.resize(count, 0.0);
        Numbers { values, purpose, scratch: Arc::clone(self) }
    }
}

/// Numbers of a [`Scratch`], which gets their memory back when they are dropped.
#[derive(Debug)]
pub struct Numbers {
    values: Vec<f32>,
    purpose: Purpose,
    scratch: Arc<Scratch>,
}

impl Deref for Numbers {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.values
    }
}

impl DerefMut for Numbers {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.values
    }
}

impl Drop for Numbers {
    fn drop(&mut self) {
        let values = std::mem::take(&mut self.values);
        self.scratch.free.lock().unwrap_or_else(PoisonError::into_inner)[self.purpose as usize].push(values);
    }
}
