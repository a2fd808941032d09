//! Rates of the engines on a drive. Without arguments: a table of the usual workloads on a file in
//! the current directory's filesystem. With them one workload, told as a line of JSON, for
//! comparisons: see `benches/io.py`.
//!
//! `cargo bench -p memascend-nvme -- [--dir DIR_OR_DEVICE] [--engine auto|ring|threads]
//! [--read-percent N] [--random] [--bytes N] [--depth N] [--seconds X] [--size BYTES] [--io-poll]
//! [--sq-poll] [--unregistered] [--keep] [--json]`
//!
//! With `--keep` the file stays, and is used as it is the next time: so that another program can be
//! measured on it.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use memascend_mem::{PageableAllocator, Pool, SizeClass};
use memascend_nvme::{EngineChoice, EngineOptions, Operation, Request, Volume, Workload, open_engine};

struct Arguments {
    place: Option<PathBuf>,
    options: EngineOptions,
    workload: Workload,
    registered: bool,
    keep: bool,
    json: bool,
}

fn main() {
    let mut arguments = Arguments {
        place: None,
        options: EngineOptions::default(),
        workload: Workload {
            read_percent: 100,
            random: false,
            request_bytes: 1 << 20,
            depth: 32,
            span_bytes: 1 << 30,
            duration: Duration::from_secs(2),
        },
        registered: true,
        keep: false,
        json: false,
    };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().unwrap_or_else(|| panic!("{word} needs a value"));
        let workload = &mut arguments.workload;
        match word.as_str() {
            "--dir" => arguments.place = Some(value().into()),
            "--engine" => {
                arguments.options.choice = match value().as_str() {
                    "auto" => EngineChoice::Auto,
                    "ring" => EngineChoice::Ring,
                    "threads" => EngineChoice::Threads,
                    other => panic!("unknown engine {other}"),
                }
            }
            "--read-percent" => workload.read_percent = value().parse().expect("a number"),
            "--random" => workload.random = true,
            "--bytes" => workload.request_bytes = value().parse().expect("a number"),
            "--depth" => workload.depth = value().parse().expect("a number"),
            "--size" => workload.span_bytes = value().parse().expect("a number"),
            "--seconds" => workload.duration = Duration::from_secs_f64(value().parse().expect("a number")),
            "--io-poll" => arguments.options.io_poll = true,
            "--sq-poll" => arguments.options.sq_poll = true,
            "--unregistered" => arguments.registered = false,
            "--keep" => arguments.keep = true,
            "--json" => arguments.json = true,
            // cargo adds it.
            "--bench" => {}
            other => panic!("unknown argument {other}"),
        }
    }
    if arguments.json {
        run(&arguments);
        return;
    }
    let workload = arguments.workload;
    let small = Workload { request_bytes: 4096, random: true, ..workload };
    for (name, workload) in [
        ("sequential write, 1 MiB", Workload { read_percent: 0, ..workload }),
        ("sequential read, 1 MiB", workload),
        ("55/45 mix, 1 MiB", Workload { read_percent: 55, ..workload }),
        ("random read, 4 KiB", small),
        ("random write, 4 KiB", Workload { read_percent: 0, ..small }),
    ] {
        print!("{name:<26}");
        run(&Arguments { workload, place: arguments.place.clone(), ..arguments });
    }
}

