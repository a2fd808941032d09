//! Work with another device current than the calling thread's, without a context where none is used.
//!
//! Since CUDA 12, setting a device makes a context there, which takes hundreds of MB. A thread whose own
//! device has none keeps its device, and another thread does the work. Host memory is pinned in any context,
//! because it is portable.

use std::ffi::{CStr, OsStr, c_int, c_uint};
use std::{panic, thread};

use libloading::os::unix::Library;

use crate::{CudaError, Cudart, Result};

/// `cuDevicePrimaryCtxGetState`.
pub(super) type PrimaryContextState = unsafe extern "C" fn(c_int, *mut c_uint, *mut c_int) -> c_int;

const PRIMARY_CONTEXT_STATE: &CStr = c"cuDevicePrimaryCtxGetState";
const DRIVER: &str = "libcuda.so.1";

/// The driver's function that tells whether a device has a context, if the runtime has loaded the
/// driver. Asking makes no context.
pub(super) fn primary_context_state(runtime: &Library) -> Option<PrimaryContextState> {
    // SAFETY: the type is that of the function in the CUDA headers. Neither library is unloaded: the
    // runtime never, and with it the driver that it has loaded.
    unsafe {
        if let Ok(symbol) = runtime.get::<PrimaryContextState>(PRIMARY_CONTEXT_STATE) {
            return Some(*symbol);
        }
        let flags = libc::RTLD_NOW | libc::RTLD_NOLOAD;
        let driver = Library::open(Some(OsStr::new(DRIVER)), flags).ok()?;
        driver.get::<PrimaryContextState>(PRIMARY_CONTEXT_STATE).ok().map(|symbol| *symbol)
    }
}

impl Cudart {
    /// Runs `work` with device `index` as the current device. Afterwards the calling thread has its
    /// own device again, which PyTorch may rely on.
    ///
    /// Setting a device makes a context there since CUDA 12, hundreds of MB of its memory. So where
    /// the calling thread's own device has none, as device 0 of a process that uses only device 1,
    /// the thread keeps that device, and another thread does the work.
    ///
    /// # Errors
    /// Errors of `work` and of setting the device, or [`CudaError::NoThread`].
    pub fn on_device<T: Send>(&self, index: c_int, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        let before = self.current_device()?;
        if before == index {
            return work();
        }
        if self.has_context(before) {
            self.set_device(index)?;
            let result = work();
            self.set_device(before)?;
            return result;
        }
        thread::scope(|scope| {
            let work = || {
                self.set_device(index)?;
                work()
            };
            let thread = thread::Builder::new().name("memascend-device".to_owned()).spawn_scoped(scope, work);
            let thread = thread.map_err(|source| CudaError::NoThread { device: index, source })?;
            thread.join().unwrap_or_else(|payload| panic::resume_unwind(payload))
        })
    }

    /// Runs `work`, which is of every device alike, where the process has a context, if it has one:
    /// page-locking host memory would else make one on the calling thread's device.
    pub(super) fn in_a_context<T: Send>(&self, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        let current = self.current_device()?;
        if self.has_context(current) {
            return work();
        }
        match (0..self.device_count()?).find(|device| self.has_context(*device)) {
            Some(device) => self.on_device(device, work),
            None => work(),
        }
    }

    /// Whether the process has a context on a device, as far as that is known.
    fn has_context(&self, device: c_int) -> bool {
        let Some(state) = self.context_state else { return false };
        let (mut flags, mut active) = (0, 0);
        // SAFETY: the function writes two ints.
        let code = unsafe { state(device, &mut flags, &mut active) };
        code == 0 && active != 0
    }
}
