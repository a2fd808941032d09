//! Weights of a tensor by units, parts and rows.

use std::sync::Arc;

use memascend_exec::{ExecError, Executor, InFlightCounter};
use memascend_mem::{LeaseSlice, PAGE_BYTES, round_up_to_page};
use memascend_nvme::Operation;
use memascend_store::{Extent, TensorId, Transferred};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use super::inner::RuntimeInner;
use crate::errors::{exec_error, store_error};
use crate::handles::Ticket;
use crate::host;
use crate::lease::LeaseBuffer;

/// Starts writing `bytes` bytes of `lease`, from `offset` on, as a whole tensor.
pub(crate) fn write_tensor(
    inner: &RuntimeInner,
    unit: &Arc<InFlightCounter>,
    tensor: memascend_exec::UnitTensor,
    lease: &LeaseBuffer,
) -> PyResult<()> {
    let rewrite = inner.store.rewrite(tensor.tensor).map_err(|error| store_error(&error))?;
    let buffer = LeaseSlice::new(Arc::clone(&lease.lease), tensor.offset, tensor.bytes);
    // The resident parts are of the old value, and would hold their buffer.
    inner.store.forget_kept(rewrite.source, 0, tensor.bytes);
    inner.store.transfer(Operation::Write, rewrite.target, 0, buffer, counted_by(unit));
    Ok(())
}

/// Keeps no weights of a tensor in memory any more; those that were not written are.
pub(crate) fn release(inner: &RuntimeInner, unit: &Arc<InFlightCounter>, tensor: TensorId) {
    inner.store.release(inner.store.current(tensor), 0, || counted_by(unit));
}

/// Counts a write of `unit` from now on; the callback ends it.
fn counted_by(unit: &Arc<InFlightCounter>) -> Transferred {
    let write = unit.begin();
    Box::new(move |result| write.end(result.map_err(ExecError::from)))
}

/// Some bytes of a tensor: where they begin, and how many.
#[derive(Clone, Copy)]
pub(crate) struct TensorPart {
    pub tensor: TensorId,
    pub offset: u64,
    pub bytes: usize,
}

impl TensorPart {
    /// Starts reading it into the beginning of `lease`.
    pub(crate) fn read(
        self,
        inner: &RuntimeInner,
        unit: Arc<InFlightCounter>,
        lease: &LeaseBuffer,
        written: bool,
    ) -> PyResult<Ticket> {
        let Self { tensor, offset, .. } = self;
        let buffer = self.buffer(&inner.store.current(tensor), lease, false)?;
        Ok(Ticket(if written {
            Executor::read_written(&inner.store, &unit, tensor, offset, buffer)
        } else {
            inner.executor.read_part(unit, tensor, offset, buffer)
        }))
    }

    /// Starts writing it from the beginning of `lease`.
    pub(crate) fn write(
        self,
        py: Python<'_>,
        inner: &RuntimeInner,
        unit: &Arc<InFlightCounter>,
        lease: &LeaseBuffer,
    ) -> PyResult<Ticket> {
        let buffer = self.buffer(&inner.store.current(self.tensor), lease, true)?;
        py.detach(|| memascend_exec::write_part(&inner.store, unit, self.tensor, self.offset, buffer))
            .map(Ticket)
            .map_err(|error| exec_error(&error))
    }

    /// The beginning of `lease`. Whole pages are transferred, so that a part to be written ends at a
    /// page or with the tensor.
    fn buffer(self, tensor: &Extent, lease: &LeaseBuffer, written: bool) -> PyResult<LeaseSlice> {
        let Self { offset, bytes, .. } = self;
        let refused = |why: String| Err(PyValueError::new_err(why));
        let (tensor_bytes, capacity, page) = (tensor.bytes, lease.lease.capacity(), PAGE_BYTES as u64);
        if !offset.is_multiple_of(page) {
            return refused(format!(
                "a part of a tensor begins at a multiple of {page} bytes, not at {offset}"
            ));
        }
        if offset.checked_add(bytes as u64).is_none_or(|end| end > tensor_bytes) {
            return refused(format!("{bytes} bytes from {offset} on leave a tensor of {tensor_bytes} bytes"));
        }
        let whole = round_up_to_page(bytes);
        if written && whole != bytes && offset + (whole as u64) < tensor_bytes {
            return refused(format!(
                "a part of {bytes} bytes is not whole pages, but not the last of the tensor"
            ));
        }
        if whole > capacity {
            return refused(format!("a part of {whole} bytes does not fit into a buffer of {capacity}"));
        }
        Ok(LeaseSlice::new(Arc::clone(&lease.lease), 0, whole))
    }
}

/// Whether the drives have the bytes of `lease` from `tensor.offset` on, as checksums say.
pub(crate) fn is_stored(
    inner: &RuntimeInner,
    tensor: &memascend_exec::UnitTensor,
    lease: &LeaseBuffer,
) -> bool {
    let buffer = LeaseSlice::new(Arc::clone(&lease.lease), tensor.offset, tensor.bytes);
    inner.store.is_stored(inner.store.current(tensor.tensor), &buffer)
}

/// Reads rows, `count` int64 at address `rows`, to address `target`.
pub(crate) fn read_rows(
    inner: &RuntimeInner,
    tensor: TensorId,
    row_bytes: usize,
    (rows, count): (usize, usize),
    target: usize,
    compare: bool,
) -> memascend_exec::Result<()> {
    if count == 0 {
        return Ok(()); // torch gives an empty tensor the address 0
    }
    let extent = inner.store.current(tensor);
    // SAFETY: the Python layer passes live, contiguous CPU tensors of `count` int64 and of `count`
    // rows.
    let (rows, target) =
        unsafe { (host::elements(rows, count), host::elements_mut(target, count * row_bytes)) };
    inner.staging.read_rows(extent, row_bytes, rows, target, compare)
}
