//! Rules, planes and steps on tensors in host memory.

use std::sync::Arc;

use memascend_guarded::guarded;
use memascend_kernels::{
    Algorithm, Dtype, GradientStats, HostTensor, Isa, Moments, PlaneFormat, Weight, stats_bf16, stats_f16,
    stats_f32,
};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::apollo::ChannelFactors;

/// The dtype that has this name in torch.
pub(crate) fn parse_dtype(name: &str) -> PyResult<Dtype> {
    match name {
        "bfloat16" => Ok(Dtype::Bf16),
        "float16" => Ok(Dtype::F16),
        "float32" => Ok(Dtype::F32),
        other => {
            Err(PyValueError::new_err(format!("unsupported dtype {other}: use bfloat16, float16 or float32")))
        }
    }
}

/// How a tensor is optimized: the algorithm of a step, how its states are kept, and the weight's dtype
/// and master.
#[pyclass(frozen, eq, hash, module = "memascend._memascend")]
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Rule(pub memascend_kernels::Rule);

#[guarded]
#[pymethods]
impl Rule {
    /// `algorithm` is "adamw", "adamw amsgrad", "lion", "sgd", "sgd momentum" or "apollo"; `states`
    /// "float32", "bfloat16" or "8bit"; `dtype` the weight's. Without `master`, bfloat16 weights
    /// are rounded stochastically.
    #[new]
    fn new(algorithm: &str, states: &str, dtype: &str, master: bool) -> PyResult<Self> {
        let algorithm = match algorithm {
            "adamw" => Algorithm::AdamW { amsgrad: false },
            "adamw amsgrad" => Algorithm::AdamW { amsgrad: true },
            "lion" => Algorithm::Lion,
            "sgd" => Algorithm::Sgd { momentum: false },
            "sgd momentum" => Algorithm::Sgd { momentum: true },
            "apollo" => Algorithm::Apollo,
            other => return Err(PyValueError::new_err(format!("unknown algorithm {other}"))),
        };
        let moments = match states {
            "float32" => Moments::F32,
            "bfloat16" => Moments::Bf16,
            "8bit" => Moments::Block8,
            other => {
                return Err(PyValueError::new_err(format!(
                    "states cannot be kept as {other:?}: use \"float32\", \"bfloat16\" or \"8bit\""
                )));
            }
        };
        let weight = match (parse_dtype(dtype)?, master) {
            (Dtype::Bf16, true) => Weight::Bf16Split,
            (Dtype::Bf16, false) => Weight::Bf16,
            (Dtype::F32, _) => Weight::F32,
            (Dtype::F16, true) => Weight::F16Master,
            (Dtype::F16, false) => {
                return Err(PyValueError::new_err(
                    "float16 weights need a master: only bfloat16 has the range to do without",
                ));
            }
        };
        Ok(Self(memascend_kernels::Rule { algorithm, moments, weight }))
    }

    /// The arguments that made the rule: `Rule(*rule.arguments) == rule`.
    #[getter]
    fn arguments(&self) -> (&'static str, &'static str, &'static str, bool) {
        let algorithm = match self.0.algorithm {
            Algorithm::AdamW { amsgrad: false } => "adamw",
            Algorithm::AdamW { amsgrad: true } => "adamw amsgrad",
            Algorithm::Lion => "lion",
            Algorithm::Sgd { momentum: false } => "sgd",
            Algorithm::Sgd { momentum: true } => "sgd momentum",
            Algorithm::Apollo => "apollo",
        };
        let states = match self.0.moments {
            Moments::F32 => "float32",
            Moments::Bf16 => "bfloat16",
            Moments::Block8 => "8bit",
        };
        let (dtype, master) = match self.0.weight {
            Weight::Bf16Split => ("bfloat16", true),
            Weight::Bf16 => ("bfloat16", false),
            Weight::F32 => ("float32", true),
            Weight::F16Master => ("float16", true),
        };
        (algorithm, states, dtype, master)
    }

    /// The states that the rule needs beside weight and gradient.
    #[getter]
    fn planes(&self) -> Vec<Plane> {
        self.0.planes().into_iter().map(Plane).collect()
    }
}

/// One array of states.
#[pyclass(frozen, eq, hash, module = "memascend._memascend")]
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Plane(pub memascend_kernels::Plane);

