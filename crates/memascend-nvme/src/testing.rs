//! The only way to the engines that keep no data, for tests and benchmarks.
//!
//! Users are offered `auto`, `ring` and `threads`. Two more engines exist, and both lose data: a process can
//! open one only by its name, and only while the engine's environment variable is set.
//!
//! | engine | variable | effect |
//! | --- | --- | --- |
//! | `sim` | `MEMASCEND_SIM_FAULTS`, [`Faults`] as text: `seed=7,read_error_one_in=100`, or nothing | keeps bytes in memory, and fails, reorders and tears transfers as the seed decides |
//! | `null` | `MEMASCEND_NULL_ENGINE`, any value | completes every request at once and moves no byte, for replaying schedules |
//!
//! Rust tests use the types below instead of the variables. Two variables name a shared library to
//! load in place of the system's, which tests use for fakes: `MEMASCEND_CUDART` (the CUDA runtime)
//! and `MEMASCEND_LIBBLKID`.

use crate::EngineChoice;
pub use crate::engine::sim::{Faults, Injected, Power, SimDisk, SimEngine, SimNotePlace};

/// Allows the engine `sim`, with these faults.
const SIM_FAULTS_VARIABLE: &str = "MEMASCEND_SIM_FAULTS";
/// Allows the engine `null`.
const NULL_ENGINE_VARIABLE: &str = "MEMASCEND_NULL_ENGINE";

/// The test engine called `name`, or `None` if there is none of that name or its variable is not
/// set.
///
/// # Errors
/// If the text in `MEMASCEND_SIM_FAULTS` cannot be parsed.
pub fn engine_choice(name: &str) -> Result<Option<EngineChoice>, String> {
    Ok(match name {
        "null" => std::env::var_os(NULL_ENGINE_VARIABLE).map(|_| EngineChoice::Null),
        "sim" => match std::env::var(SIM_FAULTS_VARIABLE) {
            Ok(faults) => Some(EngineChoice::Sim(faults.parse()?)),
            Err(_) => None,
        },
        _ => None,
    })
}
