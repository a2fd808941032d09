//! Volumes for measurements, and block devices to be formatted.

use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use memascend_guarded::guarded;
use memascend_mem::{Lease, LeaseSlice, LockExt, PageableAllocator, Pool, SizeClass, WaitExt};
use memascend_nvme::{
    Completion, CountersSnapshot, DirectionSnapshot, Engine, EngineChoice, EngineOptions, IoError, Operation,
    Request, Workload, open_engine, testing,
};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::{io_error, memory_error};
use crate::lease::LeaseBuffer;

/// The largest number of transfers in flight.
const DEPTH_MAX: usize = 32_000;

/// The engine of that name: `auto`, `ring` or `threads`, or one that [`testing`] allows.
pub(crate) fn engine_options(
    name: &str,
    depth: usize,
    io_poll: bool,
    sq_poll: bool,
) -> PyResult<EngineOptions> {
    let choice = match name {
        "auto" => EngineChoice::Auto,
        "ring" => EngineChoice::Ring,
        "threads" => EngineChoice::Threads,
        other => testing::engine_choice(other).map_err(PyValueError::new_err)?.ok_or_else(|| {
            PyValueError::new_err(format!("unknown engine {other:?}: auto, ring or threads"))
        })?,
    };
    // The limit of the kernel's rings.
    if !(1..=DEPTH_MAX).contains(&depth) {
        return Err(PyValueError::new_err(format!("depth must be from 1 to {DEPTH_MAX}, not {depth}")));
    }
    Ok(EngineOptions { choice, depth, io_poll, sq_poll })
}

/// The operation of that name: `read` or `write`.
pub(crate) fn parse_operation(name: &str) -> PyResult<Operation> {
    match name {
        "read" => Ok(Operation::Read),
        "write" => Ok(Operation::Write),
        other => Err(PyValueError::new_err(format!("unknown operation {other:?}: read or write"))),
    }
}

/// Adds the counters of an engine to `report`.
pub(crate) fn set_counters(report: &Bound<'_, PyDict>, counters: &CountersSnapshot) -> PyResult<()> {
    let direction = |name: &str, of: &DirectionSnapshot| {
        report.set_item(format!("bytes_{name}"), of.bytes)?;
        report.set_item(format!("requests_{name}"), of.requests)?;
        report.set_item(format!("failures_{name}"), of.failures)?;
        for (quantile, latency) in [("p50", of.latency_p50), ("p99", of.latency_p99), ("max", of.latency_max)]
        {
            report.set_item(format!("latency_{quantile}_{name}"), latency.as_secs_f64())?;
        }
        PyResult::Ok(())
    };
    direction("read", &counters.reads)?;
    direction("written", &counters.writes)?;
    report.set_item("queue_depth_mean", counters.in_flight_mean())?;
    report.set_item("queue_depth_max", counters.in_flight_max)?;
    report.set_item("busy_seconds", counters.busy.as_secs_f64())?;
    report.set_item("bytes_per_busy_second", counters.bytes_per_busy_second())
}

/// One directory or raw block device with an engine and buffers of its own, with which `memascend bench`
/// measures.
#[pyclass(frozen, module = "memascend._memascend")]
pub(crate) struct Volume(Mutex<Option<Arc<Open>>>);

struct Open {
    // Declared first: the engine drains before the volume closes.
    engine: Arc<dyn Engine>,
    volume: memascend_nvme::Volume,
    pool: Pool,
    notices: Vec<String>,
}

impl Volume {
    fn open(&self) -> PyResult<Arc<Open>> {
        let open = self.0.locked();
        open.clone().ok_or_else(|| PyRuntimeError::new_err("the volume was closed"))
    }
}

