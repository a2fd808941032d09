//! Gradients that are applied as they come from the device.

use std::sync::Arc;

use memascend_kernels::ChannelFactors;
use memascend_mem::{Lease, LeaseSlice};

use super::{Copies, DeviceEvent, DeviceFuture, Download, Promise};
use crate::executor::ArrivingUpdate;
use crate::{Result, Staging};

/// A gradient on its way from the device to its update.
pub struct Applying(pub(super) Arc<DeviceFuture<Option<f64>>>);

impl Applying {
    /// Waits until the update has all of the gradient, and returns the norm of the step if the update
    /// takes factors. The update itself may still be under way.
    pub fn wait(&self) -> Result<Option<f64>> {
        self.0.wait()
    }

    /// Whether the device memory is no longer read: the update has all of the gradient, or has failed.
    pub fn is_done(&self) -> bool {
        self.0.is_done()
    }
}

/// A gradient in device memory, to be applied.
pub struct AppliedGradient {
    /// Device address of the elements.
    pub address: usize,
    /// Bytes of all of them.
    pub bytes: usize,
    /// The event after which they may be read.
    pub ready: DeviceEvent,
    /// The event before which the unit's weights are not written: a copy to the device reads them.
    pub unread: Option<DeviceEvent>,
    /// Inputs of the channels' factors, for an update that takes them.
    pub projected: Option<ProjectedNumbers>,
}

/// Measurements of a gradient by a device, and how they become the factors of the channels.
pub struct ProjectedNumbers {
    /// Device address of the numbers.
    pub address: usize,
    /// Bytes of all of them.
    pub bytes: usize,
    /// Finds the factors, and the norm of the step, from the numbers in host memory.
    pub find: Box<FindFactors>,
}

/// See [`ProjectedNumbers::find`].
pub type FindFactors = dyn FnOnce(&[u8]) -> Result<(Arc<ChannelFactors>, f64)> + Send;

/// The application as a job for a thread of the device.
pub(super) fn job(
    copies: Arc<Copies>,
    staging: Arc<Staging>,
    source: AppliedGradient,
    mut update: ArrivingUpdate,
    promise: Promise<Option<f64>>,
) -> impl FnOnce() + Send {
    move || {
        // SAFETY: the caller of `DeviceLink::apply` vouches for the source until the gradient is applied.
        let applied = copies.enter().and_then(|()| unsafe { apply(&copies, &staging, source, &mut update) });
        // Drop the staging before signalling, so that a caller that closes the store then is the last to
        // hold it.
        drop((copies, staging));
        update.end(applied.as_ref().map(|_| ()).map_err(Clone::clone));
        promise.resolve(applied);
    }
}

/// # Safety
/// As [`DeviceLink::apply`](super::DeviceLink::apply).
unsafe fn apply(
    copies: &Copies,
    staging: &Staging,
    source: AppliedGradient,
    update: &mut ArrivingUpdate,
) -> Result<Option<f64>> {
    let AppliedGradient { address, bytes, ready, unread, projected } = source;
    copies.download_after(&ready)?;
    let mut norm = None;
    if let Some(ProjectedNumbers { address, bytes, find }) = projected {
        // SAFETY: the caller's promise.
        let (factors, found) = find(&unsafe { bytes_of(copies, staging, address, bytes) }?)?;
        update.set_factors(&factors);
        norm = Some(found);
    }
    if let Some(unread) = unread {
        copies.wait_for(&unread)?;
    }
    let piece_bytes = update.chunk_bytes();
    let download = Download { source: address, piece_bytes, bytes, keep: true };
    let take = |index, chunk, _, _| update.arrived(index, chunk);
    // SAFETY: the caller's promise.
    unsafe { copies.download(staging, download, take)? };
    Ok(norm)
}

/// Copies bytes of the device to host memory.
///
/// # Safety
/// As [`Copies::download`].
unsafe fn bytes_of(copies: &Copies, staging: &Staging, source: usize, bytes: usize) -> Result<Vec<u8>> {
    let piece_bytes = staging.chunk_bytes();
    let mut found = Vec::with_capacity(bytes);
    let take = |_: usize, chunk: Arc<Lease>, _: bool, length: usize| {
        let piece = LeaseSlice::new(chunk, 0, length);
        // SAFETY: the copy has ended and the chunk is ours alone.
        found.extend_from_slice(unsafe { piece.as_slice() });
        Ok(())
    };
    // SAFETY: the caller's promise.
    unsafe { copies.download(staging, Download { source, piece_bytes, bytes, keep: false }, take)? };
    Ok(found)
}
