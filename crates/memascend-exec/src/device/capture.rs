use std::sync::Arc;

use super::{Copies, DeviceEvent, Outcome, Promise};
use crate::{GradientId, Gradients, Result};
use memascend_kernels::GradientStats;

/// A gradient on its way from the device.
pub struct Capture(pub(super) Arc<Outcome<GradientStats>>);

impl Capture {
    /// Waits until the gradient is kept; spills may still be on their way to the SSD. Gives its statistics.
    pub fn wait(&self) -> Result<GradientStats> {
        self.0.wait()
    }

    /// Whether the capture has ended, well or not: the device's memory is read no more.
    pub fn is_done(&self) -> bool {
        self.0.is_done()
    }
}

/// Where a gradient comes from.
pub(crate) struct Source {
    pub(crate) start: usize,
    pub(crate) address: usize,
    pub(crate) numel: usize,
    pub(crate) accumulate: bool,
    /// Address and number of the blocks' sums of squares.
    pub(crate) sums: Option<(usize, usize)>,
    pub(crate) ready: DeviceEvent,
}

/// The capture, for a thread of the device's. From now on the gradient is being captured.
pub(super) fn job(
    copies: Arc<Copies>,
    gradients: Arc<Gradients>,
    id: GradientId,
    source: Source,
    promise: Promise<GradientStats>,
) -> impl FnOnce() + Send {
    let arriving = gradients.begin_capture(id, &source);
    move || {
        // SAFETY: the caller of `DeviceLink::capture` vouches for the source until the capture has ended.
        let captured = copies.enter().and_then(|()| unsafe { gradients.capture_from(&copies, id, &source) });
        // Before anybody hears of the end: who closes the store next must be the last to hold it.
        drop((copies, gradients));
        arriving.end(Ok(()));
        promise.keep(captured);
    }
}
