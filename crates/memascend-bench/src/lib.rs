//! Benchmarks of the allocators, the pool and the kernels: `cargo bench -p memascend-bench`, with part of a name after
//! `--` for some of them.
//!
//! A call is repeated for half a second, and then in ten samples of a fifth of a second each, or of one call that takes
//! longer. Of the samples the median time of a call is printed, with the fastest and the slowest.

use std::hint::black_box;
use std::time::{Duration, Instant};

const WARM_UP: Duration = Duration::from_millis(500);
const SAMPLE: Duration = Duration::from_millis(200);
const SAMPLES: usize = 10;

/// Measure a call that processes `bytes` (0: none to speak of), and print its time and rate.
pub fn measure<T>(name: &str, bytes: usize, mut call: impl FnMut() -> T) {
    if !is_chosen(name, std::env::args().skip(1)) {
        return;
    }
    let begun = Instant::now();
    let mut calls = 0_u32;
    while calls == 0 || begun.elapsed() < WARM_UP {
        black_box(call());
        calls += 1;
    }
    let per_sample = (SAMPLE.as_secs_f64() / (begun.elapsed() / calls).as_secs_f64()).ceil() as u32;
    let mut seconds: Vec<f64> = (0..SAMPLES)
        .map(|_| {
            let begun = Instant::now();
            (0..per_sample).for_each(|_| drop(black_box(call())));
            begun.elapsed().as_secs_f64() / f64::from(per_sample)
        })
        .collect();
    seconds.sort_by(f64::total_cmp);
    let (fastest, median, slowest) = (seconds[0], seconds[SAMPLES / 2], seconds[SAMPLES - 1]);
    let rate = if bytes == 0 { String::new() } else { format!("  {:.2} GB/s", bytes as f64 / median / 1e9) };
    println!("{name:<64} {} ({} to {}){rate}", of(median), of(fastest), of(slowest));
}

/// Whether an argument is part of the name, or there is none. Cargo adds `--bench`.
fn is_chosen(name: &str, arguments: impl Iterator<Item = String>) -> bool {
    let mut parts = arguments.filter(|argument| !argument.starts_with('-')).peekable();
    parts.peek().is_none() || parts.any(|part| name.contains(&part))
}

fn of(seconds: f64) -> String {
    match seconds {
        ..1e-6 => format!("{:.1} ns", seconds * 1e9),
        1e-6..1e-3 => format!("{:.2} us", seconds * 1e6),
        _ => format!("{:.2} ms", seconds * 1e3),
    }
}

#[cfg(test)]
mod tests {
    use super::{is_chosen, of};

    #[test]
    fn names_are_chosen_by_their_parts() {
        let chosen =
            |words: &[&str]| is_chosen("plain/copy, 2 threads", words.iter().map(|&word| word.into()));
        assert!(chosen(&[]) && chosen(&["--bench"]) && chosen(&["--bench", "read", "copy"]));
        assert!(!chosen(&["--bench", "step"]));
    }

    #[test]
    fn times_have_a_unit() {
        assert_eq!([of(2.5e-9), of(2.5e-5), of(2.5)], ["2.5 ns", "25.00 us", "2500.00 ms"]);
    }
}
