//! The CUDA runtime library, loaded at run time. Nothing is linked: a machine without CUDA lacks
//! two allocators and devices, and everything else works.
//!
//! The libcudart that the process has already mapped (PyTorch's) comes first, then the usual names of
//! versions 13 and 12. Tests name a fake one in `MEMASCEND_CUDART`, which counts calls and fails when told
//! to.

use std::collections::BTreeSet;
use std::error::Error;
use std::ffi::{CStr, OsStr, c_char, c_int, c_uint, c_void};
use std::mem::ManuallyDrop;
use std::path::Path;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::{env, fmt, fs};

use libloading::os::unix::Library;

use crate::cuda::context::{PrimaryContextState, primary_context_state};
use crate::cuda::functions::{Functions, function};
use crate::{CudaError, Result};

/// The environment variable that names the library. If it is set, no other library is tried.
const LIBRARY_VARIABLE: &str = "MEMASCEND_CUDART";
const USUAL_NAMES: [&str; 3] = ["libcudart.so.13", "libcudart.so.12", "libcudart.so"];
const SUPPORTED_MAJORS: [c_int; 2] = [12, 13];

/// Page-locked for the contexts of all devices: `cudaHostAllocPortable`,
/// `cudaHostRegisterPortable`.
const PORTABLE: c_uint = 1;
const INVALID_VALUE: c_int = 1;
const OUT_OF_MEMORY: c_int = 2;
const INSUFFICIENT_DRIVER: c_int = 35;
const NO_DEVICE: c_int = 100;
pub(super) const NOT_READY: c_int = 600;
const ALREADY_REGISTERED: c_int = 712;
const NOT_REGISTERED: c_int = 713;
const NOT_SUPPORTED: c_int = 801;

/// A CUDA runtime library of a supported version that sees a device. The library is never unloaded.
pub struct Cudart {
    library: String,
    version: c_int,
    pub(super) functions: Functions,
    /// Tells whether a device has a context, where the driver is known.
    pub(super) context_state: Option<PrimaryContextState>,
}

impl fmt::Debug for Cudart {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Cudart").field("library", &self.library).field("version", &self.version).finish()
    }
}

impl Cudart {
    /// Finds the library for this process. In this order: the one that the environment variable
    /// `MEMASCEND_CUDART` names, one that is loaded already (PyTorch's), one that the dynamic
    /// loader finds under its usual names.
    ///
    /// # Errors
    /// If the variable is set, the error of the library it names. Otherwise the first error of a
    /// library that was found, or [`CudaError::LibraryNotFound`] with all libraries tried.
    pub fn find() -> Result<Arc<Self>> {
        match env::var_os(LIBRARY_VARIABLE).filter(|path| !path.is_empty()) {
            Some(path) => Self::open(path),
            None => Self::first_of(&mapped_libraries(), &USUAL_NAMES),
        }
    }

    /// Loads the library at `path`, or, if `path` is a bare name, the one that the dynamic loader
    /// finds.
    ///
    /// # Errors
    /// If it cannot be loaded, lacks a function, is of another version than 12 or 13, or sees no
    /// device.
    pub fn open(path: impl AsRef<Path>) -> Result<Arc<Self>> {
        let path = path.as_ref().as_os_str();
        let loaded = load(path, 0).map_err(|reason| CudaError::LibraryNotFound { tried: reason })?;
        Self::from_loaded(&loaded, path)
    }

    /// Where the library was loaded from.
    pub fn library(&self) -> &str {
        &self.library
    }

    /// Version of the runtime, as (major, minor).
    pub fn version(&self) -> (u32, u32) {
        split_version(self.version)
    }

    fn first_of(mapped: &BTreeSet<String>, names: &[&str]) -> Result<Arc<Self>> {
        let mut tried = Vec::new();
        let mut first_failure = None;
        let mapped = mapped.iter().map(|path| (path.as_str(), libc::RTLD_NOLOAD));
        for (name, flags) in mapped.chain(names.iter().map(|name| (*name, 0))) {
            let name = OsStr::new(name);
            // A mapped file is not always a loaded library: a process may only read the file. Then
            // it is loaded here.
            match load(name, flags).or_else(|_| load(name, 0)) {
                Ok(loaded) => match Self::from_loaded(&loaded, name) {
                    Ok(cudart) => return Ok(cudart),
                    Err(failure) => first_failure = first_failure.or(Some(failure)),
                },
                Err(reason) => tried.push(reason),
            }
        }
        Err(first_failure.unwrap_or_else(|| CudaError::LibraryNotFound { tried: tried.join("; ") }.into()))
    }

