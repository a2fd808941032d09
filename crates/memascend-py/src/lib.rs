//! Python bindings: conversions and nothing else.

mod apollo;
mod closed_store;
mod device;
mod errors;
mod files;
mod handles;
mod host;
mod lease;
mod overflow;
mod panics;
mod runtime;
mod testing;
mod tuning;
mod volume;

use pyo3::prelude::*;

/// The native core of memascend.
///
/// It needs the GIL: types here are `Sync`, but the Python layer above gives them addresses of tensors
/// and keeps those alive, and its hooks, which autograd's threads call, count on one thread at a time.
#[pymodule(gil_used = true)]
mod _memascend {
    use pyo3::exceptions::PyValueError;
    use pyo3::prelude::*;

    /// Elements of a gradient whose squares are summed together.
    #[pymodule_export]
    const GRADIENT_BLOCK: usize = memascend_kernels::GRADIENT_BLOCK;
    /// Host buffers and transfers are multiples of this.
    #[pymodule_export]
    const PAGE_BYTES: usize = memascend_mem::PAGE_BYTES;
    /// Staging chunks that data kept in host memory leaves to transfers.
    #[pymodule_export]
    const STAGING_RESERVE: usize = memascend_exec::STAGING_RESERVE;
    /// Windows through which frozen weights are read from their files, and the size of each.
    #[pymodule_export]
    const FILE_WINDOWS: usize = memascend_exec::FILE_WINDOWS;
    #[pymodule_export]
    const FILE_WINDOW_BYTES: usize = memascend_exec::FILE_WINDOW_BYTES;
    /// Cargo's level of optimisation; "3" in a release.
    #[pymodule_export]
    const OPT_LEVEL: &str = env!("MEMASCEND_OPT_LEVEL");

    #[pymodule_export]
    use crate::apollo::{ChannelFactors, FactorOptions, ProjectedGradient, Projection, StackedMoments};
    #[pymodule_export]
    use crate::closed_store::ClosedStore;
    #[pymodule_export]
    use crate::device::{Applying, Capture, CudaEvent, DeviceLink, Restore, Stash, cuda_device_count};
    #[pymodule_export]
    use crate::files::{ExternalFile, FileEngine, FileTransfers, Packing};
    #[pymodule_export]
    use crate::handles::{Commit, TensorId, Ticket};
    #[pymodule_export]
    use crate::host::{
        Plane, Rule, StepScalars, gradient_stats, instruction_set, keep_large_blocks,
        return_large_blocks_to_system, step_host, trim_heap,
    };
    #[pymodule_export]
    use crate::lease::{HostBuffer, LeaseBuffer};
    #[pymodule_export]
    use crate::overflow::check_overflow;
    #[pymodule_export]
    use crate::runtime::{
        GradientRanges, Runtime, RuntimeGradients, RuntimeMemory, RuntimeProjections, RuntimeStore,
        RuntimeUnits,
    };
    #[pymodule_export]
    use crate::testing::ForTests;
    #[pymodule_export]
    use crate::volume::{Transfers, Volume, device_uuid, format_device};

    /// Chooses the instruction set of the kernels if `MEMASCEND_ISA` names one.
    #[pymodule_init]
    fn init(_module: &Bound<'_, PyModule>) -> PyResult<()> {
        crate::panics::count_panics();
        match std::env::var_os("MEMASCEND_ISA") {
            None => Ok(()),
            Some(name) => memascend_kernels::Isa::choose(&name.to_string_lossy()).map_err(|reason| {
                PyValueError::new_err(format!("MEMASCEND_ISA={}: {reason}", name.display()))
            }),
        }
    }
}
