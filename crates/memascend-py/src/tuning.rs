//! How bytes move: the keywords of a runtime that a user may set.

use memascend_store::StoreOptions;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::volume::engine_options;

/// A `memascend.options.Tuning`, which describes each of them; here are the defaults.
pub(crate) struct Tuning {
    pub engine: String,
    pub direct: bool,
    pub rates: Vec<f64>,
    pub depth: usize,
    pub io_poll: bool,
    pub sq_poll: bool,
    pub checksums: bool,
    pub allocator: String,
    pub huge_pages: bool,
    pub compute_threads: usize,
}

impl Default for Tuning {
    fn default() -> Self {
        Self {
            engine: "auto".to_owned(),
            direct: true,
            rates: Vec::new(),
            depth: 128,
            io_poll: false,
            sq_poll: false,
            checksums: true,
            allocator: "auto".to_owned(),
            huge_pages: true,
            compute_threads: 1,
        }
    }
}

impl Tuning {
    /// The values of `given`, and the defaults of the others. Raises TypeError for another name, or a value of
    /// another type.
    pub(crate) fn of(given: Option<&Bound<'_, PyDict>>) -> PyResult<Self> {
        let mut tuning = Self::default();
        for (name, value) in given.into_iter().flatten() {
            let name: String = name.extract()?;
            tuning.set(&name, &value).map_err(|error| {
                let py = value.py();
                if !error.is_instance_of::<PyTypeError>(py) {
                    return error;
                }
                let told = PyTypeError::new_err(format!("{name}: {}", error.value(py)));
                told.set_cause(py, Some(error));
                told
            })?;
        }
        Ok(tuning)
    }

    fn set(&mut self, name: &str, value: &Bound<'_, PyAny>) -> PyResult<()> {
        match name {
            "engine" => self.engine = value.extract()?,
            "direct" => self.direct = value.extract()?,
            "rates" => self.rates = value.extract()?,
            "depth" => self.depth = value.extract()?,
            "io_poll" => self.io_poll = value.extract()?,
            "sq_poll" => self.sq_poll = value.extract()?,
            "checksums" => self.checksums = value.extract()?,
            "allocator" => self.allocator = value.extract()?,
            "huge_pages" => self.huge_pages = value.extract()?,
            "compute_threads" => self.compute_threads = value.extract()?,
            _ => return Err(PyTypeError::new_err("there is no such option of a runtime")),
        }
        Ok(())
    }

    /// How a store is opened that is written `in_place`, or that is to `replace` an earlier one.
    pub(crate) fn store_options(&self, in_place: bool, replace: bool) -> PyResult<StoreOptions> {
        let engine = engine_options(&self.engine, self.depth, self.io_poll, self.sq_poll)?;
        let (direct, rates, checksums) = (self.direct, self.rates.clone(), self.checksums);
        Ok(StoreOptions { engine, direct, rates, checksums, in_place, replace })
    }
}