    fn from_loaded(loaded: &Library, asked: &OsStr) -> Result<Arc<Self>> {
        let asked = asked.to_string_lossy().into_owned();
        let library = file_of(loaded, &asked)?.unwrap_or(asked);
        let functions = Functions::of(loaded, &library)?;
        let mut cudart = Self { library, version: 0, functions, context_state: None };
        cudart.check_version()?;
        cudart.check_devices()?;
        // The runtime has loaded the driver to count devices.
        cudart.context_state = primary_context_state(loaded);
        Ok(Arc::new(cudart))
    }

    fn check_version(&mut self) -> Result<()> {
        let mut version = 0;
        // SAFETY: the function writes one int.
        let code = unsafe { (self.functions.runtime_get_version)(&mut version) };
        self.check("cudaRuntimeGetVersion", code)?;
        self.version = version;
        if SUPPORTED_MAJORS.contains(&(version / 1000)) {
            return Ok(());
        }
        let (major, minor) = split_version(version);
        Err(CudaError::UnsupportedVersion { library: self.library.clone(), major, minor }.into())
    }

    fn check_devices(&self) -> Result<()> {
        if self.device_count()? > 0 {
            return Ok(());
        }
        Err(CudaError::NoDevice { library: self.library.clone() }.into())
    }

    /// How many devices this process sees.
    pub fn device_count(&self) -> Result<c_int> {
        let mut count = 0;
        // SAFETY: the function writes one int.
        let code = unsafe { (self.functions.get_device_count)(&mut count) };
        self.check("cudaGetDeviceCount", code)?;
        Ok(count)
    }

    /// Makes device `index` the current device of the calling thread, with a context there.
    pub fn set_device(&self, index: c_int) -> Result<()> {
        // SAFETY: the function takes any int.
        let code = unsafe { (self.functions.set_device)(index) };
        Ok(self.check("cudaSetDevice", code)?)
    }

    /// The calling thread's current device.
    pub(super) fn current_device(&self) -> Result<c_int> {
        let mut device = 0;
        // SAFETY: the function writes one int.
        let code = unsafe { (self.functions.get_device)(&mut device) };
        self.check("cudaGetDevice", code)?;
        Ok(device)
    }

