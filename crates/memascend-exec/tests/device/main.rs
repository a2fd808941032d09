//! Copies to and from a device, a simulated one: what comes from there is kept as what comes from
//! host memory, whatever runs when; memory is given back when no copy uses it; and no thread waits
//! for what fails.

mod applying;
mod buffers;
mod copies;
#[path = "../../../memascend-mem/tests/fake/mod.rs"]
mod fake;
mod gradients;
mod link;
mod pipeline;
mod rig;
#[path = "../support/mod.rs"]
mod support;
