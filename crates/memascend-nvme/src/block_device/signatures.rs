//! Signatures of other programs on a device, found by libblkid. The library is loaded at run time.
//! Where it is missing, a device is formatted only if the user named the device to be destroyed.

use std::env;
use std::error::Error;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::fs::File;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::ptr::{self, NonNull};

use libloading::os::unix::Library;

use crate::{BlockDeviceError, BlockDeviceResult, Signature};

/// The variable that names the library to use instead of the system's.
const LIBRARY_VARIABLE: &str = "MEMASCEND_LIBBLKID";
const USUAL_NAME: &str = "libblkid.so.1";

/// `BLKID_SUBLKS_` `LABEL | UUID | TYPE | USAGE | VERSION | MAGIC | BADCSUM`: superblocks with a
/// wrong checksum are found and wiped too.
const SUPERBLOCK_FLAGS: c_int = 1 << 1 | 1 << 3 | 1 << 5 | 1 << 7 | 1 << 8 | 1 << 9 | 1 << 10;
/// `BLKID_PARTS_` `FORCE_GPT | MAGIC`: a GPT without its protective MBR is found too.
const PARTITION_FLAGS: c_int = 1 << 1 | 1 << 3;
/// Answers of `blkid_do_probe` and `blkid_do_safeprobe`.
const FOUND: c_int = 0;
const NOTHING: c_int = 1;
const AMBIVALENT: c_int = -2;
/// More signatures than any device has: ZFS writes 4 times 128 of them.
const SIGNATURES_MAX: usize = 1024;

/// The functions, with the signatures of `blkid.h`; a `blkid_probe` is a pointer, a `blkid_loff_t`
/// an `int64_t`.
struct Functions {
    new_probe: unsafe extern "C" fn() -> *mut c_void,
    free_probe: unsafe extern "C" fn(*mut c_void),
    set_device: unsafe extern "C" fn(*mut c_void, c_int, i64, i64) -> c_int,
    enable_superblocks: unsafe extern "C" fn(*mut c_void, c_int) -> c_int,
    set_superblocks_flags: unsafe extern "C" fn(*mut c_void, c_int) -> c_int,
    enable_partitions: unsafe extern "C" fn(*mut c_void, c_int) -> c_int,
    set_partitions_flags: unsafe extern "C" fn(*mut c_void, c_int) -> c_int,
    do_probe: unsafe extern "C" fn(*mut c_void) -> c_int,
    do_safeprobe: unsafe extern "C" fn(*mut c_void) -> c_int,
    do_wipe: unsafe extern "C" fn(*mut c_void, c_int) -> c_int,
    lookup_value: unsafe extern "C" fn(*mut c_void, *const c_char, *mut *const c_char, *mut usize) -> c_int,
}

/// libblkid, loaded. It is never unloaded.
pub(crate) struct Blkid {
    functions: Functions,
}