#[guarded]
#[pymethods]
impl Plane {
    /// Its name in a state dictionary.
    #[getter]
    fn name(&self) -> &'static str {
        self.0.name
    }

    /// torch's name of the dtype of its elements; uint8 for 8-bit states, which are bytes in a
    /// layout of their own.
    #[getter]
    fn dtype(&self) -> &'static str {
        match self.0.format {
            PlaneFormat::F32 => "float32",
            PlaneFormat::Bf16 => "bfloat16",
            PlaneFormat::Low => "int16",
            PlaneFormat::Block8Signed | PlaneFormat::Block8Unsigned => "uint8",
        }
    }

    /// Bytes of a plane of `numel` elements.
    fn bytes(&self, numel: usize) -> usize {
        self.0.bytes(numel)
    }

    /// Turns 8-bit states at address `source` into `numel` float32 numbers at `target`.
    fn decode(&self, py: Python<'_>, numel: usize, source: usize, target: usize) {
        py.detach(|| {
            // SAFETY: the Python layer passes live, contiguous, distinct CPU tensors of these
            // sizes.
            let (source, target) =
                unsafe { (elements(source, self.0.bytes(numel)), elements_mut(target, numel)) };
            self.0.read(source, 0, target);
        });
    }

    /// Turns `numel` float32 numbers at address `source` into 8-bit states at `target`.
    fn encode(&self, py: Python<'_>, numel: usize, source: usize, target: usize) {
        py.detach(|| {
            // SAFETY: the Python layer passes live, contiguous, distinct CPU tensors of these
            // sizes.
            let (source, target) =
                unsafe { (elements(source, numel), elements_mut(target, self.0.bytes(numel))) };
            self.0.write(target, 0, source);
        });
    }
}

/// The constants of one step of a parameter.
#[pyclass(frozen, eq, module = "memascend._memascend")]
#[derive(PartialEq)]
pub(crate) struct StepScalars(pub memascend_kernels::StepScalars);

impl StepScalars {
    fn with(scalars: memascend_kernels::StepScalars, grad_scale: f32, maximize: bool, seed: u64) -> Self {
        let scalars = scalars.with_grad_scale(grad_scale).with_seed(seed);
        Self(if maximize { scalars.maximizing() } else { scalars })
    }
}

#[guarded]
#[pymethods]
impl StepScalars {
    /// Step number `step`, the first being 1, of Adam and AdamW.
    #[staticmethod]
    #[pyo3(signature = (lr, betas, eps, weight_decay, step, *, decoupled, grad_scale, maximize, seed))]
    #[allow(clippy::too_many_arguments)]
    fn adamw(
        lr: f64,
        betas: (f64, f64),
        eps: f64,
        weight_decay: f64,
        step: u64,
        decoupled: bool,
        grad_scale: f32,
        maximize: bool,
        seed: u64,
    ) -> Self {
        let make = if decoupled {
            memascend_kernels::StepScalars::adamw
        } else {
            memascend_kernels::StepScalars::adam
        };
        Self::with(make(lr, betas, eps, weight_decay, step), grad_scale, maximize, seed)
    }

    /// Step number `step`, the first being 1, of APOLLO. Each channel's factor has the learning rate;
    /// `lr` is the rate of the weight's decay here.
    #[staticmethod]
    #[pyo3(signature = (lr, weight_decay, step, *, grad_scale, maximize, seed))]
    fn apollo(lr: f64, weight_decay: f64, step: u64, grad_scale: f32, maximize: bool, seed: u64) -> Self {
        Self::with(memascend_kernels::StepScalars::apollo(lr, weight_decay, step), grad_scale, maximize, seed)
    }

    /// Step number `step`, the first being 1, of Lion.
    #[staticmethod]
    #[pyo3(signature = (lr, betas, weight_decay, step, *, grad_scale, maximize, seed))]
    fn lion(
        lr: f64,
        betas: (f64, f64),
        weight_decay: f64,
        step: u64,
        grad_scale: f32,
        maximize: bool,
        seed: u64,
    ) -> Self {
        Self::with(
            memascend_kernels::StepScalars::lion(lr, betas, weight_decay, step),
            grad_scale,
            maximize,
            seed,
        )
    }

    /// Step number `step`, the first being 1, of stochastic gradient descent.
    #[staticmethod]
    #[pyo3(signature = (lr, momentum, dampening, weight_decay, nesterov, step, *, grad_scale, maximize, seed))]
    #[allow(clippy::too_many_arguments)]
    fn sgd(
        lr: f64,
        momentum: f64,
        dampening: f64,
        weight_decay: f64,
        nesterov: bool,
        step: u64,
        grad_scale: f32,
        maximize: bool,
        seed: u64,
    ) -> Self {
        let scalars =
            memascend_kernels::StepScalars::sgd(lr, momentum, dampening, weight_decay, nesterov, step);
        Self::with(scalars, grad_scale, maximize, seed)
    }
}

/// # Safety
/// As [`std::slice::from_raw_parts`], but an empty slice may have any address: torch gives 0.
pub(crate) unsafe fn elements<'a, T>(address: usize, length: usize) -> &'a [T] {
    if length == 0 {
        return &[];
    }
    // SAFETY: forwarded to the caller.
    unsafe { std::slice::from_raw_parts(address as *const T, length) }
}

