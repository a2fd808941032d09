//! Counters of a runtime as a dictionary.

use memascend_mem::Pool;
use memascend_nvme::CountersSnapshot;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::inner::RuntimeInner;
use crate::volume::set_counters;

/// Counters: bytes moved, host bytes in use, reserved and at most, store bytes, engine.
pub(crate) fn statistics<'py>(py: Python<'py>, inner: &RuntimeInner) -> PyResult<Bound<'py, PyDict>> {
    let volumes = inner.store.volumes();
    let pools: Vec<_> = inner.pools.iter().map(Pool::counters).collect();
    let stats = PyDict::new(py);
    let io =
        |of: fn(&CountersSnapshot) -> u64| volumes.iter().map(|volume| of(&volume.counters)).sum::<u64>();
    stats.set_item("ssd_bytes_read", io(|counters| counters.reads.bytes))?;
    stats.set_item("ssd_bytes_written", io(|counters| counters.writes.bytes))?;
    stats.set_item("ssd_requests", io(|counters| counters.reads.requests + counters.writes.requests))?;
    stats.set_item("store_bytes_used", inner.store.used_bytes())?;
    stats.set_item("host_bytes_in_use", pools.iter().map(|pool| pool.live_bytes).sum::<usize>())?;
    let (peak_bytes, classes) = inner.units.joint_peak();
    stats.set_item("host_bytes_peak", peak_bytes)?;
    let classes = classes.iter().map(|class| (class.bytes, class.count, class.live_bytes_at_peak));
    stats.set_item("host_classes_at_peak", classes.collect::<Vec<_>>())?;
    stats.set_item("host_bytes_reserved", pools.iter().map(|pool| pool.reserved_bytes).sum::<usize>())?;
    stats.set_item("host_bytes_leaving", pools.iter().map(|pool| pool.leaving_bytes).sum::<usize>())?;
    stats.set_item("host_bytes_waste", pools.iter().map(|pool| pool.waste_bytes()).sum::<usize>())?;
    stats.set_item("host_bytes_outside", inner.outside.bytes())?;
    stats.set_item("host_bytes_outside_most", inner.outside.bytes_most())?;
    stats.set_item("pool_hits", pools.iter().map(|pool| pool.hits).sum::<u64>())?;
    stats.set_item("pool_waits", pools.iter().map(|pool| pool.waits).sum::<u64>())?;
    stats.set_item("pool_refusals", pools.iter().map(|pool| pool.refusals).sum::<u64>())?;
    stats.set_item("host_allocator", inner.units.allocator())?;
    stats.set_item("host_bytes_in_huge_pages", inner.huge_page_bytes())?;
    stats.set_item("engine", volumes[0].engine)?;
    stats.set_item("direct_io", volumes.iter().all(|volume| volume.direct))?;
    let volumes = volumes.iter().map(|volume| {
        let report = PyDict::new(py);
        report.set_item("path", volume.path.as_os_str())?;
        report.set_item("engine", volume.engine)?;
        report.set_item("features", &volume.features)?;
        report.set_item("direct_io", volume.direct)?;
        report.set_item("share", volume.share)?;
        set_counters(&report, &volume.counters)?;
        Ok(report)
    });
    stats.set_item("volumes", volumes.collect::<PyResult<Vec<_>>>()?)?;
    Ok(stats)
}
