//! Gradients captured from the device.
//!
//! A gradient is measured where it is: a warp sums the squares of a block of 65,536 elements in the order of
//! the CPU's kernels, so the norm has the same bits wherever it was taken. A gradient that is added to a sum
//! on the host is added, and measured, on the host.

use std::sync::Arc;

use crossbeam_channel::{Receiver, TryRecvError};
use memascend_kernels::GradientStats;

use super::{Copies, DeviceEvent, DeviceFuture};
use crate::Result;
use crate::gradients::{Arrivals, Arriving};

/// A gradient on its way from the device.
pub struct Capture(pub(super) Arc<DeviceFuture<GradientStats>>);

impl Capture {
    /// Waits until the gradient is captured, and returns its statistics. Spills to the SSD may
    /// still be under way.
    pub fn wait(&self) -> Result<GradientStats> {
        self.0.wait()
    }

    /// Whether the capture has ended, with or without an error: the device memory is no longer
    /// read.
    pub fn is_done(&self) -> bool {
        self.0.is_done()
    }
}

/// A gradient in device memory, to be captured.
#[derive(Debug, Clone)]
pub struct DeviceGradient {
    /// First element within the tensor.
    pub start: usize,
    /// Device address of the elements.
    pub address: usize,
    /// Number of elements.
    pub numel: usize,
    /// Whether to add it to the gradient so far.
    pub accumulate: bool,
    /// Device address and number of the sums of squares of its blocks (f64). Behind them lies a
    /// flag (u32), which is not zero if an element is not finite. With the sums the host never
    /// reads the elements.
    pub sums: Option<(usize, usize)>,
    /// The event after which the elements may be read.
    pub ready: DeviceEvent,
}

/// A gradient for the thread of captures.
pub(super) enum Coming {
    Captured(Arriving),
    /// Applied by a job, which waits for chunks.
    Applied(Box<dyn FnOnce() + Send>),
}

/// Captures gradients, in a thread of its own, until no more can come. Where pieces have arrived, the copies of further
/// gradients are enqueued before those pieces are taken over.
pub(super) fn run(copies: &Copies, coming: &Receiver<Coming>) {
    let mut arrivals = Arrivals::new(copies);
    loop {
        let next = if arrivals.is_empty() {
            coming.recv().map_err(|_| TryRecvError::Disconnected)
        } else {
            if coming.is_empty() {
                arrivals.wait();
            }
            coming.try_recv()
        };
        match next {
            // SAFETY: the caller of `DeviceLink::capture` vouches for the source until the capture has ended.
            Ok(Coming::Captured(gradient)) => unsafe { arrivals.add(gradient) },
            Ok(Coming::Applied(job)) => {
                // A thread that waits for chunks holds none.
                while !arrivals.is_empty() {
                    arrivals.settle();
                }
                job();
            }
            Err(TryRecvError::Disconnected) if arrivals.is_empty() => return,
            Err(_) => arrivals.settle(),
        }
    }
}
