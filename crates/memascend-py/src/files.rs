//! Files outside the store: weights are read from some, and other programs own the others.

use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use memascend_exec::{
    FILE_WINDOW_BYTES, First, Groups, Mxfp4, Nested, Numbers, ScaleFormat, Scales, Shared, Stored, WordOrder,
    Words, Zeros,
};
use memascend_guarded::guarded;
use memascend_mem::{LeaseSlice, LockExt, Origin, WaitExt};
use memascend_nvme::{BLOCK_BYTES, IoError};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::errors::{io_error, store_error};
use crate::host::elements;
use crate::volume::{engine_options, parse_operation};

/// A file outside the store from which weights are read where they lie. It must stay as it was when
/// `os.stat` gave `bytes` bytes and the last change at `modified_ns`. Reads are compared with `sums`, the checksums of its
/// blocks.
#[pyclass(frozen, module = "memascend._memascend")]
pub(crate) struct ExternalFile(pub(crate) Arc<memascend_store::ExternalFile>);

#[guarded]
#[pymethods]
impl ExternalFile {
    #[new]
    #[pyo3(signature = (path, bytes, modified_ns, direct, sums = None))]
    fn new(
        path: PathBuf,
        bytes: u64,
        modified_ns: i128,
        direct: bool,
        sums: Option<&[u8]>,
    ) -> PyResult<Self> {
        let file = memascend_store::ExternalFile::open(&path, bytes, modified_ns, direct)
            .map_err(|error| store_error(&error))?;
        let Some(sums) = sums else { return Ok(Self(Arc::new(file))) };
        let sums: Vec<u32> = sums
            .chunks_exact(4)
            .map(|word| u32::from_le_bytes(word.try_into().expect("four bytes")))
            .collect();
        if (sums.len() * BLOCK_BYTES) as u64 != bytes {
            return Err(PyValueError::new_err(format!("{} checksums for {bytes} bytes", sums.len())));
        }
        Ok(Self(Arc::new(file.with_sums(sums))))
    }

    /// The checksums of the blocks of the `bytes` bytes at `address`, as `sums` has them.
    #[staticmethod]
    fn sums_of<'py>(py: Python<'py>, address: usize, bytes: usize) -> Bound<'py, PyBytes> {
        // SAFETY: the Python layer passes the address of a live, contiguous CPU tensor of that length.
        let read = unsafe { elements::<u8>(address, bytes) };
        let sums = py.detach(|| memascend_store::block_sums(read));
        PyBytes::new(py, &sums.iter().flat_map(|sum| sum.to_le_bytes()).collect::<Vec<_>>())
    }

    /// Whether reads bypass the page cache.
    #[getter]
    fn direct(&self) -> bool {
        self.0.is_direct()
    }

    /// Bytes read so far.
    #[getter]
    fn bytes_read(&self) -> u64 {
        self.0.read_bytes()
    }
}

/// Where numbers lie: the file, and their offset there in bytes.
type Place<'py> = (Bound<'py, ExternalFile>, u64);

fn stored((file, position): &Place<'_>) -> Stored {
    Stored { file: Arc::clone(&file.get().0), position: *position }
}

/// The scales at `place`, in `format`.
fn scales(place: &Place<'_>, format: ScaleFormat) -> Scales {
    Scales { stored: stored(place), format }
}

/// The format of that name; FP8 is divided by `divisor`.
fn scale_format(name: &str, divisor: f32) -> PyResult<ScaleFormat> {
    Ok(match name {
        "float32" => ScaleFormat::F32,
        "bfloat16" => ScaleFormat::Bf16,
        "e8m0" => ScaleFormat::Exponents,
        "e4m3" => ScaleFormat::E4m3 { divisor },
        _ => return Err(PyValueError::new_err(format!("scales in {name}"))),
    })
}

/// How weights are stored in a file outside the store, where they are dequantised as they are read, to bf16.
#[pyclass(frozen, module = "memascend._memascend")]
pub(crate) struct Packing(pub(crate) Arc<memascend_exec::Packing>);

