//! Transfers and updates of units.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use memascend_exec::{AppliedGradient, FilePart, UnitWeights};
use memascend_guarded::guarded;
use memascend_mem::LockExt;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use super::arguments::{UpdateArgument, unit_tensors, update_tensors};
use super::blocks::{self, TensorPart};
use super::cell::RuntimeCell;
use crate::apollo::MeasuredArgument;
use crate::device::{Applying, CudaEvent};
use crate::errors::{exec_error, executed};
use crate::files::{ExternalFile, Packing};
use crate::handles::{TensorId, Ticket};
use crate::lease::LeaseBuffer;

/// A part of a unit's weights outside the store, as Python gives it.
type OutsidePart<'py> = (Bound<'py, ExternalFile>, u64, usize, usize, Option<Bound<'py, Packing>>);

/// The units of a `Runtime`.
#[pyclass(frozen, module = "memascend._memascend")]
pub(crate) struct RuntimeUnits {
    cell: Arc<RuntimeCell>,
    /// For each unit, the parts that every fetch reads from files outside the store.
    files: Mutex<HashMap<usize, Arc<[FilePart]>>>,
}

impl RuntimeUnits {
    pub(super) fn new(cell: Arc<RuntimeCell>) -> Self {
        Self { cell, files: Mutex::default() }
    }
}

#[guarded]
#[pymethods]
impl RuntimeUnits {
    /// A number for a new unit, under which its transfers are ordered.
    fn add_unit(&self) -> usize {
        self.cell.add_unit()
    }

