//! Raw devices, for real: on loop devices, with real filesystems. They need root, and the tools that make the
//! filesystems to refuse. Without them the tests are skipped with a notice, or fail if MEMASCEND_REQUIRE
//! names `root` (`mkfs` for its tools) or is `all`.

mod opened;
mod refused;
mod rig;