impl Packing {
    fn new(packing: memascend_exec::Packing) -> PyResult<Self> {
        if packing.fits_window() {
            Ok(Self(Arc::new(packing)))
        } else {
            Err(PyValueError::new_err(format!("a row does not fit into {FILE_WINDOW_BYTES} bytes")))
        }
    }
}

#[guarded]
#[pymethods]
impl Packing {
    /// Bytes in rows of `width`, with a scale at `scales` for each block of rows and columns. `numbers` is their
    /// format: "e4m3"; "int8", whose product with its scale is multiplied by `step`; or "packed 2", "packed 4" and
    /// "packed 8", whole numbers of so many bits in words. The scales have `format`: float32, bfloat16 or e8m0.
    /// `zeros` is where the zeros of the blocks lie, as bytes with "int8", else in words; without them the zero of
    /// packed numbers is half of their range.
    #[staticmethod]
    #[pyo3(signature = (numbers, width, block, scales, format = "float32", step = 1.0, zeros = None))]
    fn rows(
        numbers: &str,
        width: usize,
        block: (usize, usize),
        scales: Place<'_>,
        format: &str,
        step: f32,
        zeros: Option<Place<'_>>,
    ) -> PyResult<Self> {
        let numbers = match (numbers, zeros) {
            ("e4m3", None) => Numbers::E4m3,
            ("int8", None) => Numbers::Int8 { step },
            ("int8", Some(place)) => Numbers::Whole { bits: 8, zeros: Zeros::Signed(stored(&place)) },
            ("packed 2" | "packed 4" | "packed 8", zeros) => Numbers::Whole {
                bits: usize::from(numbers.as_bytes()[7] - b'0'),
                zeros: zeros.map_or(Zeros::Half, |place| Zeros::Words(stored(&place))),
            },
            _ => return Err(PyValueError::new_err(format!("numbers in {numbers}"))),
        };
        let per_byte = if let Numbers::Whole { bits, .. } = &numbers { 8 / bits } else { 1 };
        let whole = |elements: usize| elements > 0 && elements.is_multiple_of(per_byte);
        if !whole(width) || block.0 == 0 || !(whole(block.1) || block.1 >= width) {
            return Err(PyValueError::new_err(format!(
                "rows of {width} in blocks of {} x {}",
                block.0, block.1
            )));
        }
        let scales = self::scales(&scales, scale_format(format, 1.0)?);
        Self::new(memascend_exec::Packing::Rows { numbers, width, block, scales })
    }

