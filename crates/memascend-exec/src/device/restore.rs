//! Bytes put aside from the device, and their way back.

use std::sync::Arc;

use super::copies::device_error;
use super::{Copies, DeviceEvent, DeviceFuture, Promise};
use crate::Result;
use crate::stash::Stashed;

/// Bytes of a stash on their way back to the device.
pub struct Restore(pub(super) Arc<DeviceFuture<DeviceEvent>>);

impl Restore {
    /// Waits until every copy is enqueued, and returns the event that is done when all bytes are
    /// there. After an error nothing is copied any more.
    pub fn enqueued(&self) -> Result<DeviceEvent> {
        self.0.wait()
    }
}

/// A job that copies the bytes of a stash from the device.
pub(super) fn stash_job(
    copies: Arc<Copies>,
    stashed: Arc<Stashed>,
    source: usize,
    ready: DeviceEvent,
    spill: bool,
    promise: Promise<()>,
) -> impl FnOnce() + Send {
    move || {
        let copied = copies.enter().and_then(|()| copies.download_after(&ready)).and_then(|()| {
            // SAFETY: the caller of `DeviceLink::stash` vouches for the source until the stash has
            // the bytes.
            unsafe { stashed.download(&copies, source, spill) }
        });
        let copied = copied.inspect_err(|error| stashed.fail(error));
        drop((copies, stashed));
        promise.resolve(copied);
    }
}

/// A job that copies the bytes of a stash back to the device. It runs on the same thread as the
/// stash's own copy, and therefore after that.
pub(super) fn job(
    copies: Arc<Copies>,
    stashed: Arc<Stashed>,
    target: usize,
    after: DeviceEvent,
    promise: Promise<DeviceEvent>,
) -> impl FnOnce() + Send {
    move || {
        // SAFETY: the caller of `DeviceLink::restore` vouches for the target.
        let restored = copies.enter().and_then(|()| unsafe { upload(&copies, &stashed, target, &after) });
        // Copies under way must not arrive in memory that the caller reuses.
        let restored = restored.inspect_err(|_| drop(copies.drain(&copies.restore)));
        drop((copies, stashed));
        promise.resolve(restored);
    }
}

/// # Safety
/// `target` is the address of as many bytes of device memory, which are not used from `after` until
/// the event is done.
unsafe fn upload(
    copies: &Copies,
    stashed: &Stashed,
    target: usize,
    after: &DeviceEvent,
) -> Result<DeviceEvent> {
    copies.restore.wait(&after.event).map_err(device_error)?;
    stashed.chunks(|offset, chunk, bytes| {
        // SAFETY: the caller's promise; chunks of a stash are written only when it is made.
        unsafe { copies.copy_to_device(&copies.restore, &chunk, 0, bytes, target + offset) }
            .map(drop)
            .map_err(device_error)
    })?;
    Ok(copies.event(copies.restore.record().map_err(device_error)?))
}
