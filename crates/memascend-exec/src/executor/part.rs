//! Parts of a tensor, read and written by themselves.

use std::sync::Arc;

use memascend_mem::LeaseSlice;
use memascend_nvme::Operation;
use memascend_store::{Store, StoreError, TensorId};

use super::Ticket;
use crate::in_flight::InFlightRead;
use crate::{ExecError, InFlightCounter, Result};

/// Bytes of a tensor's current value to read.
pub(super) struct PartRead {
    pub(super) tensor: TensorId,
    /// Where they begin in the tensor.
    pub(super) offset: u64,
    pub(super) buffer: LeaseSlice,
    pub(super) reading: InFlightRead,
}

impl PartRead {
    /// Starts the read, which `ticket` counts.
    pub(super) fn start(self, store: &Store, ticket: &Ticket) {
        let Self { tensor, offset, buffer, mut reading } = self;
        reading.start();
        let read = ticket.ready.begin();
        let done = move |result: std::result::Result<(), StoreError>| {
            drop(reading);
            read.end(result.map_err(ExecError::from));
        };
        store.transfer(Operation::Read, store.current(tensor), offset, buffer, Box::new(done));
    }
}

/// Starts writing `buffer` as the bytes from `offset` on of a tensor's next value; `pending` and the
/// ticket count the write. The value is whole once every part of it was written, which has to be
/// before the next commit: until then all parts go to the same extent.
///
/// # Errors
/// If there is no room for another value.
///
/// # Panics
/// As [`Store::transfer`].
pub fn write_part(
    store: &Store,
    pending: &Arc<InFlightCounter>,
    tensor: TensorId,
    offset: u64,
    buffer: LeaseSlice,
) -> Result<Arc<Ticket>> {
    let target = store.rewrite(tensor)?.target;
    let ticket = Arc::new(Ticket { ready: Arc::default(), groups: Vec::new() });
    let (write, ready) = (pending.begin(), ticket.ready.begin());
    let done = move |result: std::result::Result<(), StoreError>| {
        let result = result.map_err(ExecError::from);
        write.end(result.clone());
        ready.end(result);
    };
    store.transfer(Operation::Write, target, offset, buffer, Box::new(done));
    Ok(ticket)
}