    /// Numbers of four bits that name one of `code`, with a scale for each `block` of elements, which divides 4,096.
    /// `low_first` says that the lower four bits of a byte are the first number. The scales have `format`: float32,
    /// bfloat16, e8m0, or e4m3, which are divided by `divisor`; unless `nested` says that a scale is a byte: the scales
    /// to a factor, where the factors are, the value of each byte, and the number to add.
    #[staticmethod]
    #[pyo3(signature = (block, code, scales, nested = None, *, format = "float32", divisor = 1.0, low_first = false))]
    fn four_bits(
        block: usize,
        code: [f32; 16],
        scales: Place<'_>,
        nested: Option<(usize, Place<'_>, Vec<f32>, f32)>,
        format: &str,
        divisor: f32,
        low_first: bool,
    ) -> PyResult<Self> {
        if block < 2 || 4096 % block != 0 {
            return Err(PyValueError::new_err(format!("blocks of {block} elements do not divide 4096")));
        }
        let format = match nested {
            None => scale_format(format, divisor)?,
            Some((block, factors, code, offset)) => {
                let code = code.try_into().ok().filter(|_| block > 0);
                let code = code.ok_or_else(|| PyValueError::new_err("a byte has 256 meanings"))?;
                ScaleFormat::Nested(Box::new(Nested { block, factors: stored(&factors), code, offset }))
            }
        };
        let scales = self::scales(&scales, format);
        let first = if low_first { First::Low } else { First::High };
        Self::new(memascend_exec::Packing::FourBits { block, first, code, scales })
    }

    /// MXFP4 of matrices that are stored as the transposes of the model's, `rows` rows of `width` elements each, with
    /// a byte at `scales` for each 32, which is a power of two.
    #[staticmethod]
    fn mxfp4(rows: usize, width: usize, scales: Place<'_>) -> PyResult<Self> {
        if rows == 0 || width == 0 || !width.is_multiple_of(32) {
            return Err(PyValueError::new_err(format!("matrices of {rows} rows of {width}")));
        }
        let scales = stored(&scales);
        Self::new(memascend_exec::Packing::Mxfp4(Mxfp4 { rows, width, scales }))
    }

    /// A matrix of AWQ (`added` is None, 4 `bits`) or GPTQ that is stored as the transpose of the model's, `rows` rows
    /// of `width` elements. Each `group` of rows has zeros, in words to which `added` is added, and scales in fp16.
    /// `index` is where the group of each row lies, an int32, where groups do not follow each other.
    #[staticmethod]
    #[pyo3(signature = (rows, width, group, zeros, scales, added, bits = 4, index = None))]
    #[allow(clippy::too_many_arguments)]
    fn words(
        rows: usize,
        width: usize,
        group: usize,
        zeros: Place<'_>,
        scales: Place<'_>,
        added: Option<u32>,
        bits: usize,
        index: Option<Place<'_>>,
    ) -> PyResult<Self> {
        let is_awq = added.is_none();
        let known = if is_awq { bits == 4 && index.is_none() } else { matches!(bits, 2 | 4 | 8) };
        let whole = |elements: usize| known && elements > 0 && elements.is_multiple_of(32 / bits);
        let fits = whole(width) && if is_awq { rows > 0 } else { whole(rows) };
        if !fits || group == 0 || !rows.is_multiple_of(group) {
            return Err(PyValueError::new_err(format!("{rows} rows of {width} in groups of {group}")));
        }
        let order = added.map_or(WordOrder::Awq, |added| WordOrder::Gptq { added });
        let groups = match index {
            None => Groups::Rows(group),
            Some(place) => {
                Groups::Index { stored: stored(&place), count: rows / group, read: Shared::default() }
            }
        };
        let (zeros, scales) = (stored(&zeros), stored(&scales));
        let matrix = Words { order, bits, rows, width, groups, zeros, scales };
        Self::new(memascend_exec::Packing::Words(matrix))
    }

    /// Bytes that a thread needs beside its window for a part, where they are not few.
    #[getter]
    fn scratch_bytes(&self) -> usize {
        self.0.scratch_bytes()
    }

    /// Bytes that name one of the 256 numbers of `code`, with an fp32 scale at `scales` for each `block` of elements,
    /// which divides 4,096.
    #[staticmethod]
    fn bytes(block: usize, code: Vec<f32>, scales: Place<'_>) -> PyResult<Self> {
        if block == 0 || 4096 % block != 0 {
            return Err(PyValueError::new_err(format!("blocks of {block} elements do not divide 4096")));
        }
        let code: Box<[f32; 256]> =
            code.try_into().map_err(|_| PyValueError::new_err("a byte has 256 meanings"))?;
        let scales = self::scales(&scales, ScaleFormat::F32);
        Self::new(memascend_exec::Packing::Bytes { block, code, scales })
    }
}

/// Moves bytes between host memory and any files; see `memascend_nvme::FileEngine`.
#[pyclass(frozen, module = "memascend._memascend")]
pub(crate) struct FileEngine(Arc<memascend_nvme::FileEngine>);

#[guarded]
#[pymethods]
impl FileEngine {
    /// `engine` is auto, ring or threads; `depth` the most transfers in flight.
    #[new]
    #[pyo3(signature = (*, engine = "auto", depth = 128))]
    fn new(engine: &str, depth: usize) -> PyResult<Self> {
        let options = engine_options(engine, depth, false, false)?;
        let opened = memascend_nvme::FileEngine::new(options).map_err(|error| io_error(&error))?;
        Ok(Self(Arc::new(opened)))
    }

    /// `ring` or `threads`.
    #[getter]
    fn name(&self) -> &'static str {
        self.0.name()
    }