#[guarded]
#[pymethods]
impl Volume {
    /// Makes an empty volume of a directory, a formatted device or `UUID=…`, with `buffer_count`
    /// buffers of `buffer_bytes` bytes for transfers. A directory's file is removed on close.
    #[new]
    #[pyo3(signature = (
        path, *, buffer_bytes = 1_048_576, buffer_count = 64, engine = "auto", direct = true, depth = 128,
        io_poll = false, sq_poll = false, register = true
    ))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        path: PathBuf,
        buffer_bytes: usize,
        buffer_count: usize,
        engine: &str,
        direct: bool,
        depth: usize,
        io_poll: bool,
        sq_poll: bool,
        register: bool,
    ) -> PyResult<Self> {
        let options = engine_options(engine, depth, io_poll, sq_poll)?;
        let class = SizeClass::new("volume", buffer_bytes, buffer_count);
        py.detach(|| {
            let volume = memascend_nvme::Volume::create(&path, direct).map_err(|e| io_error(&e))?;
            let opened = open_engine(volume.file(), options).map_err(|e| io_error(&e))?;
            let pool =
                Pool::new(&PageableAllocator { huge_pages: true }, &[class]).map_err(|e| memory_error(&e))?;
            if register {
                opened.engine.register(&pool);
            }
            let notices = volume.notice().map(str::to_owned).into_iter().chain(opened.notice).collect();
            Ok(Self(Mutex::new(Some(Arc::new(Open { engine: opened.engine, volume, pool, notices })))))
        })
    }

    /// Allocates the first `bytes` bytes of the volume's data.
    fn reserve(&self, py: Python<'_>, bytes: u64) -> PyResult<()> {
        let open = self.open()?;
        py.detach(|| open.volume.reserve(bytes)).map_err(|error| io_error(&error))
    }

    /// A free buffer, or None.
    fn lease(&self, bytes: usize) -> PyResult<Option<LeaseBuffer>> {
        let lease = self.open()?.pool.try_lease(bytes).map_err(|error| memory_error(&error))?;
        Ok(lease.map(|lease| LeaseBuffer { lease: Arc::new(lease) }))
    }

    /// Starts one request for each of `offsets`: `bytes` bytes between there and the next `bytes`
    /// bytes of `lease`. At most `depth` of them are in flight at once, if it is given.
    #[pyo3(signature = (operation, offsets, lease, bytes, depth = None))]
    fn start(
        &self,
        py: Python<'_>,
        operation: &str,
        offsets: Vec<u64>,
        lease: &Bound<'_, LeaseBuffer>,
        bytes: usize,
        depth: Option<usize>,
    ) -> PyResult<Transfers> {
        let open = self.open()?;
        let operation = parse_operation(operation)?;
        let lease = Arc::clone(&lease.get().lease);
        let count = offsets.len();
        if count.checked_mul(bytes).is_none_or(|needed| needed > lease.capacity()) {
            return Err(PyValueError::new_err(format!(
                "{count} requests of {bytes} bytes are more than a buffer of {} holds",
                lease.capacity()
            )));
        }
        let state = BatchState { next: 0, running: 0, error: None, lease: Some(lease) };
        let batch = Arc::new(Batch {
            engine: Arc::clone(&open.engine),
            operation,
            bytes,
            offsets,
            state: Mutex::new(state),
            ended: Condvar::new(),
        });
        py.detach(|| (0..depth.unwrap_or(count).clamp(1, count.max(1))).for_each(|_| batch.submit()));
        Ok(Transfers(batch))
    }

    /// Keeps `depth` requests in flight for `seconds` and returns bytes_read, bytes_written,
    /// requests, seconds, latency_p50, latency_p99 and latency_max (seconds).
    #[pyo3(signature = (*, read_percent, random, request_bytes, depth, span_bytes, seconds))]
    #[allow(clippy::too_many_arguments)]
    fn measure<'py>(
        &self,
        py: Python<'py>,
        read_percent: u32,
        random: bool,
        request_bytes: usize,
        depth: usize,
        span_bytes: u64,
        seconds: f64,
    ) -> PyResult<Bound<'py, PyDict>> {
        let open = self.open()?;
        let duration =
            Duration::try_from_secs_f64(seconds).map_err(|e| PyValueError::new_err(e.to_string()))?;
        if request_bytes == 0 || depth == 0 || depth > open.pool.free_buffers(request_bytes) {
            return Err(PyValueError::new_err(format!(
                "there are not enough buffers for {depth} requests of {request_bytes} bytes: open the volume with more or larger ones"
            )));
        }
        let workload = Workload { read_percent, random, request_bytes, depth, span_bytes, duration };
        let measured =
            py.detach(|| workload.run(&open.engine, &open.pool)).map_err(|error| io_error(&error))?;
        let report = PyDict::new(py);
        report.set_item("bytes_read", measured.bytes_read)?;
        report.set_item("bytes_written", measured.bytes_written)?;
        report.set_item("requests", measured.requests)?;
        report.set_item("seconds", measured.seconds)?;
        report.set_item("latency_p50", measured.latency_p50.as_secs_f64())?;
        report.set_item("latency_p99", measured.latency_p99.as_secs_f64())?;
        report.set_item("latency_max", measured.latency_max.as_secs_f64())?;
        Ok(report)
    }

    /// Waits until everything written is durable.
    fn flush(&self, py: Python<'_>) -> PyResult<()> {
        let open = self.open()?;
        py.detach(|| open.engine.flush()).map_err(|error| io_error(&error))
    }

    /// How the volume works, and its counters: as a volume's entry in `memascend.stats`.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let open = self.open()?;
        let report = PyDict::new(py);
        report.set_item("path", open.volume.path().as_os_str())?;
        report.set_item("identity", open.volume.identity())?;
        report.set_item("engine", open.engine.name())?;
        report.set_item("features", open.engine.features())?;
        report.set_item("direct_io", open.volume.is_direct())?;
        let geometry = open.volume.file().geometry();
        report.set_item("block_bytes", geometry.block_bytes)?;
        report.set_item("part_bytes", geometry.part_bytes)?;
        report.set_item("notices", open.notices.clone())?;
        set_counters(&report, &open.engine.counters())?;
        Ok(report)
    }

    /// Waits for everything under way and removes the file. Closing twice is fine.
    fn close(&self, py: Python<'_>) {
        let open = self.0.locked().take();
        py.detach(|| drop(open));
    }
}

