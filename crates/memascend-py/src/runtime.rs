//! One training run, as Python holds it.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use memascend_exec::{AppliedGradient, DeviceGradient, FilePart, GradientId, Pending, UnitWeights};
use memascend_guarded::guarded;
use memascend_kernels::Projected;
use memascend_mem::{LockExt, Origin};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::apollo::{ChannelFactors, FactorOptions, MeasuredArgument, ProjectedGradient, Projection};
use crate::arguments::{UpdateArgument, unit_tensors, update_tensors};
use crate::blocks::{self, Part};
use crate::device::{self, Applying, Capture, CudaEvent, Stash};
use crate::errors::{exec_error, forked_error, memory_error, store_error};
use crate::files::{ExternalFile, Packing};
use crate::gradients::{self, GradientRanges};
use crate::handles::{Commit, TensorId, Ticket};
use crate::host::{self, Plane};
use crate::lease::LeaseBuffer;
use crate::panics::Intact;
use crate::parts::{AllocatorChoice, MemoryPlan, Parts, RuntimeOptions, StorePlan};
use crate::statistics::statistics;
use crate::tuning::Tuning;

/// A part of a unit's weights outside the store, as Python gives it.
type OutsidePart<'py> = (Bound<'py, ExternalFile>, u64, usize, usize, Option<Bound<'py, Packing>>);

/// One training run's native side: store, arena, gradients and step executor.
#[pyclass(frozen, module = "memascend._memascend")]
pub(crate) struct Runtime {
    parts: Mutex<Option<Arc<Parts>>>,
    pending: Mutex<Vec<Arc<Pending>>>,
    /// For each unit, the parts that every fetch reads from files outside the store.
    files: Mutex<HashMap<usize, Arc<[FilePart]>>>,
    notices: Mutex<Vec<String>>,
    /// The process that opened it.
    origin: Origin,
    intact: Intact,
}

impl Runtime {
    pub(crate) fn parts(&self) -> PyResult<Arc<Parts>> {
        self.intact.check()?;
        self.parts_to_close()
    }

    /// The parts, also after a panic: to read what is durable, which a model is closed by.
    fn parts_to_close(&self) -> PyResult<Arc<Parts>> {
        if self.is_forked() {
            return Err(forked_error());
        }
        let parts = self.parts.locked();
        parts.clone().ok_or_else(|| PyRuntimeError::new_err("the offloaded model was closed"))
    }

    /// Whether this process was forked from the one that opened it.
    fn is_forked(&self) -> bool {
        !self.origin.is_here()
    }

    fn unit(&self, unit: usize) -> Arc<Pending> {
        Arc::clone(&self.pending.locked()[unit])
    }
}

