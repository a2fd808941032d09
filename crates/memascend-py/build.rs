//! Passes cargo's level of optimisation on to the module: benchmarks tell a build for the tests from a release.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let level = std::env::var("OPT_LEVEL").expect("cargo gives its build scripts OPT_LEVEL");
    println!("cargo::rustc-env=MEMASCEND_OPT_LEVEL={level}");
}