/// Requests started together.
#[pyclass(frozen, module = "memascend._memascend")]
pub(crate) struct Transfers(Arc<Batch>);

struct Batch {
    engine: Arc<dyn Engine>,
    operation: Operation,
    bytes: usize,
    offsets: Vec<u64>,
    state: Mutex<BatchState>,
    ended: Condvar,
}

struct BatchState {
    /// The next request, and the number of those that have not ended.
    next: usize,
    running: usize,
    error: Option<IoError>,
    /// Dropped with the last request, before the end is signalled.
    lease: Option<Arc<Lease>>,
}

impl Batch {
    fn lock(&self) -> MutexGuard<'_, BatchState> {
        self.state.locked()
    }

    /// Submits the next request, if there is one. After a failure no more are submitted.
    fn submit(self: &Arc<Self>) {
        let mut state = self.lock();
        let index = state.next;
        if index == self.offsets.len() {
            if state.running == 0 {
                state.lease = None;
                self.ended.notify_all();
            }
            return;
        }
        state.next += 1;
        state.running += 1;
        let lease = Arc::clone(state.lease.as_ref().expect("held until the end"));
        drop(state);
        let batch = Arc::clone(self);
        self.engine.submit(Request {
            operation: self.operation,
            offset: self.offsets[index],
            buffer: LeaseSlice::new(lease, index * self.bytes, self.bytes),
            on_complete: Box::new(move |Completion { buffer, result }| {
                drop(buffer);
                let mut state = batch.lock();
                state.running -= 1;
                if let Err(error) = result {
                    state.error.get_or_insert(error);
                    state.next = batch.offsets.len();
                }
                drop(state);
                batch.submit();
            }),
        });
    }

    fn is_over(&self, state: &BatchState) -> bool {
        state.running == 0 && state.next == self.offsets.len()
    }
}

#[guarded]
#[pymethods]
impl Transfers {
    /// Waits until all have ended; raises the first error. After an error no more are submitted.
    fn wait(&self, py: Python<'_>) -> PyResult<()> {
        let error = py.detach(|| {
            let mut state = self.0.lock();
            while !self.0.is_over(&state) {
                state = self.0.ended.wait_locked(state);
            }
            state.error.take()
        });
        error.map_or(Ok(()), |error| Err(io_error(&error)))
    }
}

/// The UUID of a formatted block device; None for a device that is not formatted, or a path that is
/// no device.
#[guarded]
#[pyfunction]
pub(crate) fn device_uuid(py: Python<'_>, path: PathBuf) -> PyResult<Option<String>> {
    let found =
        py.detach(|| memascend_nvme::device_uuid(&path)).map_err(|error| io_error(&IoError::from(error)))?;
    Ok(found.map(|id| id.to_string()))
}

/// Writes memascend's superblock to a block device. Returns the device's UUID, its bytes for data,
/// and a description of its content before. Existing content is destroyed only if `destroy`
/// names the same device.
#[guarded]
#[pyfunction]
#[pyo3(signature = (path, destroy = None))]
pub(crate) fn format_device(
    py: Python<'_>,
    path: PathBuf,
    destroy: Option<PathBuf>,
) -> PyResult<(String, u64, Vec<String>)> {
    let formatted = py
        .detach(|| memascend_nvme::format_device(&path, destroy.as_deref()))
        .map_err(|error| io_error(&IoError::from(error)))?;
    let destroyed = formatted.destroyed.iter().map(ToString::to_string).collect();
    Ok((formatted.id.to_string(), formatted.data_bytes, destroyed))
}
