//! Functions for tests and measurements, which the package does not call.

use std::ffi::c_void;
use std::sync::Arc;
use std::time::Instant;

use memascend_guarded::guarded;
use memascend_mem::{CudaEvents, Cudart};
use pyo3::prelude::*;

use crate::apollo::{ProjectedGradient, Projection};
use crate::errors::memory_error;
use crate::host::elements_mut;
use crate::lease::LeaseBuffer;
use crate::runtime::Runtime;

/// Activity, volume, bytes, and nanoseconds since its begin and its end.
type RecordedSpan = (&'static str, usize, usize, u64, u64);

/// For tests and measurements alone: the package calls nothing of it.
#[pyclass(frozen, module = "memascend._memascend")]
pub(crate) struct ForTests;

#[guarded]
#[pymethods]
impl ForTests {
    /// The random matrix of a projection as a list of float32, (elements of a channel, rank).
    #[staticmethod]
    fn random_matrix(projection: &Bound<'_, Projection>) -> Vec<f32> {
        projection.get().0.matrix()
    }

    /// Writes `Projection.numbers` float32 to an address: the projected gradient, (channels, rank), and
    /// behind it each channel's sum of squares, the bits of a float64 as two numbers.
    #[staticmethod]
    fn write_projected(projected: &Bound<'_, ProjectedGradient>, address: usize) {
        let numbers = projected.get().0.numbers();
        // SAFETY: the caller passes a live, contiguous CPU tensor of this size.
        unsafe { elements_mut(address, numbers.len()) }.copy_from_slice(numbers);
    }

    /// Returns a buffer to its pool only when everything enqueued in a CUDA stream so far is done.
    /// `stream` is torch's `Stream.cuda_stream`.
    #[staticmethod]
    fn return_after(lease: &Bound<'_, LeaseBuffer>, stream: usize) -> PyResult<()> {
        let cudart = Cudart::find().map_err(|error| memory_error(&error))?;
        // SAFETY: the caller passes the handle of a live stream of the current device.
        let event = unsafe { CudaEvents::new(&cudart).record(stream as *mut c_void) };
        lease.get().lease.return_after(Arc::new(event.map_err(|error| memory_error(&error))?));
        Ok(())
    }

    /// Records the operations of the volumes and of the update kernels from now on: the next `most` spans of each
    /// volume and of the kernels.
    #[staticmethod]
    fn begin_recording(runtime: &Bound<'_, Runtime>, most: usize) -> PyResult<()> {
        let inner = runtime.get().inner()?;
        let volumes = inner.store.recorders().map(|(_, recorder)| recorder);
        volumes.chain([inner.executor.recorder()]).for_each(|recorder| recorder.begin(most));
        Ok(())
    }

    /// Ends the recording. Returns `(activity, volume, bytes, began, ended)` of each span, the times in
    /// nanoseconds before this call, and how many spans were too many. Activities are `read`, `write`,
    /// `flush`, `manifest` and `kernel`, the last without a volume: 0.
    #[staticmethod]
    fn end_recording(runtime: &Bound<'_, Runtime>) -> PyResult<(Vec<RecordedSpan>, usize)> {
        let (inner, now) = (runtime.get().inner()?, Instant::now());
        let ago =
            |instant| u64::try_from(now.saturating_duration_since(instant).as_nanos()).unwrap_or(u64::MAX);
        let (mut spans, mut missed) = (Vec::new(), 0);
        for (volume, recorder) in inner.store.recorders().chain([(0, inner.executor.recorder())]) {
            let recording = recorder.end();
            missed += recording.missed;
            spans.extend(
                recording
                    .spans
                    .iter()
                    .map(|span| (span.activity.name(), volume, span.bytes, ago(span.began), ago(span.ended))),
            );
        }
        Ok((spans, missed))
    }
}
