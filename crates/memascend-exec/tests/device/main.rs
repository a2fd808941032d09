//! Copies to and from a device, a simulated one: bytes from there are stored as bytes from host memory are,
//! in any order of execution; memory is given back when no copy uses it; and no thread waits for a failed
//! copy.

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