    /// Makes every fetch of a unit read `parts` too: file, position there, offset in the unit and
    /// bytes there of each, and how the file has it.
    fn read_from_files(&self, unit: usize, parts: Vec<OutsidePart<'_>>) {
        let part = |(file, position, offset, bytes, packing): &OutsidePart<'_>| FilePart {
            file: Arc::clone(&file.get().0),
            position: *position,
            offset: *offset,
            bytes: *bytes,
            packing: packing.as_ref().map(|packing| Arc::clone(&packing.get().0)),
        };
        let parts = parts.iter().map(part).collect();
        self.files.locked().insert(unit, parts);
    }

    /// Starts reading a unit's weights, `(tensor, offset, bytes)` of each, into `lease`, and
    /// applies `updates` on the way. Without `lease` only the updates run: each reads its tensor into
    /// the update slots, or is of a tensor in host memory if its segments name addresses.
    ///
    /// With `group_elements`, for the update of one tensor without `lease`, the ticket tells for each
    /// group of so many elements when its weights can be read.
    ///
    /// With `resident` the weights stay in `lease` until `release`, and the next fetch into it reads
    /// nothing. Resident weights are written by the updates that say `write_through`, else by the next commit;
    /// with `write_through` updated weights are written in any case.
    #[pyo3(signature = (unit, tensors, lease, updates, group_elements = 0, resident = false, write_through = false))]
    #[allow(clippy::too_many_arguments)]
    fn fetch(
        &self,
        unit: usize,
        tensors: Vec<(Bound<'_, TensorId>, usize, usize)>,
        lease: Option<&Bound<'_, LeaseBuffer>>,
        updates: Vec<UpdateArgument<'_>>,
        group_elements: usize,
        resident: bool,
        write_through: bool,
    ) -> PyResult<Ticket> {
        let inner = self.cell.inner()?;
        if group_elements > 0 && (lease.is_some() || updates.len() != 1 || tensors.len() != 1) {
            return Err(PyValueError::new_err(
                "groups are those of one update without a buffer for its unit",
            ));
        }
        let files = self.files.locked().get(&unit).cloned();
        let unit = self.cell.unit(unit);
        let tensors = unit_tensors(&tensors);
        let mut updates = update_tensors(&inner, updates)?;
        let files = files.unwrap_or_default();
        let lease = lease.map(|lease| Arc::clone(&lease.get().lease));
        let named = lease.is_some() || !tensors.is_empty();
        let weights = named.then_some(UnitWeights { tensors, files, lease, resident, write_through });
        Ok(Ticket(match (group_elements, weights) {
            (1.., Some(weights)) => {
                let update = updates.pop().expect("one update was checked for");
                inner.executor.update_in_groups(unit, weights, update, group_elements)
            }
            (_, weights) => inner.executor.fetch(unit, weights, updates),
        }))
    }

    /// Starts an update of one tensor of a unit, `(tensor, offset, bytes)`, whose weights stay in
    /// `lease`, and whose gradient the segments' addresses name. `write_through` is as in `fetch`.
    /// With `beside` the update does not wait for the updates of the unit's other tensors: earlier
    /// write-back of this tensor has ended.
    #[pyo3(signature = (unit, tensor, lease, update, *, write_through, beside))]
    fn update_in_place(
        &self,
        unit: usize,
        tensor: (Bound<'_, TensorId>, usize, usize),
        lease: &Bound<'_, LeaseBuffer>,
        update: UpdateArgument<'_>,
        write_through: bool,
        beside: bool,
    ) -> PyResult<Ticket> {
        let (inner, unit) = (self.cell.inner()?, self.cell.unit(unit));
        let updates = update_tensors(&inner, vec![update])?;
        let (tensors, lease) = (unit_tensors(&[tensor]), Some(Arc::clone(&lease.get().lease)));
        let weights = UnitWeights { tensors, files: Arc::default(), lease, resident: true, write_through };
        Ok(Ticket(if beside {
            inner.executor.update_beside(unit, weights, updates)
        } else {
            inner.executor.fetch(unit, Some(weights), updates)
        }))
    }

    /// As `update_in_place`, with a gradient of `gradient_bytes` bytes at address `gradient` of the device
    /// that is yet to be computed: it is copied after `ready`, and each chunk is applied when it has
    /// arrived. It has to live until the `Applying` is `copied`. Without `lease` the weights are read
    /// into the update slots. Nothing is written to them before `unread`, which a copy of them to the
    /// device ends with. For a rule that takes factors, `measured` describes their source: it
    /// has the attributes `projection`, `address` (of `Projection.numbers` float32 on the device, which
    /// live as long as the gradient), `moments`, `written`, `threads` and `options`.
    #[pyo3(signature = (
        unit, tensor, lease, update, gradient, gradient_bytes, ready, unread, measured, *, write_through, beside
    ))]
    #[allow(clippy::too_many_arguments)]
    fn update_from_device(
        &self,
        py: Python<'_>,
        unit: usize,
        tensor: (Bound<'_, TensorId>, usize, usize),
        lease: Option<&Bound<'_, LeaseBuffer>>,
        update: UpdateArgument<'_>,
        gradient: usize,
        gradient_bytes: usize,
        ready: &Bound<'_, CudaEvent>,
        unread: Option<&Bound<'_, CudaEvent>>,
        measured: Option<MeasuredArgument<'_>>,
        write_through: bool,
        beside: bool,
    ) -> PyResult<(Ticket, Applying)> {
        let (inner, unit) = (self.cell.inner()?, self.cell.unit(unit));
        let update = update.arriving(measured.is_some())?;
        let (tensors, lease) = (unit_tensors(&[tensor]), lease.map(|lease| Arc::clone(&lease.get().lease)));
        let weights = UnitWeights { tensors, files: Arc::default(), lease, resident: true, write_through };
        let source = AppliedGradient {
            address: gradient,
            bytes: gradient_bytes,
            ready: ready.get().0.clone(),
            unread: unread.map(|event| event.get().0.clone()),
            projected: measured.map(|measured| measured.numbers(&inner)),
        };
        let (link, staging) = (inner.link()?, &inner.staging);
        let (ticket, arriving) = inner.executor.update_arriving(unit, weights, update, beside);
        // SAFETY: the Python layer passes live, contiguous tensors on the device and holds them until
        // the gradient is applied.
        let applying = py.detach(|| unsafe { link.apply(staging, source, arriving) });
        Ok((Ticket(ticket), Applying(applying.map_err(|error| exec_error(&error))?)))
    }

    /// Ends the stay of a unit's weights in their buffer; those that the drives do not have are written.
    fn release(&self, unit: usize, tensors: Vec<(Bound<'_, TensorId>, usize, usize)>) -> PyResult<()> {
        let (inner, unit) = (self.cell.inner()?, self.cell.unit(unit));
        unit_tensors(&tensors).into_iter().for_each(|tensor| blocks::release(&inner, &unit, tensor.tensor));
        Ok(())
    }

    /// Ends the stay of a unit's states in memory: for each `(tensor, bytes)` the bytes of a
    /// plane after the first `bytes`, rounded up to a page. Bytes that the drives do not have are written. It
    /// happens after the fetches that were started before; when the ticket is ready, the buffers are
    /// free. A commit has to be given the ticket, or to be started after it is ready.
    fn release_states(&self, unit: usize, planes: Vec<(Bound<'_, TensorId>, u64)>) -> PyResult<Ticket> {
        let planes = planes.iter().map(|(tensor, bytes)| (tensor.get().0, *bytes)).collect();
        Ok(Ticket(self.cell.inner()?.executor.release_states(self.cell.unit(unit), planes)))
    }

    /// Starts writing a unit's weights, `(tensor, offset, bytes)` of each, from `lease`.
    fn write_unit(
        &self,
        unit: usize,
        tensors: Vec<(Bound<'_, TensorId>, usize, usize)>,
        lease: &Bound<'_, LeaseBuffer>,
    ) -> PyResult<()> {
        let (inner, unit) = (self.cell.inner()?, self.cell.unit(unit));
        let mut tensors = unit_tensors(&tensors).into_iter();
        tensors.try_for_each(|tensor| blocks::write_tensor(&inner, &unit, tensor, lease.get()))
    }

    /// Whether the drives have the bytes of `lease` as a unit's weights, `(tensor, offset, bytes)` of
    /// each, as checksums say: False where one is unknown.
    fn is_stored(
        &self,
        py: Python<'_>,
        tensors: Vec<(Bound<'_, TensorId>, usize, usize)>,
        lease: &Bound<'_, LeaseBuffer>,
    ) -> PyResult<bool> {
        let (inner, tensors, lease) = (self.cell.inner()?, unit_tensors(&tensors), lease.get());
        Ok(py.detach(|| tensors.iter().all(|tensor| blocks::is_stored(&inner, tensor, lease))))
    }

    /// Starts reading `bytes` bytes of a tensor's current value, from `offset` on, into the
    /// beginning of `lease`, once the writes of the unit have ended. `offset` is the start of a
    /// page; whole pages are read. `written` says that these bytes are written already: then the read
    /// waits for nothing.
    #[pyo3(signature = (unit, tensor, offset, bytes, lease, written = false))]
    fn read_part(
        &self,
        unit: usize,
        tensor: &Bound<'_, TensorId>,
        offset: u64,
        bytes: usize,
        lease: &Bound<'_, LeaseBuffer>,
        written: bool,
    ) -> PyResult<Ticket> {
        let part = TensorPart { tensor: tensor.get().0, offset, bytes };
        part.read(&*self.cell.inner()?, self.cell.unit(unit), lease.get(), written)
    }

    /// Starts writing the first `bytes` bytes of `lease` as bytes of a tensor's next value, from
    /// `offset` on. A value is whole once all of it was written, in parts of whole pages but for
    /// the last, with no commit in between. `lease` may be used again when the ticket is ready.
    fn write_part(
        &self,
        py: Python<'_>,
        unit: usize,
        tensor: &Bound<'_, TensorId>,
        offset: u64,
        bytes: usize,
        lease: &Bound<'_, LeaseBuffer>,
    ) -> PyResult<Ticket> {
        let part = TensorPart { tensor: tensor.get().0, offset, bytes };
        part.write(py, &*self.cell.inner()?, &self.cell.unit(unit), lease.get())
    }

    /// Waits until nothing of a unit is under way; raises the first error.
    fn wait_unit(&self, py: Python<'_>, unit: usize) -> PyResult<()> {
        let unit = self.cell.unit(unit);
        executed(py, || unit.wait_all())
    }
}