/// # Safety
/// As [`std::slice::from_raw_parts_mut`], but an empty slice may have any address.
pub(crate) unsafe fn elements_mut<'a, T>(address: usize, length: usize) -> &'a mut [T] {
    if length == 0 {
        return &mut [];
    }
    // SAFETY: forwarded to the caller.
    unsafe { std::slice::from_raw_parts_mut(address as *mut T, length) }
}

/// One optimizer step on a contiguous tensor of `numel` elements in host memory, in place.
/// Addresses are `Tensor.data_ptr()` of contiguous CPU tensors: weight, gradient, and one for each
/// of the rule's planes, of `Plane.bytes(numel)` bytes.
#[guarded]
#[pyfunction]
#[pyo3(signature = (rule, numel, weight, planes, gradient, scalars, threads, factors = None))]
#[allow(clippy::too_many_arguments)]
pub(crate) fn step_host(
    py: Python<'_>,
    rule: &Bound<'_, Rule>,
    numel: usize,
    weight: usize,
    planes: Vec<usize>,
    gradient: usize,
    scalars: &Bound<'_, StepScalars>,
    threads: usize,
    factors: Option<&Bound<'_, ChannelFactors>>,
) -> PyResult<()> {
    let factors = factors.map(|factors| Arc::clone(&factors.get().0));
    let (rule, scalars) = (rule.get().0, scalars.get().0);
    let rule_planes = rule.planes();
    if rule_planes.len() != planes.len() {
        return Err(PyValueError::new_err(format!(
            "{} planes were given, but the rule has {}: give the address of each",
            planes.len(),
            rule_planes.len()
        )));
    }
    py.detach(|| {
        let element = rule.weight.bytes();
        // SAFETY: the Python layer passes live, contiguous, distinct CPU tensors of these sizes and
        // holds them for the duration of the call.
        let tensor = unsafe {
            HostTensor {
                rule,
                weight: elements_mut(weight, numel * element),
                planes: rule_planes
                    .iter()
                    .zip(planes)
                    .map(|(plane, address)| elements_mut(address, plane.bytes(numel)))
                    .collect(),
                gradient: elements(gradient, numel * element),
            }
        };
        match factors {
            None => memascend_kernels::step_host(tensor, &scalars, threads),
            Some(factors) => memascend_kernels::step_host_channels(tensor, &scalars, &factors, threads),
        }
    });
    Ok(())
}

/// `(sum of squares, any non-finite)` of a contiguous gradient in host memory, in the fixed order
/// that captures use too.
#[guarded]
#[pyfunction]
pub(crate) fn gradient_stats(
    py: Python<'_>,
    dtype: &str,
    numel: usize,
    gradient: usize,
) -> PyResult<(f64, bool)> {
    let dtype = parse_dtype(dtype)?;
    Ok(py.detach(|| {
        let mut stats = GradientStats::default();
        // SAFETY: the Python layer passes a live, contiguous CPU tensor of `numel` elements of
        // `dtype`.
        unsafe {
            match dtype {
                Dtype::Bf16 => stats_bf16(elements(gradient, numel), &mut stats),
                Dtype::F16 => stats_f16(elements(gradient, numel), &mut stats),
                Dtype::F32 => stats_f32(elements(gradient, numel), &mut stats),
            }
        }
        (stats.sum_squares, stats.non_finite)
    }))
}

/// Makes malloc keep large freed blocks for the next ones, in the whole process: with memory to
/// spare.
#[guarded]
#[pyfunction]
pub(crate) fn keep_large_blocks() {
    memascend_mem::keep_large_blocks();
}

/// Makes malloc return large freed blocks to the system, in the whole process. Called before a
/// model is built, whose temporary weights would leave holes in the heap.
#[guarded]
#[pyfunction]
pub(crate) fn return_large_blocks_to_system() {
    memascend_mem::return_large_blocks_to_system();
}

/// Gives the pages of free blocks inside malloc's heap back to the system, where the process has
/// grown by `growth_bytes` since. Called between units, and with `pass_begins` at the beginning of a
/// pass.
#[guarded]
#[pyfunction]
#[pyo3(signature = (pass_begins, growth_bytes = None))]
pub(crate) fn trim_heap(py: Python<'_>, pass_begins: bool, growth_bytes: Option<usize>) {
    let growth_bytes = growth_bytes.unwrap_or(memascend_mem::GROWTH_BYTES);
    py.detach(|| memascend_mem::trim_heap(pass_begins, growth_bytes));
}

/// The instruction set of the kernels: "avx512", "avx2" or "baseline".
#[guarded]
#[pyfunction]
pub(crate) fn instruction_set() -> &'static str {
    Isa::best().name()
}