fn run(arguments: &Arguments) {
    let Arguments { options, workload, registered, keep, json, .. } = *arguments;
    let temporary = tempfile::tempdir_in(".").expect("a directory to write in");
    let place = arguments.place.clone().unwrap_or_else(|| temporary.path().to_owned());
    let kept = keep.then(|| Volume::open(&place, true).ok()).flatten();
    let filled = kept.is_some();
    let volume = kept.unwrap_or_else(|| Volume::create(&place, true).expect("a volume"));
    volume.reserve(workload.span_bytes).expect("room");
    let class = SizeClass::new("bench", workload.request_bytes.max(1 << 20), workload.depth);
    let pool = Pool::new(&PageableAllocator { huge_pages: true }, &[class]).expect("memory");
    let opened = open_engine(volume.file(), options).expect("an engine");
    if registered {
        opened.engine.register(&pool);
    }
    // Blocks that were never written are not read from the drive.
    if !filled {
        fill(&*opened.engine, &pool, workload.span_bytes);
        volume.file().sync().expect("sync");
    }
    if keep {
        volume.keep(b"{}").expect("a note");
    }
    scramble(&pool, workload.request_bytes, workload.depth);
    let cpu = cpu_seconds();
    let measured = workload.run(&opened.engine, &pool).expect("the drive works");
    let cpu = cpu_seconds() - cpu;
    let gib = (measured.bytes_read + measured.bytes_written) as f64 / f64::from(1 << 30);
    if json {
        println!(
            "{{\"engine\": \"{}\", \"bytes_per_second\": {}, \"requests_per_second\": {}, \"cpu_seconds\": {cpu}, \
             \"cpu_seconds_per_gib\": {}, \"direct\": {}, \"features\": {:?}}}",
            opened.engine.name(),
            measured.bytes_per_second(),
            measured.requests_per_second(),
            cpu / gib,
            volume.is_direct(),
            opened.engine.features(),
        );
    } else {
        println!(
            "{:>8.1} MB/s {:>9.0} requests/s  {:>6.3} CPU s/GiB  p50 {:?} p99 {:?}  ({}: {})",
            measured.bytes_per_second() / 1e6,
            measured.requests_per_second(),
            cpu / gib,
            measured.latency_p50,
            measured.latency_p99,
            opened.engine.name(),
            opened.engine.features().join(", "),
        );
    }
}

/// Fills the buffers that the workload gets with noise: a drive may be faster with zeros, and other
/// programs write noise.
fn scramble(pool: &Pool, request_bytes: usize, depth: usize) {
    let mut random = 0x5EED_1234_ABCD_u64;
    let leases: Vec<_> =
        (0..depth).map(|_| pool.try_lease(request_bytes).expect("a class").expect("a buffer")).collect();
    for lease in leases {
        let buffer = memascend_mem::LeaseSlice::new(Arc::new(lease), 0, request_bytes);
        // SAFETY: the only handle to the range.
        for word in unsafe { buffer.as_mut_slice() }.chunks_mut(8) {
            // xorshift64.
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            word.copy_from_slice(&random.to_le_bytes()[..word.len()]);
        }
    }
}

/// Writes the whole span once.
fn fill(engine: &dyn memascend_nvme::Engine, pool: &Pool, span_bytes: u64) {
    let (sender, receiver) = std::sync::mpsc::channel();
    let mut running = 0;
    for offset in (0..span_bytes).step_by(1 << 20) {
        if running == pool_depth(pool) {
            receiver.recv().expect("the engine answers");
            running -= 1;
        }
        let lease = pool.try_lease(1 << 20).expect("a class").expect("a buffer");
        let buffer = memascend_mem::LeaseSlice::new(Arc::new(lease), 0, 1 << 20);
        // SAFETY: the only handle to the range.
        let words = unsafe { buffer.as_mut_slice() };
        words.iter_mut().enumerate().for_each(|(index, byte)| *byte = (index as u64 ^ offset) as u8);
        let sender = sender.clone();
        engine.submit(Request {
            operation: Operation::Write,
            offset,
            buffer,
            on_complete: Box::new(move |completion| {
                completion.result.expect("the drive works");
                drop(completion.buffer);
                let _ = sender.send(());
            }),
        });
        running += 1;
    }
    (0..running).for_each(|_| receiver.recv().expect("the engine answers"));
}

fn pool_depth(pool: &Pool) -> usize {
    pool.counters().reserved_bytes / (1 << 20)
}

/// User and system time of this process.
fn cpu_seconds() -> f64 {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: `usage` is writable.
    let usage = unsafe {
        libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr());
        usage.assume_init()
    };
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}