    /// (free, total) bytes of the calling thread's device.
    pub fn device_memory(&self) -> Result<(usize, usize)> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: the function writes two size_t.
        let code = unsafe { (self.functions.mem_get_info)(&mut free, &mut total) };
        self.check("cudaMemGetInfo", code)?;
        Ok((free, total))
    }

    /// Page-locked memory from CUDA, not initialised.
    pub(crate) fn host_alloc(&self, bytes: usize) -> Result<NonNull<u8>> {
        const CALL: &str = "cudaHostAlloc";
        let address = self.in_a_context(|| {
            let mut address = ptr::null_mut();
            // SAFETY: the function writes one pointer.
            let code = unsafe { (self.functions.host_alloc)(&mut address, bytes, PORTABLE) };
            self.check_host(CALL, code, bytes)?;
            Ok(address.expose_provenance())
        })?;
        // CUDA answers a request for zero bytes with a null pointer; no caller makes such a
        // request.
        let address = ptr::with_exposed_provenance_mut(address);
        Ok(NonNull::new(address).ok_or(CudaError::InvalidValue { call: CALL })?)
    }

    /// Frees memory of [`host_alloc`](Self::host_alloc).
    ///
    /// # Safety
    /// `address` came from `host_alloc`, was not freed yet and is not used again.
    pub(crate) unsafe fn free_host(&self, address: NonNull<u8>) -> Result<()> {
        // SAFETY: the caller's promise.
        let code = unsafe { (self.functions.free_host)(address.as_ptr().cast()) };
        Ok(self.check("cudaFreeHost", code)?)
    }

    /// Page-locks `bytes` bytes of memory and registers them with CUDA.
    ///
    /// # Safety
    /// The range is mapped, and stays mapped until it is unregistered.
    pub(crate) unsafe fn host_register(&self, address: NonNull<u8>, bytes: usize) -> Result<()> {
        let address = address.as_ptr().expose_provenance();
        self.in_a_context(|| {
            let address = ptr::with_exposed_provenance_mut(address);
            // SAFETY: the caller's promise.
            let code = unsafe { (self.functions.host_register)(address, bytes, PORTABLE) };
            Ok(self.check_host("cudaHostRegister", code, bytes)?)
        })
    }

    /// Ends a registration. When this returns `Ok`, CUDA has nothing registered at `address`.
    pub(crate) fn host_unregister(&self, address: NonNull<u8>) -> Result<()> {
        // SAFETY: CUDA looks the address up in its registrations and does not read the memory.
        let code = unsafe { (self.functions.host_unregister)(address.as_ptr().cast()) };
        match self.check("cudaHostUnregister", code) {
            // Another part of the process reset the device.
            Err(_) if code == NOT_REGISTERED => Ok(()),
            result => Ok(result?),
        }
    }

    fn check_host(
        &self,
        call: &'static str,
        code: c_int,
        bytes: usize,
    ) -> std::result::Result<(), CudaError> {
        self.check(call, code).map_err(|error| match code {
            OUT_OF_MEMORY => CudaError::OutOfMemory { call, bytes },
            ALREADY_REGISTERED => CudaError::AlreadyRegistered { bytes },
            NOT_SUPPORTED => CudaError::NotSupported { call, bytes },
            _ => error,
        })
    }

    pub(super) fn check(&self, call: &'static str, code: c_int) -> std::result::Result<(), CudaError> {
        if code == 0 {
            return Ok(());
        }
        self.forget_error();
        Err(match code {
            INVALID_VALUE => CudaError::InvalidValue { call },
            INSUFFICIENT_DRIVER => CudaError::Driver {
                library: self.library.clone(),
                runtime: version_text(self.version),
                driver: self.driver_text(),
            },
            NO_DEVICE => CudaError::NoDevice { library: self.library.clone() },
            // SAFETY: the function takes any int.
            _ => unsafe {
                CudaError::Call {
                    call,
                    code,
                    name: text((self.functions.get_error_name)(code)),
                    message: text((self.functions.get_error_string)(code)),
                }
            },
        })
    }

    /// Clears the calling thread's last CUDA error, which PyTorch would otherwise report as its
    /// own. An error that broke the context is not cleared.
    pub(super) fn forget_error(&self) {
        // SAFETY: the function takes nothing and returns an int.
        unsafe { (self.functions.get_last_error)() };
    }

    fn driver_text(&self) -> String {
        let mut version = 0;
        // SAFETY: the function writes one int.
        let code = unsafe { (self.functions.driver_get_version)(&mut version) };
        if code != 0 {
            self.forget_error();
        }
        // The version is 0 where no driver is installed.
        if code != 0 || version == 0 {
            return "no driver is loaded".to_owned();
        }
        format!("the driver supports CUDA up to {}", version_text(version))
    }
}

/// Loads a library for good, or with `RTLD_NOLOAD` in `flags` only refers to one that is loaded.
fn load(name: &OsStr, flags: c_int) -> std::result::Result<ManuallyDrop<Library>, String> {
    let shown = name.to_string_lossy();
    // SAFETY: loading runs the library's initialisers, which is what the caller asks for. Its
    // finalisers never run, since the library is never unloaded.
    let loaded = unsafe { Library::open(Some(name), libc::RTLD_NOW | libc::RTLD_LOCAL | flags) };
    loaded.map(ManuallyDrop::new).map_err(|error| {
        let reason = error.source().map_or_else(|| error.to_string(), ToString::to_string);
        // The loader's own text mostly begins with the name.
        if reason.contains(&*shown) { reason } else { format!("{shown}: {reason}") }
    })
}

