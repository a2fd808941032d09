//! How the tests on simulated drives go through their seeds, here and in memascend-exec.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs a test for `count` seeds, or those that the environment names, and says which one failed.
pub fn for_each_seed(count: u64, mut run: impl FnMut(u64)) {
    let number = |name: &str| std::env::var(name).ok().map(|value| value.parse::<u64>().expect("a number"));
    let seeds = match (number("MEMASCEND_SEED"), number("MEMASCEND_SEEDS")) {
        (Some(seed), _) => seed..seed + 1,
        (None, seeds) => 0..seeds.unwrap_or(count),
    };
    for seed in seeds {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| run(seed))) {
            eprintln!("seed {seed} failed; MEMASCEND_SEED={seed} runs it alone");
            std::panic::resume_unwind(panic);
        }
    }
}
