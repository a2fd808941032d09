use std::sync::Arc;

use super::copies::device_error;
use super::{Copies, DeviceEvent, Outcome, Promise};
use crate::Result;
use crate::stash::Kept;

/// Bytes that were put aside, on their way to the device.
pub struct Restore(pub(super) Arc<Outcome<DeviceEvent>>);

impl Restore {
    /// Waits until every copy is in its stream; the event is done when all bytes are there. When it failed, nothing is
    /// copied any more.
    pub fn enqueued(&self) -> Result<DeviceEvent> {
        self.0.wait()
    }
}

/// Copies what is put aside from the device, on a thread of the device's.
pub(super) fn stash_job(
    copies: Arc<Copies>,
    kept: Arc<Kept>,
    source: usize,
    ready: DeviceEvent,
    spill: bool,
    promise: Promise<()>,
) -> impl FnOnce() + Send {
    move || {
        let copied = copies.enter().and_then(|()| copies.download_after(&ready)).and_then(|()| {
            // SAFETY: the caller of `DeviceLink::stash` vouches for the source until the stash has the bytes.
            unsafe { kept.download(&copies, source, spill) }
        });
        let copied = copied.inspect_err(|error| kept.fail(error));
        drop((copies, kept));
        promise.keep(copied);
    }
}

/// Copies what was put aside to the device, on the same thread: what it waits for was copied from the device before.
pub(super) fn job(
    copies: Arc<Copies>,
    kept: Arc<Kept>,
    target: usize,
    after: DeviceEvent,
    promise: Promise<DeviceEvent>,
) -> impl FnOnce() + Send {
    move || {
        // SAFETY: the caller of `DeviceLink::restore` vouches for the target.
        let restored = copies.enter().and_then(|()| unsafe { upload(&copies, &kept, target, &after) });
        // What was copied already must not arrive in memory that the caller takes for its own again.
        let restored = restored.inspect_err(|_| drop(copies.drain(&copies.restore)));
        drop((copies, kept));
        promise.keep(restored);
    }
}

/// # Safety
/// `target` is the address of as many bytes of the device's, which nobody uses from `after` until the event is done.
unsafe fn upload(copies: &Copies, kept: &Kept, target: usize, after: &DeviceEvent) -> Result<DeviceEvent> {
    copies.restore.wait(&after.event).map_err(device_error)?;
    kept.chunks(|offset, chunk, bytes| {
        // SAFETY: the caller's promise; chunks of a stash are written only when it is made.
        unsafe { copies.copy_to_device(&copies.restore, &chunk, 0, bytes, target + offset) }
            .map(drop)
            .map_err(device_error)
    })?;
    Ok(copies.event(copies.restore.record().map_err(device_error)?))
}