impl Blkid {
    /// Loads the library.
    ///
    /// # Errors
    /// The dynamic loader's error.
    pub(crate) fn load() -> Result<Self, String> {
        let name = env::var_os(LIBRARY_VARIABLE).filter(|name| !name.is_empty());
        let name = name.unwrap_or_else(|| USUAL_NAME.into());
        // SAFETY: loading runs the library's initialisers, which is what is asked for. Its
        // finalisers never run, since the library is never unloaded.
        let library = unsafe { Library::open(Some(&name), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        let library = ManuallyDrop::new(library.map_err(loader_error)?);
        // SAFETY: each field is declared with the signature that blkid.h gives its function.
        let functions = unsafe {
            Functions {
                new_probe: function(&library, c"blkid_new_probe")?,
                free_probe: function(&library, c"blkid_free_probe")?,
                set_device: function(&library, c"blkid_probe_set_device")?,
                enable_superblocks: function(&library, c"blkid_probe_enable_superblocks")?,
                set_superblocks_flags: function(&library, c"blkid_probe_set_superblocks_flags")?,
                enable_partitions: function(&library, c"blkid_probe_enable_partitions")?,
                set_partitions_flags: function(&library, c"blkid_probe_set_partitions_flags")?,
                do_probe: function(&library, c"blkid_do_probe")?,
                do_safeprobe: function(&library, c"blkid_do_safeprobe")?,
                do_wipe: function(&library, c"blkid_do_wipe")?,
                lookup_value: function(&library, c"blkid_probe_lookup_value")?,
            }
        };
        Ok(Self { functions })
    }

    /// All signatures on the device. `file` must read through the page cache: the library's buffers
    /// are not aligned for direct transfers.
    pub(crate) fn signatures(&self, file: &File, path: &Path) -> BlockDeviceResult<Vec<Signature>> {
        let signatures = self.for_each_signature(file, path, |_| Ok(()))?;
        if !signatures.is_empty() {
            return Ok(signatures);
        }
        // The safe probe fails if signatures contradict each other. The device is not empty then.
        let probe = self.probe(file, path)?;
        // SAFETY: the probe is live.
        match unsafe { (self.functions.do_safeprobe)(probe.handle.as_ptr()) } {
            NOTHING => Ok(Vec::new()),
            FOUND => Ok(probe.signature().into_iter().collect()),
            AMBIVALENT => Ok(vec![Signature {
                kind: "ambivalent".to_owned(),
                label: None,
                uuid: None,
                sort: "signatures that contradict each other",
            }]),
            _ => Err(failed("blkid_do_safeprobe", path)),
        }
    }

    /// Overwrites the magic numbers of all signatures. `file` must be open for writing.
    pub(crate) fn wipe(&self, file: &File, path: &Path) -> BlockDeviceResult<()> {
        self.for_each_signature(file, path, |probe| {
            // SAFETY: the probe is live, and its file is open for writing.
            match unsafe { (self.functions.do_wipe)(probe.handle.as_ptr(), 0) } {
                0 => Ok(()),
                _ => Err(failed("blkid_do_wipe", path)),
            }
        })
        .map(drop)
    }

    fn for_each_signature(
        &self,
        file: &File,
        path: &Path,
        mut then: impl FnMut(&Probe<'_>) -> BlockDeviceResult<()>,
    ) -> BlockDeviceResult<Vec<Signature>> {
        let probe = self.probe(file, path)?;
        let mut signatures: Vec<Signature> = Vec::new();
        for _ in 0..SIGNATURES_MAX {
            // SAFETY: the probe is live.
            match unsafe { (self.functions.do_probe)(probe.handle.as_ptr()) } {
                FOUND => {
                    // A partition table has a second header at the end of the device, and is named
                    // once.
                    signatures.extend(probe.signature().filter(|signature| !signatures.contains(signature)));
                    then(&probe)?;
                }
                NOTHING => return Ok(signatures),
                _ => return Err(failed("blkid_do_probe", path)),
            }
        }
        Ok(signatures)
    }

    fn probe(&self, file: &File, path: &Path) -> BlockDeviceResult<Probe<'_>> {
        let functions = &self.functions;
        // SAFETY: the function takes nothing.
        let handle = NonNull::new(unsafe { (functions.new_probe)() })
            .ok_or_else(|| failed("blkid_new_probe", path))?;
        let probe = Probe { functions, handle };
        let handle = handle.as_ptr();
        // SAFETY: the probe is live; the file outlives it, since it is dropped within the caller's
        // call.
        let codes = unsafe {
            [
                (functions.set_device)(handle, file.as_raw_fd(), 0, 0),
                (functions.enable_superblocks)(handle, 1),
                (functions.set_superblocks_flags)(handle, SUPERBLOCK_FLAGS),
                (functions.enable_partitions)(handle, 1),
                (functions.set_partitions_flags)(handle, PARTITION_FLAGS),
            ]
        };
        if codes == [0; 5] { Ok(probe) } else { Err(failed("blkid_probe_set_device", path)) }
    }
}

/// A search on one device.
struct Probe<'a> {
    functions: &'a Functions,
    handle: NonNull<c_void>,
}

impl Probe<'_> {
    /// The signature found last. `None` if the probe found only properties of the device.
    fn signature(&self) -> Option<Signature> {
        if let Some(kind) = self.value(c"TYPE") {
            let sort = match self.value(c"USAGE").as_deref() {
                Some("filesystem") => "a filesystem",
                Some("raid") => "a member of a RAID or of LVM",
                Some("crypto") => "an encrypted volume",
                _ if kind == "swap" => "swap space",
                _ => "a signature",
            };
            return Some(Signature { kind, label: self.value(c"LABEL"), uuid: self.value(c"UUID"), sort });
        }
        let kind = self.value(c"PTTYPE")?;
        Some(Signature { kind, label: None, uuid: self.value(c"PTUUID"), sort: "a partition table" })
    }

    fn value(&self, name: &CStr) -> Option<String> {
        let mut data = ptr::null();
        let mut bytes = 0;
        // SAFETY: the probe is live, the name a C string, and the function writes a pointer and a
        // length.
        let code = unsafe {
            (self.functions.lookup_value)(self.handle.as_ptr(), name.as_ptr(), &mut data, &mut bytes)
        };
        if code != 0 || data.is_null() {
            return None;
        }
        // SAFETY: the library's values are C strings that live until the next search.
        let text = unsafe { CStr::from_ptr(data) }.to_string_lossy().trim().to_owned();
        (!text.is_empty()).then_some(text)
    }
}

impl Drop for Probe<'_> {
    fn drop(&mut self) {
        // SAFETY: the probe is live and never used again. It does not close the file, which it did
        // not open.
        unsafe { (self.functions.free_probe)(self.handle.as_ptr()) };
    }
}

/// A function of a library.
///
/// # Safety
/// `F` is a function pointer with the C signature of the function, and the library is never
/// unloaded.
unsafe fn function<F: Copy>(library: &Library, name: &'static CStr) -> Result<F, String> {
    // SAFETY: the caller's promise.
    unsafe { library.get::<F>(name) }.map(|symbol| *symbol).map_err(loader_error)
}

/// The dynamic loader's error.
fn loader_error(error: libloading::Error) -> String {
    error.source().map_or_else(|| error.to_string(), ToString::to_string)
}

fn failed(call: &str, path: &Path) -> BlockDeviceError {
    BlockDeviceError::Probe {
        path: path.to_owned(),
        reason: format!("{call}: {}", io::Error::last_os_error()),
    }
}
