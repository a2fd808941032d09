//! The fake CUDA runtime (`fake_cudart.c`), compiled for one test, with its settings and its books.
#![allow(dead_code)] // every test binary uses its part

use std::ffi::{CStr, CString, c_int, c_void};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::{env, fs, mem};

use memascend_mem::{Cudart, Result};
use tempfile::TempDir;

const SOURCE: &str = include_str!("../fake_cudart.c");

/// The library of a variant, compiled by the first of all test processes that asks for it.
fn compiled(definitions: &[&str]) -> PathBuf {
    let mut hasher = DefaultHasher::new();
    (SOURCE, definitions).hash(&mut hasher);
    // Beside the tests, where a new build finds it too.
    let tests = env::current_exe().unwrap();
    let room = tests.parent().unwrap();
    let path = room.join(format!("fake-cudart-{:016x}.so", hasher.finish()));
    if !path.exists() {
        // Under its own name until it is whole.
        let mut source = tempfile::Builder::new().suffix(".c").tempfile().unwrap();
        source.write_all(SOURCE.as_bytes()).unwrap();
        let whole = tempfile::NamedTempFile::new_in(room).unwrap();
        let status = Command::new("cc")
            .args(["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-pthread"])
            .args(definitions.iter().map(|definition| format!("-D{definition}")))
            .arg(source.path())
            .arg("-o")
            .arg(whole.path())
            .status()
            .expect("cc, which rustc links with, can be run");
        assert!(status.success());
        whole.persist(&path).unwrap();
    }
    path
}

/// A variant of the fake runtime, compiled and loaded for one test.
pub struct Fake {
    pub path: PathBuf,
    handle: *mut c_void,
    _directory: Option<TempDir>,
}

// SAFETY: the handle of a loaded library may be used from any thread.
unsafe impl Send for Fake {}
// SAFETY: as above; the fake locks its state.
unsafe impl Sync for Fake {}

impl Fake {
    pub fn new(definitions: &[&str]) -> Self {
        Self::named("libcudart.so.12", definitions)
    }

    pub fn named(name: &str, definitions: &[&str]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(name);
        // A file of its own: the loader takes a file that it has loaded for the same library, with its books.
        fs::copy(compiled(definitions), &path).unwrap();
        Self { _directory: Some(directory), ..Self::at(path) }
    }

    /// A variant that was compiled before, whose owner keeps its file.
    pub fn at(path: PathBuf) -> Self {
        let name = CString::new(path.as_os_str().as_bytes()).unwrap();
        // SAFETY: the name is a C string; the library has no initialisers.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        assert!(!handle.is_null());
        Self { path, handle, _directory: None }
    }

    pub fn open(&self) -> Result<Arc<Cudart>> {
        Cudart::open(&self.path)
    }

    pub fn symbol(&self, name: &CStr) -> *mut c_void {
        // SAFETY: the handle is that of a loaded library.
        let address = unsafe { libc::dlsym(self.handle, name.as_ptr()) };
        assert!(!address.is_null(), "{name:?}");
        address
    }

    pub fn get(&self, name: &CStr) -> usize {
        // SAFETY: the fake's queries take nothing and give a size_t.
        unsafe { mem::transmute::<*mut c_void, extern "C" fn() -> usize>(self.symbol(name))() }
    }

    pub fn set(&self, name: &CStr, value: usize) {
        // SAFETY: the fake's setters take a size_t and give nothing.
        unsafe { mem::transmute::<*mut c_void, extern "C" fn(usize)>(self.symbol(name))(value) }
    }

    pub fn calls(&self, name: &CStr) -> usize {
        // SAFETY: `fake_calls` takes a C string and gives a size_t.
        unsafe {
            mem::transmute::<*mut c_void, extern "C" fn(*const libc::c_char) -> usize>(
                self.symbol(c"fake_calls"),
            )(name.as_ptr())
        }
    }

    pub fn fail(&self, name: &'static CStr, code: c_int) {
        // SAFETY: `fake_fail` takes a C string that lives on, and an int.
        unsafe {
            mem::transmute::<*mut c_void, extern "C" fn(*const libc::c_char, c_int)>(
                self.symbol(c"fake_fail"),
            )(name.as_ptr(), code);
        }
    }

    /// How often a function failed because it was told to.
    pub fn failures(&self, name: &CStr) -> usize {
        // SAFETY: `fake_failures` takes a C string and gives a size_t.
        unsafe {
            mem::transmute::<*mut c_void, extern "C" fn(*const libc::c_char) -> usize>(
                self.symbol(c"fake_failures"),
            )(name.as_ptr())
        }
    }

    /// Nothing is live, and nothing was called with an address that was not.
    pub fn assert_clean(&self) {
        assert_eq!(self.get(c"fake_live_allocations"), 0);
        assert_eq!(self.get(c"fake_live_registrations"), 0);
        assert_eq!(self.get(c"fake_live_events"), 0);
        assert_eq!(self.get(c"fake_misuses"), 0, "{}", self.text(c"fake_misuse_text"));
        assert_eq!(self.get(c"fake_streams"), 0);
        assert_eq!(self.get(c"fake_pending"), 0);
        assert_eq!(self.get(c"fake_races"), 0, "{}", self.text(c"fake_race_text"));
        assert_eq!(self.get(c"fake_early_reuses"), 0, "an event that may be waited for was recorded again");
        assert_eq!(self.get(c"fake_pending_error"), 0, "an error was left for the next who asks");
    }

    /// The error as text.
    fn text(&self, name: &CStr) -> String {
        // SAFETY: the fake's texts take nothing and give a C string that lives on.
        unsafe {
            let text =
                mem::transmute::<*mut c_void, extern "C" fn() -> *const libc::c_char>(self.symbol(name))();
            CStr::from_ptr(text).to_string_lossy().into_owned()
        }
    }

    /// Registers an access of the computing stream.
    pub fn access(&self, memory: &[u8], write: bool) {
        // SAFETY: `fake_access` takes an address, a length and whether it is written.
        unsafe {
            mem::transmute::<*mut c_void, extern "C" fn(usize, usize, usize)>(self.symbol(c"fake_access"))(
                memory.as_ptr().addr(),
                memory.len(),
                usize::from(write),
            );
        }
    }

    /// The calling thread's device.
    pub fn device(&self) -> c_int {
        let mut device = -1;
        // SAFETY: `cudaGetDevice` writes one int.
        unsafe {
            mem::transmute::<*mut c_void, extern "C" fn(*mut c_int) -> c_int>(self.symbol(c"cudaGetDevice"))(
                &mut device,
            );
        }
        device
    }
}
