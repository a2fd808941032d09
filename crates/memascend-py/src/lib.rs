//! Python bindings: conversions and nothing else.

mod device;
mod errors;
mod files;
mod host;
mod lease;
mod overflow;
mod runtime;
mod volume;

use pyo3::prelude::*;

/// The native core of memascend.
#[pymodule]
mod _memascend {
    #[pymodule_export]
    use crate::device::{Capture, CudaEvent, DeviceLink, Restore, Stash, cuda_device_count};
    #[pymodule_export]
    use crate::files::ExternalFile;
    #[pymodule_export]
    use crate::host::{Plane, Rule, StepScalars, gradient_stats, return_large_blocks_to_system, step_host};
    #[pymodule_export]
    use crate::lease::{HostBuffer, LeaseBuffer};
    #[pymodule_export]
    use crate::overflow::check_overflow;
    #[pymodule_export]
    use crate::runtime::{Commit, Runtime, TensorId, Ticket};
    #[pymodule_export]
    use crate::volume::{KeptStore, Transfers, Volume, device_uuid, format_device};
}
