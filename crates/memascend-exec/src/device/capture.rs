//! Gradients captured from the device.

use std::sync::Arc;

use super::{Copies, DeviceEvent, Outcome, Promise};
use crate::{GradientId, Gradients, Result};
use memascend_kernels::GradientStats;

/// A gradient on its way from the device.
pub struct Capture(pub(super) Arc<Outcome<GradientStats>>);

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

/// The capture as a job for a thread of the device. The gradient counts as being captured from now
/// on.
pub(super) fn job(
    copies: Arc<Copies>,
    gradients: Arc<Gradients>,
    id: GradientId,
    source: DeviceGradient,
    promise: Promise<GradientStats>,
) -> impl FnOnce() + Send {
    let arriving = gradients.begin_capture(id, &source);
    move || {
        // SAFETY: the caller of `DeviceLink::capture` vouches for the source until the capture has
        // ended.
        let captured = copies.enter().and_then(|()| unsafe { gradients.capture_from(&copies, id, &source) });
        // Drop the gradients before signalling, so that a caller that closes the store then is the
        // last to hold it.
        drop((copies, gradients));
        arriving.end(Ok(()));
        promise.keep(captured);
    }
}
