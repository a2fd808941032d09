//! The functions of the CUDA runtime that are used, and their C signatures.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use libloading::os::unix::Library;

use crate::{CudaError, Result};

/// The functions, with the signatures of `cuda_runtime_api.h`; `cudaError_t` is a C `int`, streams
/// and events are pointers.
pub(super) struct Functions {
    pub(super) runtime_get_version: unsafe extern "C" fn(*mut c_int) -> c_int,
    pub(super) driver_get_version: unsafe extern "C" fn(*mut c_int) -> c_int,
    pub(super) get_device_count: unsafe extern "C" fn(*mut c_int) -> c_int,
    pub(super) host_alloc: unsafe extern "C" fn(*mut *mut c_void, usize, c_uint) -> c_int,
    pub(super) free_host: unsafe extern "C" fn(*mut c_void) -> c_int,
    pub(super) host_register: unsafe extern "C" fn(*mut c_void, usize, c_uint) -> c_int,
    pub(super) host_unregister: unsafe extern "C" fn(*mut c_void) -> c_int,
    pub(super) get_error_name: unsafe extern "C" fn(c_int) -> *const c_char,
    pub(super) get_error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    pub(super) get_last_error: unsafe extern "C" fn() -> c_int,
    pub(super) event_create_with_flags: unsafe extern "C" fn(*mut *mut c_void, c_uint) -> c_int,
    pub(super) event_record: unsafe extern "C" fn(*mut c_void, *mut c_void) -> c_int,
    pub(super) event_query: unsafe extern "C" fn(*mut c_void) -> c_int,
    pub(super) event_synchronize: unsafe extern "C" fn(*mut c_void) -> c_int,
    pub(super) event_destroy: unsafe extern "C" fn(*mut c_void) -> c_int,
    pub(super) set_device: unsafe extern "C" fn(c_int) -> c_int,
    pub(super) get_device: unsafe extern "C" fn(*mut c_int) -> c_int,
    pub(super) mem_get_info: unsafe extern "C" fn(*mut usize, *mut usize) -> c_int,
    pub(super) stream_create_with_flags: unsafe extern "C" fn(*mut *mut c_void, c_uint) -> c_int,
    pub(super) stream_destroy: unsafe extern "C" fn(*mut c_void) -> c_int,
    pub(super) stream_wait_event: unsafe extern "C" fn(*mut c_void, *mut c_void, c_uint) -> c_int,
    pub(super) memcpy_async:
        unsafe extern "C" fn(*mut c_void, *const c_void, usize, c_int, *mut c_void) -> c_int,
}

impl Functions {
    /// The functions of `loaded`, which is never unloaded and which errors call `shown`.
    ///
    /// # Errors
    /// The first function that the library does not have.
    pub(super) fn of(loaded: &Library, shown: &str) -> Result<Self> {
        // SAFETY: each field is declared with the signature that the CUDA headers give its
        // function.
        unsafe {
            Ok(Self {
                runtime_get_version: function(loaded, c"cudaRuntimeGetVersion", shown)?,
                driver_get_version: function(loaded, c"cudaDriverGetVersion", shown)?,
                get_device_count: function(loaded, c"cudaGetDeviceCount", shown)?,
                host_alloc: function(loaded, c"cudaHostAlloc", shown)?,
                free_host: function(loaded, c"cudaFreeHost", shown)?,
                host_register: function(loaded, c"cudaHostRegister", shown)?,
                host_unregister: function(loaded, c"cudaHostUnregister", shown)?,
                get_error_name: function(loaded, c"cudaGetErrorName", shown)?,
                get_error_string: function(loaded, c"cudaGetErrorString", shown)?,
                get_last_error: function(loaded, c"cudaGetLastError", shown)?,
                event_create_with_flags: function(loaded, c"cudaEventCreateWithFlags", shown)?,
                event_record: function(loaded, c"cudaEventRecord", shown)?,
                event_query: function(loaded, c"cudaEventQuery", shown)?,
                event_synchronize: function(loaded, c"cudaEventSynchronize", shown)?,
                event_destroy: function(loaded, c"cudaEventDestroy", shown)?,
                set_device: function(loaded, c"cudaSetDevice", shown)?,
                get_device: function(loaded, c"cudaGetDevice", shown)?,
                mem_get_info: function(loaded, c"cudaMemGetInfo", shown)?,
                stream_create_with_flags: function(loaded, c"cudaStreamCreateWithFlags", shown)?,
                stream_destroy: function(loaded, c"cudaStreamDestroy", shown)?,
                stream_wait_event: function(loaded, c"cudaStreamWaitEvent", shown)?,
                memcpy_async: function(loaded, c"cudaMemcpyAsync", shown)?,
            })
        }
    }
}

/// A function of a library.
///
/// # Safety
/// `F` is a function pointer with the C signature of the function, and the library is never
/// unloaded.
pub(super) unsafe fn function<F: Copy>(loaded: &Library, name: &'static CStr, shown: &str) -> Result<F> {
    // SAFETY: the caller's promise.
    let symbol = unsafe { loaded.get::<F>(name) };
    symbol.map(|symbol| *symbol).map_err(|_| {
        CudaError::MissingFunction { library: shown.to_owned(), symbol: name.to_string_lossy().into_owned() }
            .into()
    })
}