/// The path of the library that was loaded under the name `asked`, where the loader tells.
fn file_of(loaded: &Library, asked: &str) -> Result<Option<String>> {
    let version: unsafe extern "C" fn(*mut c_int) -> c_int =
        // SAFETY: the type is that of the function in the CUDA headers.
        unsafe { function(loaded, c"cudaRuntimeGetVersion", asked) }?;
    let mut info = libc::Dl_info {
        dli_fname: ptr::null(),
        dli_fbase: ptr::null_mut(),
        dli_sname: ptr::null(),
        dli_saddr: ptr::null_mut(),
    };
    // SAFETY: `info` is writable; the address is only looked up.
    let is_told = unsafe { libc::dladdr(version as *const c_void, &mut info) } != 0;
    Ok((is_told && !info.dli_fname.is_null()).then(|| text(info.dli_fname)))
}

/// Paths of the CUDA runtimes that are mapped into this process.
fn mapped_libraries() -> BTreeSet<String> {
    // Without /proc there is nothing to find here, and the usual names are tried.
    let maps = fs::read("/proc/self/maps").unwrap_or_default();
    cudart_paths(&String::from_utf8_lossy(&maps))
}

fn cudart_paths(maps: &str) -> BTreeSet<String> {
    maps.lines()
        // The path begins at the line's first slash: the five fields before the path contain none.
        .filter_map(|line| line.find('/').map(|start| &line[start..]))
        .filter(|path| {
            let file = path.rsplit('/').next().unwrap_or_default();
            file.starts_with("libcudart") && file.contains(".so") && !file.ends_with(" (deleted)")
        })
        .map(str::to_owned)
        .collect()
}

fn split_version(version: c_int) -> (u32, u32) {
    let version = version.unsigned_abs();
    (version / 1000, version % 1000 / 10)
}

fn version_text(version: c_int) -> String {
    let (major, minor) = split_version(version);
    format!("{major}.{minor}")
}

fn text(string: *const c_char) -> String {
    if string.is_null() {
        return "unknown".to_owned();
    }
    // SAFETY: every caller passes a C string of CUDA or of the loader that is not null.
    unsafe { CStr::from_ptr(string) }.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemError;

    #[test]
    fn mapped_runtimes_are_found_by_their_file_names() {
        let maps = "\
7f00-7f10 r--p 00000000 08:01 42                         /a dir/libcudart.so.12
7f10-7f20 r-xp 00001000 08:01 42                         /a dir/libcudart.so.12
7f20-7f30 r--p 00000000 08:01 43                         /b/libcudart-d0da41ae.so.13.0
7f30-7f40 r--p 00000000 08:01 44                         /b/libcudart.so.12 (deleted)
7f40-7f50 r--p 00000000 08:01 45                         /libcudart.so/libother.so
7f50-7f60 rw-p 00000000 00:00 0
7f60-7f70 rw-p 00000000 00:00 0                          [stack]
";
        let expected = ["/a dir/libcudart.so.12", "/b/libcudart-d0da41ae.so.13.0"];
        assert!(cudart_paths(maps).iter().eq(expected), "{:?}", cudart_paths(maps));
    }

    #[test]
    fn a_search_in_vain_lists_everything_tried() {
        let mapped = BTreeSet::from(["/nowhere/libcudart.so.12".to_owned()]);
        let error = Cudart::first_of(&mapped, &["libcudart.so.absent", "libcudart.so.missing"]).unwrap_err();
        assert!(matches!(error, MemError::Cuda(CudaError::LibraryNotFound { .. })), "{error:?}");
        for tried in ["/nowhere/libcudart.so.12", "libcudart.so.absent", "libcudart.so.missing"] {
            assert!(error.to_string().contains(tried), "{error}");
        }
        assert!(error.to_string().contains(LIBRARY_VARIABLE), "{error}");
    }

    #[test]
    fn a_library_without_the_functions_is_named_with_the_first() {
        let error = Cudart::open("libc.so.6").unwrap_err().to_string();
        assert!(error.contains("libc.so.6") && error.contains("cudaRuntimeGetVersion"), "{error}");
    }
}
