//! Files outside the store, from which weights are read.

use std::path::PathBuf;
use std::sync::Arc;

use pyo3::prelude::*;

use crate::errors::store_error;

/// A file outside the store from which weights are read where they lie. It must stay as it was when
/// `os.stat` gave `bytes` bytes and the last change at `modified_ns`.
#[pyclass(frozen, module = "memascend._memascend")]
pub(crate) struct ExternalFile(pub(crate) Arc<memascend_store::ExternalFile>);

#[pymethods]
impl ExternalFile {
    #[new]
    fn new(path: PathBuf, bytes: u64, modified_ns: i128, direct: bool) -> PyResult<Self> {
        memascend_store::ExternalFile::open(&path, bytes, modified_ns, direct)
            .map(|file| Self(Arc::new(file)))
            .map_err(|error| store_error(&error))
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