    /// Why it is not a ring, or None.
    #[getter]
    fn notice(&self) -> Option<&str> {
        self.0.notice()
    }
}

/// Transfers that are waited for together.
#[pyclass(frozen, module = "memascend._memascend")]
pub(crate) struct FileTransfers {
    engine: Arc<memascend_nvme::FileEngine>,
    shared: Arc<Started>,
    origin: Origin,
}

#[derive(Default)]
struct Started {
    state: Mutex<StartedState>,
    ended: Condvar,
}

#[derive(Default)]
struct StartedState {
    /// Transfers since the last wait, and how many of them have not ended.
    count: usize,
    running: usize,
    error: Option<IoError>,
    /// The objects whose memory the transfers use. They are dropped without the lock: their finalizers may
    /// give the interpreter's lock to a thread that waits for this one.
    owners: Vec<Py<PyAny>>,
}

impl Started {
    fn lock(&self) -> MutexGuard<'_, StartedState> {
        self.state.locked()
    }
}

#[guarded]
#[pymethods]
impl FileTransfers {
    #[new]
    fn new(engine: &Bound<'_, FileEngine>) -> Self {
        Self { engine: Arc::clone(&engine.get().0), shared: Arc::default(), origin: Origin::here() }
    }

    /// Starts to "read" or "write" `bytes` bytes between `address` and byte `offset` of the file at
    /// `path`. `wait` raises its error. `owner` keeps the memory alive.
    #[allow(clippy::too_many_arguments)]
    fn start(
        &self,
        py: Python<'_>,
        operation: &str,
        path: PathBuf,
        offset: u64,
        address: usize,
        bytes: usize,
        owner: Py<PyAny>,
    ) -> PyResult<()> {
        let operation = parse_operation(operation)?;
        let memory = match NonNull::new(address as *mut u8) {
            // SAFETY: the Python layer passes the address of a live, contiguous CPU tensor, which `owner`
            // keeps until the transfers have ended.
            Some(address) => unsafe { LeaseSlice::of_caller(address, bytes) },
            None if bytes == 0 => {
                // SAFETY: no byte of it is used.
                unsafe { LeaseSlice::of_caller(NonNull::dangling(), 0) }
            }
            None => return Err(PyValueError::new_err("a transfer needs memory: the address is 0")),
        };
        let shared = Arc::clone(&self.shared);
        {
            let mut state = shared.lock();
            state.count += 1;
            state.running += 1;
            state.owners.push(owner);
        }
        py.detach(|| {
            let on_end = Box::new(move |result: memascend_nvme::Result<()>| {
                let mut state = shared.lock();
                state.running -= 1;
                if let Err(error) = result {
                    state.error.get_or_insert(error);
                }
                if state.running == 0 {
                    shared.ended.notify_all();
                }
            });
            self.engine.submit(operation, &path, offset, &memory, on_end);
        });
        Ok(())
    }

    /// Waits until all have ended, and returns how many they were. Raises the first error, after all
    /// have ended.
    fn wait(&self, py: Python<'_>) -> PyResult<usize> {
        let ended = loop {
            let ended = py.detach(|| {
                let mut state = self.shared.lock();
                if state.running > 0 {
                    state = self.shared.ended.wait_locked_for(state, Duration::from_millis(100));
                }
                (state.running == 0).then(|| std::mem::take(&mut *state))
            });
            match ended {
                Some(ended) => break ended,
                // Ctrl-C: the transfers go on, and can be waited for again.
                None => py.check_signals()?,
            }
        };
        let StartedState { count, error, owners, .. } = ended;
        drop(owners);
        error.map_or(Ok(count), |error| Err(io_error(&error)))
    }
}

impl Drop for FileTransfers {
    /// Memory must not go before the transfers have ended. Their errors are lost: nothing waited for them.
    fn drop(&mut self) {
        // They are its parent's, and end there.
        if !self.origin.is_here() {
            return;
        }
        let mut state = self.shared.lock();
        while state.running > 0 {
            state = self.shared.ended.wait_locked(state);
        }
    }
}