#[guarded]
#[pymethods]
impl Runtime {
    /// Creates the store, or opens an existing one to `resume`, and reserves the arena. `in_place`
    /// keeps one copy of each tensor, without a second one for the next generation. `replace` deletes
    /// the store of an earlier run that is in the way of a new one.
    ///
    /// `arena` is a `memascend.plan.arena.Arena`, and `tuning` has the names of
    /// `memascend.options.Tuning`. With `device`, the number of a CUDA device, the arena is memory
    /// that the device copies from and to directly, unless another `allocator` is named. If a
    /// number of the arena has a maximum, the allocator is not `cuda`.
    #[new]
    #[pyo3(signature = (store, arena, *, resume = false, in_place = false, replace = false, device = None, **tuning))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        store: Vec<PathBuf>,
        arena: MemoryPlan,
        resume: bool,
        in_place: bool,
        replace: bool,
        device: Option<i32>,
        tuning: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        let tuning = Tuning::of(tuning)?;
        let store = StorePlan { paths: store, options: tuning.store_options(in_place, replace)?, resume };
        let allocator = AllocatorChoice { name: tuning.allocator, huge_pages: tuning.huge_pages };
        let compute_threads = tuning.compute_threads;
        let options = RuntimeOptions { store, memory: arena, allocator, compute_threads, device };
        let (parts, notices) = py.detach(|| Parts::open(options))?;
        Ok(Self {
            parts: Mutex::new(Some(Arc::new(parts))),
            pending: Mutex::default(),
            files: Mutex::default(),
            notices: Mutex::new(notices),
            origin: Origin::here(),
            intact: Intact::here(),
        })
    }

    /// Changes the numbers of buffers: for each size of unit buffers that is named, `(bytes, count)`,
    /// and of staging chunks and buffers for states if given. Lines of `units` of the same size, in
    /// whole pages, have one number together.
    ///
    /// What shrinks goes first. Free buffers are given back to the system when this returns; those in
    /// use are when they are free, and `stats()["host_bytes_leaving"]` counts them until then. Raises
    /// HostMemoryError, or PinnedMemoryError, if the system refuses memory for one of the numbers:
    /// that one is as it was, and those before it are changed. ValueError if it was not reserved.
    #[pyo3(signature = (units = Vec::new(), chunk_count = None, states_count = None))]
    fn resize(
        &self,
        py: Python<'_>,
        units: Vec<(usize, usize)>,
        chunk_count: Option<usize>,
        states_count: Option<usize>,
    ) -> PyResult<()> {
        let parts = self.parts()?;
        py.detach(|| parts.resize(units, chunk_count, states_count)).map_err(|error| memory_error(&error))
    }

    /// Ends the stay of a unit's states in memory: for each `(tensor, bytes)` what reaches beyond so
    /// many bytes of a plane, rounded up to a page. What the drives do not have is written. It
    /// happens after the fetches that were started before; when the ticket is ready, the buffers are
    /// free. A commit has to be given the ticket, or to be started after it is ready.
    fn let_go_states(&self, unit: usize, planes: Vec<(Bound<'_, TensorId>, u64)>) -> PyResult<Ticket> {
        let planes = planes.iter().map(|(tensor, bytes)| (tensor.get().0, *bytes)).collect();
        Ok(Ticket(self.parts()?.executor.let_go_beyond(self.unit(unit), planes)))
    }

    /// A number for a new unit, under which its transfers are ordered.
    fn add_unit(&self) -> usize {
        let mut pending = self.pending.locked();
        pending.push(Arc::default());
        pending.len() - 1
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

    /// Creates a tensor of `bytes` bytes in the store.
    fn create_tensor(&self, py: Python<'_>, name: &str, bytes: u64) -> PyResult<TensorId> {
        let parts = self.parts()?;
        let created = py.detach(|| parts.store.create_tensor(name, bytes));
        created.map(TensorId).map_err(|error| store_error(&error))
    }

    /// The tensor named `name`, or None.
    fn find_tensor(&self, name: &str) -> PyResult<Option<TensorId>> {
        Ok(self.parts()?.store.find_tensor(name).map(TensorId))
    }

    /// The names of all tensors.
    fn tensor_names(&self) -> PyResult<Vec<String>> {
        Ok(self.parts()?.store.tensors().into_iter().map(|(name, _)| name).collect())
    }

    /// Length of a tensor in bytes, in whole blocks.
    fn tensor_bytes(&self, tensor: &Bound<'_, TensorId>) -> PyResult<u64> {
        Ok(self.parts()?.store.current(tensor.get().0).bytes)
    }

    /// Removes a tensor of which nothing is under way. Its extents are freed once no generation
    /// holds them.
    fn remove_tensor(&self, tensor: &Bound<'_, TensorId>) -> PyResult<()> {
        self.parts()?.store.remove_tensor(tensor.get().0);
        Ok(())
    }

    /// Allocates the extent of a tensor's next value, so that no step runs out of space.
    fn make_spare(&self, py: Python<'_>, tensor: &Bound<'_, TensorId>) -> PyResult<()> {
        let (parts, id) = (self.parts()?, tensor.get().0);
        py.detach(|| parts.store.make_spare(id)).map_err(|error| store_error(&error))
    }

    /// Bytes that `make_spare` would allocate.
    fn spare_bytes(&self, tensor: &Bound<'_, TensorId>) -> PyResult<u64> {
        Ok(self.parts()?.store.spare_bytes(tensor.get().0))
    }

    /// Starts a commit of the current values of all tensors, with `state` (JSON): a thread waits
    /// for everything under way, flushes the drives and writes the manifest. `tickets` are those of
    /// fetches that may not have started yet. Nothing may be updated until the commit has ended.
    fn commit(&self, state: String, tickets: Vec<Bound<'_, Ticket>>) -> PyResult<Commit> {
        let parts = self.parts()?;
        let units = self.pending.locked().clone();
        let tickets = tickets.iter().map(|ticket| Arc::clone(&ticket.get().0)).collect();
        Commit::begin(parts, units, tickets, state, self.intact)
    }

    /// Number of the durable generation; 0 when there is none.
    #[getter]
    fn generation(&self) -> PyResult<u64> {
        Ok(self.parts_to_close()?.store.generation())
    }

    /// The state that the durable generation was committed with, or None.
    #[getter]
    fn state(&self) -> PyResult<Option<String>> {
        Ok(self.parts()?.store.state())
    }

    /// Keeps the durable generation under a name.
    fn snapshot(&self, py: Python<'_>, tag: &str) -> PyResult<()> {
        let parts = self.parts()?;
        py.detach(|| parts.store.snapshot(tag)).map_err(|error| store_error(&error))
    }

    /// `(tag, generation, bytes)` of every snapshot, the oldest first.
    fn snapshots(&self) -> PyResult<Vec<(String, u64, u64)>> {
        let snapshots = self.parts_to_close()?.store.snapshots().into_iter();
        Ok(snapshots.map(|snapshot| (snapshot.tag, snapshot.generation, snapshot.bytes)).collect())
    }

    /// Deletes a snapshot.
    fn delete_snapshot(&self, py: Python<'_>, tag: &str) -> PyResult<()> {
        let parts = self.parts()?;
        py.detach(|| parts.store.delete_snapshot(tag)).map_err(|error| store_error(&error))
    }

    /// Makes the current values those of a snapshot; what is durable stays until
    /// `confirm_snapshot`.
    fn take_up_snapshot(&self, py: Python<'_>, tag: &str) -> PyResult<()> {
        let parts = self.parts()?;
        py.detach(|| parts.store.take_up_snapshot(tag)).map_err(|error| store_error(&error))
    }

    /// Makes a snapshot that was taken up the newest generation.
    fn confirm_snapshot(&self, py: Python<'_>, tag: &str) -> PyResult<()> {
        let parts = self.parts()?;
        py.detach(|| parts.store.confirm_snapshot(tag)).map_err(|error| store_error(&error))
    }

    /// Raises StoreError if `bytes` more bytes do not fit on the volumes.
    fn check_room(&self, bytes: u64) -> PyResult<()> {
        self.parts()?.store.check_room(bytes).map_err(|error| store_error(&error))
    }

    /// A free unit buffer of at least `bytes` bytes, or None.
    fn lease_unit(&self, bytes: usize) -> PyResult<Option<LeaseBuffer>> {
        let lease = self.parts()?.units.try_lease(bytes).map_err(|error| memory_error(&error))?;
        Ok(lease.map(|lease| LeaseBuffer { lease: Arc::new(lease) }))
    }

    /// Starts reading a unit's weights, `(tensor, offset, bytes)` of each, into `lease`, and
    /// applies `updates` on the way. Without `lease` only the updates run: each reads its tensor into
    /// the update slots, or is of a tensor in host memory if its segments name addresses.
    ///
    /// With `group_elements`, for the update of one tensor without `lease`, the ticket tells for each
    /// group of so many elements when its weights can be read.
    ///
    /// With `stays` the weights stay in `lease` until `let_go`, and the next fetch into it reads
    /// nothing. What stays is written by the updates that say `write_through`, else by the next commit;
    /// with `write_through` updated weights are written in any case.
    #[pyo3(signature = (unit, tensors, lease, updates, group_elements = 0, stays = false, write_through = false))]
    #[allow(clippy::too_many_arguments)]
    fn fetch(
        &self,
        unit: usize,
        tensors: Vec<(Bound<'_, TensorId>, usize, usize)>,
        lease: Option<&Bound<'_, LeaseBuffer>>,
        updates: Vec<UpdateArgument<'_>>,
        group_elements: usize,
        stays: bool,
        write_through: bool,
    ) -> PyResult<Ticket> {
        let parts = self.parts()?;
        if group_elements > 0 && (lease.is_some() || updates.len() != 1 || tensors.len() != 1) {
            return Err(PyValueError::new_err(
                "groups are those of one update without a buffer for its unit",
            ));
        }
        let files = self.files.locked().get(&unit).cloned();
        let unit = self.unit(unit);
        let tensors = unit_tensors(&tensors);
        let mut updates = update_tensors(&parts, updates)?;
        let files = files.unwrap_or_default();
        let lease = lease.map(|lease| Arc::clone(&lease.get().lease));
        let named = lease.is_some() || !tensors.is_empty();
        let weights = named.then_some(UnitWeights { tensors, files, lease, stays, write_through });
        Ok(Ticket(match (group_elements, weights) {
            (1.., Some(weights)) => {
                let update = updates.pop().expect("one update was checked for");
                parts.executor.update_in_groups(unit, weights, update, group_elements)
            }
            (_, weights) => parts.executor.fetch(unit, weights, updates),
        }))
    }

    /// Starts an update of one tensor of a unit, `(tensor, offset, bytes)`, whose weights stay in
    /// `lease`, and whose gradient the segments' addresses name. `write_through` is as in `fetch`.
    /// With `beside` the update does not wait for those of the unit's other tensors: earlier
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
        let (parts, unit) = (self.parts()?, self.unit(unit));
        let updates = update_tensors(&parts, vec![update])?;
        let (tensors, lease) = (unit_tensors(&[tensor]), Some(Arc::clone(&lease.get().lease)));
        let weights = UnitWeights { tensors, files: Arc::default(), lease, stays: true, write_through };
        Ok(Ticket(if beside {
            parts.executor.update_beside(unit, weights, updates)
        } else {
            parts.executor.fetch(unit, Some(weights), updates)
        }))
    }

    /// As `update_in_place`, with a gradient of `gradient_bytes` bytes at address `gradient` of the device
    /// that is yet to be computed: it is copied after `ready`, and each chunk is applied when it has
    /// arrived. It has to live until the `Applying` is `copied`. Without `lease` the weights are read
    /// into the update slots. Nothing is written to them before `unread`, which a copy of them to the
    /// device ends with. For a rule that takes factors, `measured` says what they are found from: it
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
        let (parts, unit) = (self.parts()?, self.unit(unit));
        let update = update.arriving(measured.is_some())?;
        let (tensors, lease) = (unit_tensors(&[tensor]), lease.map(|lease| Arc::clone(&lease.get().lease)));
        let weights = UnitWeights { tensors, files: Arc::default(), lease, stays: true, write_through };
        let source = AppliedGradient {
            address: gradient,
            bytes: gradient_bytes,
            ready: ready.get().0.clone(),
            unread: unread.map(|event| event.get().0.clone()),
            projected: measured.map(|measured| measured.numbers(&parts)),
        };
        let (link, staging) = (parts.link()?, &parts.staging);
        let (ticket, arriving) = parts.executor.update_arriving(unit, weights, update, beside);
        // SAFETY: the Python layer passes live, contiguous tensors on the device and holds them until
        // the gradient is applied.
        let applying = py.detach(|| unsafe { link.apply(staging, source, arriving) });
        Ok((Ticket(ticket), Applying(applying.map_err(|error| exec_error(&error))?)))
    }

    /// Ends the stay of a unit's weights in their buffer; those that the drives do not have are written.
    fn let_go(&self, unit: usize, tensors: Vec<(Bound<'_, TensorId>, usize, usize)>) -> PyResult<()> {
        let (parts, unit) = (self.parts()?, self.unit(unit));
        unit_tensors(&tensors).into_iter().for_each(|tensor| blocks::let_go(&parts, &unit, tensor.tensor));
        Ok(())
    }

    /// Starts writing a unit's weights, `(tensor, offset, bytes)` of each, from `lease`.
    fn write_unit(
        &self,
        unit: usize,
        tensors: Vec<(Bound<'_, TensorId>, usize, usize)>,
        lease: &Bound<'_, LeaseBuffer>,
    ) -> PyResult<()> {
        let (parts, unit) = (self.parts()?, self.unit(unit));
        let mut tensors = unit_tensors(&tensors).into_iter();
        tensors.try_for_each(|tensor| blocks::write_tensor(&parts, &unit, tensor, lease.get()))
    }

    /// Whether the drives have what lies in `lease` as a unit's weights, `(tensor, offset, bytes)` of
    /// each, as checksums say: False where one is unknown.
    fn is_stored(
        &self,
        py: Python<'_>,
        tensors: Vec<(Bound<'_, TensorId>, usize, usize)>,
        lease: &Bound<'_, LeaseBuffer>,
    ) -> PyResult<bool> {
        let (parts, tensors, lease) = (self.parts()?, unit_tensors(&tensors), lease.get());
        Ok(py.detach(|| tensors.iter().all(|tensor| blocks::is_stored(&parts, tensor, lease))))
    }

    /// Starts reading `bytes` bytes of a tensor's current value, from `offset` on, into the
    /// beginning of `lease`, once what is written of the unit is written. `offset` is the start of a
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
        let part = Part { tensor: tensor.get().0, offset, bytes };
        part.read(&*self.parts()?, self.unit(unit), lease.get(), written)
    }

    /// Starts writing the first `bytes` bytes of `lease` as those of a tensor's next value from
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
        let part = Part { tensor: tensor.get().0, offset, bytes };
        part.write(py, &*self.parts()?, &self.unit(unit), lease.get())
    }

    /// Reads rows of `row_bytes` bytes of a tensor to address `target`, one behind another. Their
    /// numbers are `count` int64 at address `rows`, ascending, each once. The tensor's writes have
    /// to have ended.
    ///
    /// With `compare` they are compared with what was written: the first read of a row reads the MiB
    /// around it. Where they are spread over more than half of the tensor, all of it is read, and
    /// compared in any case.
    #[allow(clippy::too_many_arguments)]
    fn read_rows(
        &self,
        py: Python<'_>,
        tensor: &Bound<'_, TensorId>,
        row_bytes: usize,
        rows: usize,
        count: usize,
        target: usize,
        compare: bool,
    ) -> PyResult<()> {
        let (parts, tensor) = (self.parts()?, tensor.get().0);
        py.detach(|| blocks::read_rows(&parts, tensor, row_bytes, (rows, count), target, compare))
            .map_err(|error| exec_error(&error))
    }

    /// A buffer of its own, outside of the arena, which is freed when the last object that refers to
    /// it dies.
    fn lease_outside(&self, py: Python<'_>, bytes: usize) -> PyResult<LeaseBuffer> {
        let parts = self.parts()?;
        let lease = py.detach(|| parts.outside.lease(bytes)).map_err(|error| memory_error(&error))?;
        Ok(LeaseBuffer { lease: Arc::new(lease) })
    }

    /// Waits until nothing of a unit is under way; raises the first error.
    fn wait_unit(&self, py: Python<'_>, unit: usize) -> PyResult<()> {
        let pending = self.unit(unit);
        py.detach(|| pending.wait_all()).map_err(|error| exec_error(&error))
    }

    /// Allocates the gradient of a tensor of `unit` that moves alone: made in `dtype`, and kept in
    /// `kept` if that is not the same; returns its number.
    #[pyo3(signature = (unit, name, dtype, numel, kept = None))]
    fn create_gradient(
        &self,
        py: Python<'_>,
        unit: usize,
        name: &str,
        dtype: &str,
        numel: usize,
        kept: Option<&str>,
    ) -> PyResult<usize> {
        let dtypes = gradients::parse_dtypes(dtype, kept)?;
        gradients::create(py, &*self.parts()?, self.unit(unit), name, dtypes, numel)
    }

    /// Reserves host memory for the gradients of small tensors packed together, as
    /// `create_gradient`; returns their number.
    #[pyo3(signature = (dtype, numel, kept = None))]
    fn create_packed_gradient(&self, dtype: &str, numel: usize, kept: Option<&str>) -> PyResult<usize> {
        gradients::create_packed(&*self.parts()?, gradients::parse_dtypes(dtype, kept)?, numel)
    }

    /// As `create_packed_gradient`, where the plan holds no buffer for it: in memory `outside` of the
    /// arena, or in a staging buffer, which then has no other use. `None` if none of those is spare.
    fn create_later_gradient(
        &self,
        py: Python<'_>,
        dtype: &str,
        numel: usize,
        kept: &str,
        outside: bool,
    ) -> PyResult<Option<usize>> {
        let dtypes = gradients::parse_dtypes(dtype, Some(kept))?;
        gradients::create_packed_later(py, &*self.parts()?, dtypes, numel, outside)
    }

    /// Captures `numel` gradient elements at address `source`; returns `(sum of squares, any
    /// non-finite)`.
    fn capture(
        &self,
        py: Python<'_>,
        gradient: usize,
        start: usize,
        source: usize,
        numel: usize,
        accumulate: bool,
    ) -> PyResult<(f64, bool)> {
        let parts = self.parts()?;
        // SAFETY: the Python layer passes a live, contiguous CPU tensor of `numel` elements and
        // holds it for the call.
        let capture = || unsafe {
            parts.gradients.capture(GradientId(gradient), start, source as *const u8, numel, accumulate)
        };
        let stats = py.detach(capture).map_err(|error| exec_error(&error))?;
        Ok((stats.sum_squares, stats.non_finite))
    }

    /// As `capture` of the whole gradient of a tensor that moves alone, whose projection is put aside
    /// in `projected`: a gradient of bfloat16, which chunks of any model hold, of two elements for each
    /// of `Projection.numbers`.
    #[allow(clippy::too_many_arguments)]
    fn capture_projected(
        &self,
        py: Python<'_>,
        gradient: usize,
        source: usize,
        accumulate: bool,
        projection: &Bound<'_, Projection>,
        projected: usize,
        threads: usize,
    ) -> PyResult<(f64, bool)> {
        let (parts, projection) = (self.parts()?, projection.get().0);
        let capture = || {
            let (gradients, id) = (&parts.gradients, GradientId(gradient));
            let mut projector = gradients.projector(id, projection, threads);
            let (source, numel) = (source as *const u8, projection.rows * projection.columns);
            // SAFETY: the Python layer passes a live, contiguous CPU tensor of the projection's shape and
            // holds it for the call.
            let stats = unsafe {
                gradients.capture_and_project(id, 0, source, numel, accumulate, Some(&mut projector))
            }?;
            let measured = projector.finish();
            let (address, count) = (measured.numbers().as_ptr().cast::<u8>(), 2 * measured.numbers().len());
            // SAFETY: the numbers are ours, and live until the end of the call.
            unsafe { gradients.capture(GradientId(projected), 0, address, count, false) }?;
            Ok(stats)
        };
        let stats = py.detach(capture).map_err(|error| exec_error(&error))?;
        Ok((stats.sum_squares, stats.non_finite))
    }

    /// Returns what `capture_projected` has put aside in `projected`, and forgets it.
    fn take_projected(
        &self,
        py: Python<'_>,
        projection: &Bound<'_, Projection>,
        projected: usize,
    ) -> PyResult<ProjectedGradient> {
        let (parts, projection, id) = (self.parts()?, projection.get().0, GradientId(projected));
        py.detach(|| {
            let mut measured = Projected::room(projection, parts.gradients.scratch());
            let (mut rest, halves) = (measured.numbers_mut(), 2 * Projected::count(&projection));
            parts.gradients.visit(id, 0, halves, |piece| {
                let numbers = piece.as_chunks().0;
                let (target, after) = std::mem::take(&mut rest).split_at_mut(numbers.len());
                target
                    .iter_mut()
                    .zip(numbers)
                    .for_each(|(number, &bytes)| *number = f32::from_ne_bytes(bytes));
                rest = after;
            })?;
            parts.gradients.clear(id);
            Ok(ProjectedGradient(measured))
        })
        .map_err(|error| exec_error(&error))
    }

    /// Begins to capture the whole gradient of a tensor that moves alone, in ranges: the result is
    /// that of one `capture`. Until the end the gradient is empty.
    fn begin_gradient(&self, py: Python<'_>, gradient: usize, accumulate: bool) -> PyResult<GradientRanges> {
        let parts = self.parts()?;
        py.detach(|| GradientRanges::begin(&parts, gradient, accumulate))
    }

    /// Captures `numel` gradient elements at address `source` of the device, after `ready`. They
    /// have to live until the capture has ended. `sums` is the address and the number of the sums
    /// of squares of the blocks of `GRADIENT_BLOCK` elements (float64); behind them lies a flag
    /// (int32) that is not 0 if an element is not finite. Only a gradient that is not added to
    /// another has `sums`. Without them the gradient is measured on the host.
    #[allow(clippy::too_many_arguments)]
    #[pyo3(signature = (gradient, start, source, numel, accumulate, ready, sums))]
    fn capture_from_device(
        &self,
        py: Python<'_>,
        gradient: usize,
        start: usize,
        source: usize,
        numel: usize,
        accumulate: bool,
        ready: &Bound<'_, CudaEvent>,
        sums: Option<(usize, usize)>,
    ) -> PyResult<Capture> {
        let (parts, id, ready) = (self.parts()?, GradientId(gradient), ready.get().0.clone());
        let source = DeviceGradient { start, address: source, numel, accumulate, sums, ready };
        let (link, gradients) = (parts.link()?, &parts.gradients);
        // SAFETY: the Python layer passes live, contiguous tensors on the device and holds them
        // until the capture has ended.
        py.detach(|| unsafe { link.capture(gradients, id, source) })
            .map(Capture)
            .map_err(|error| exec_error(&error))
    }

    /// Writes gradients that are kept in staging buffers to the SSD, but for `stay` chunks, and waits
    /// for the end.
    fn spill_gradients(&self, py: Python<'_>, stay: usize) -> PyResult<()> {
        let parts = self.parts()?;
        py.detach(|| parts.gradients.spill(stay)).map_err(|error| exec_error(&error))
    }

    /// Staging chunks in use.
    #[getter]
    fn chunks_in_use(&self) -> PyResult<usize> {
        let parts = self.parts()?;
        let chunks = &parts.pools[2];
        Ok(chunks.counters().leased_bytes / parts.chunk_bytes.next_multiple_of(memascend_mem::PAGE_BYTES))
    }

    /// Bytes of buffers that are given back to the system as soon as they are free.
    #[getter]
    fn leaving_bytes(&self) -> PyResult<usize> {
        Ok(self.parts()?.pools.iter().map(|pool| pool.counters().leaving_bytes).sum())
    }

    /// Forgets a gradient.
    fn clear_gradient(&self, py: Python<'_>, gradient: usize) -> PyResult<()> {
        let parts = self.parts()?;
        py.detach(|| parts.gradients.clear(GradientId(gradient)));
        Ok(())
    }

    /// Copies a gradient of `bytes` bytes, in the dtype it is kept in, to address `target`.
    fn read_gradient(&self, py: Python<'_>, gradient: usize, target: usize, bytes: usize) -> PyResult<()> {
        gradients::read(py, &*self.parts()?, GradientId(gradient), target, bytes)
    }

    /// Projects the gradient that begins at element `start` of a tensor's, as it is kept.
    fn project_gradient(
        &self,
        py: Python<'_>,
        gradient: usize,
        start: usize,
        projection: &Bound<'_, Projection>,
        threads: usize,
    ) -> PyResult<ProjectedGradient> {
        let (parts, projection) = (self.parts()?, projection.get().0);
        py.detach(|| {
            let projector = parts.gradients.project(GradientId(gradient), start, projection, threads)?;
            Ok(ProjectedGradient(projector.finish()))
        })
        .map_err(|error| exec_error(&error))
    }

    /// Projects elements `first .. first + count` of a gradient, which begin at element `start` of what this rank keeps of
    /// a tensor's. At address `carried_in` are `Projection.carried_bytes(first)` bytes of the rank before, and
    /// those for the next one go to `carried_out`. Returns what was measured of the channels that are complete.
    #[allow(clippy::too_many_arguments)]
    fn project_share(
        &self,
        py: Python<'_>,
        gradient: usize,
        start: usize,
        projection: &Bound<'_, Projection>,
        share: (usize, usize),
        carried: (usize, usize),
        threads: usize,
    ) -> PyResult<ProjectedGradient> {
        let (parts, projection) = (self.parts()?, projection.get().0);
        let gradient = GradientId(gradient);
        py.detach(|| {
            ProjectedGradient::of_share(&parts, gradient, start, projection, share, carried, threads)
        })
        .map_err(|error| exec_error(&error))
    }

    /// Returns the measured channels of a gradient, of which `ProjectedGradient.write` has put the numbers at an
    /// address.
    fn received_channels(
        &self,
        projection: &Bound<'_, Projection>,
        channels: usize,
        address: usize,
    ) -> PyResult<ProjectedGradient> {
        Ok(ProjectedGradient::received(&*self.parts()?, projection.get().0, channels, address))
    }

    /// Updates the moments of measured channels, (2, channels, rank) float32 in a tensor of the store, and writes the
    /// channels' squares to address `target`: (channels, 3) float64. `written` says whether it holds any yet.
    #[allow(clippy::too_many_arguments)]
    fn stored_squares(
        &self,
        py: Python<'_>,
        measured: &Bound<'_, ProjectedGradient>,
        moments: &Bound<'_, TensorId>,
        written: bool,
        threads: usize,
        options: &Bound<'_, FactorOptions>,
        target: usize,
    ) -> PyResult<()> {
        let (parts, moments) = (self.parts()?, moments.get().0);
        let (measured, options) = (measured.get(), options.get());
        py.detach(|| measured.stored_squares(parts.projecting(), moments, written, threads, options, target))
            .map_err(|error| exec_error(&error))
    }

    /// `ProjectedGradient.factors` with both moments in a tensor of the store, (2, channels, rank) float32;
    /// `written` says whether it holds any yet.
    fn stored_factors(
        &self,
        py: Python<'_>,
        measured: &Bound<'_, ProjectedGradient>,
        moments: &Bound<'_, TensorId>,
        written: bool,
        threads: usize,
        options: &Bound<'_, FactorOptions>,
    ) -> PyResult<(ChannelFactors, f64)> {
        let (parts, moments) = (self.parts()?, moments.get().0);
        let (measured, options) = (measured.get(), options.get());
        py.detach(|| measured.stored_factors(parts.projecting(), moments, written, threads, options))
            .map_err(|error| exec_error(&error))
    }

    /// Puts `bytes` bytes at address `source` aside: in spare staging buffers, and on the SSD when
    /// no buffer is spare; with `spill` all of them on the SSD. Returns the handle that restores
    /// them.
    fn stash(&self, py: Python<'_>, source: usize, bytes: usize, spill: bool) -> PyResult<Stash> {
        let parts = self.parts()?;
        let stash = py.detach(|| {
            // SAFETY: the Python layer passes a live, contiguous CPU tensor of `bytes` bytes.
            memascend_exec::Stash::new(&parts.staging, unsafe { host::elements(source, bytes) }, spill)
        });
        let stash = stash.map_err(|error| exec_error(&error))?;
        Ok(Stash { stash, link: parts.link.clone() })
    }

    /// As `stash`, for `bytes` bytes at address `source` of the device, after `ready`. They have to
    /// live until the stash is `copied`.
    fn stash_from_device(
        &self,
        py: Python<'_>,
        source: usize,
        bytes: usize,
        ready: &Bound<'_, CudaEvent>,
        spill: bool,
    ) -> PyResult<Stash> {
        let (parts, ready) = (self.parts()?, &ready.get().0);
        let link = parts.link()?;
        // SAFETY: the Python layer passes a live, contiguous tensor on the device and holds it
        // until it is copied.
        let stash = py.detach(|| unsafe { link.stash(&parts.staging, source, bytes, ready, spill) });
        let stash = stash.map_err(|error| exec_error(&error))?;
        Ok(Stash { stash, link: Some(Arc::clone(link)) })
    }

    /// The link to the device, or None.
    #[getter]
    fn device(&self) -> PyResult<Option<device::DeviceLink>> {
        Ok(self.parts()?.link.clone().map(device::DeviceLink))
    }

    /// Reads the first `bytes` bytes of a tensor to address `target`.
    fn read(
        &self,
        py: Python<'_>,
        tensor: &Bound<'_, TensorId>,
        target: usize,
        bytes: usize,
    ) -> PyResult<()> {
        let (parts, tensor) = (self.parts()?, tensor.get().0);
        py.detach(|| {
            let extent = parts.store.current(tensor);
            // SAFETY: the Python layer passes a live, contiguous CPU tensor of `bytes` bytes.
            let target = unsafe { host::elements_mut(target, bytes) };
            parts.staging.read(extent, target)
        })
        .map_err(|error| exec_error(&error))
    }

    /// Reads `numel` elements of a plane to address `target`, as float32.
    fn read_plane(
        &self,
        py: Python<'_>,
        tensor: &Bound<'_, TensorId>,
        plane: &Bound<'_, Plane>,
        numel: usize,
        target: usize,
    ) -> PyResult<()> {
        let (parts, tensor, plane) = (self.parts()?, tensor.get().0, plane.get().0);
        py.detach(|| {
            let extent = parts.store.current(tensor);
            // SAFETY: the Python layer passes a live, contiguous CPU tensor of `numel` float32
            // elements.
            let target = unsafe { host::elements_mut(target, numel) };
            parts.staging.read_plane(extent, plane, target)
        })
        .map_err(|error| exec_error(&error))
    }

    /// Writes `numel` float32 elements at address `source` as a plane, the whole of it, and waits
    /// for the end.
    fn write_plane(
        &self,
        py: Python<'_>,
        tensor: &Bound<'_, TensorId>,
        plane: &Bound<'_, Plane>,
        numel: usize,
        source: usize,
    ) -> PyResult<()> {
        let (parts, tensor, plane) = (self.parts()?, tensor.get().0, plane.get().0);
        py.detach(|| {
            let extent = parts.store.rewrite(tensor)?.target;
            let pending = Arc::new(Pending::default());
            // SAFETY: the Python layer passes a live, contiguous CPU tensor of `numel` float32
            // elements.
            let source = unsafe { host::elements(source, numel) };
            parts.staging.write_plane(extent, plane, source, &pending)?;
            pending.wait()
        })
        .map_err(|error| exec_error(&error))
    }

    /// Writes `bytes` bytes at address `source` as a tensor, the whole of it, and waits for the
    /// end.
    fn write(
        &self,
        py: Python<'_>,
        tensor: &Bound<'_, TensorId>,
        source: usize,
        bytes: usize,
    ) -> PyResult<()> {
        let (parts, tensor) = (self.parts()?, tensor.get().0);
        py.detach(|| {
            let extent = parts.store.rewrite(tensor)?.target;
            let pending = Arc::new(Pending::default());
            // SAFETY: the Python layer passes a live, contiguous CPU tensor of `bytes` bytes.
            let source = unsafe { host::elements(source, bytes) };
            parts.staging.write(extent, source, &pending)?;
            pending.wait()
        })
        .map_err(|error| exec_error(&error))
    }

    /// Counters: bytes moved, host bytes in use, reserved and at most, store bytes, engine.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        statistics(py, &*self.parts()?)
    }

    /// Seconds for which kernels of updates have run, the mean of the threads that run them.
    #[getter]
    fn update_seconds(&self) -> PyResult<f64> {
        Ok(self.parts()?.executor.busy().as_secs_f64())
    }

    /// What the user should know.
    #[getter]
    fn notices(&self) -> Vec<String> {
        self.notices.locked().clone()
    }

    /// Waits for everything under way and closes the files. With `keep` the committed generations
    /// stay, otherwise the files are removed. Closing twice is fine.
    fn close(&self, py: Python<'_>, keep: bool) -> PyResult<()> {
        if self.is_forked() {
            return Ok(()); // Threads, buffers and files are the parent's.
        }
        let parts = self.parts.locked().take();
        let Some(parts) = parts else { return Ok(()) };
        py.detach(|| {
            if let Some(link) = &parts.link {
                link.close();
            }
            if !keep {
                // On a failed drive the files may stay: there is nothing left to try.
                let _ = parts.store.forget();
            }
            drop(parts);
        });
        Ok(())
    }

    /// Whether it cannot be used any more: `close` was called, or this process is a forked child.
    #[getter]
    fn closed(&self) -> bool {
        self.is_forked() || self.parts.locked().is_none()
    }

    /// Whether this process was forked from the one that opened it, which alone can use it.
    #[getter]
    fn forked(&self) -> bool {
        self.is_forked()
    }
}
