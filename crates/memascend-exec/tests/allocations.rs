//! Each allocation of a step, of its commit and of opening the store fails once, in a process of its own: by an error, or,
//! where Rust knows none, by the end of the process. Whichever it is, the store has the step before or the new one, whole,
//! and the next process goes on from it.
//!
//! `MEMASCEND_ALLOCATIONS` is how many of each stage's allocations fail, or `all`.

mod support;

use std::alloc::{GlobalAlloc, Layout, System};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use memascend_kernels::{Algorithm, Moments, Rule, Weight};
use memascend_nvme::{EngineChoice, EngineOptions};
use memascend_store::{Store, StoreOptions};
use support::{Bench, Kind, Model, Setup, Shape, Unit, adamw};

/// The system's allocator, which refuses one allocation of at least so many bytes.
struct Refusing;

#[global_allocator]
static ALLOCATOR: Refusing = Refusing;
/// Allocations that count before the one that is refused; 0 while none counts.
static LEFT: AtomicU64 = AtomicU64::new(0);
static LEAST_BYTES: AtomicUsize = AtomicUsize::new(0);

impl Refusing {
    fn refuses(bytes: usize) -> bool {
        bytes >= LEAST_BYTES.load(Ordering::Relaxed)
            && LEFT.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)) == Ok(1)
    }
}

// SAFETY: what it returns is the system's, or null, which an allocator may return.
unsafe impl GlobalAlloc for Refusing {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        if Self::refuses(layout.size()) { ptr::null_mut() } else { unsafe { System.alloc(layout) } }
    }

    unsafe fn dealloc(&self, address: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(address, layout) }
    }

    unsafe fn realloc(&self, address: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        if Self::refuses(bytes) {
            return ptr::null_mut();
        }
        // SAFETY: the caller's promise.
        unsafe { System.realloc(address, layout, bytes) }
    }
}

/// Where allocations fail.
const STAGES: [&str; 3] = ["resume", "step", "commit"];
const NONE: u64 = u64::MAX;
/// Allocations whose size a user or a file decides on: longer than any other of this model.
const LARGE_BYTES: usize = 300 << 10;
const DONE: i32 = 40;
const TOLD: i32 = 41;
const PATIENCE: Duration = Duration::from_secs(60);

fn model() -> Arc<Model> {
    let lion = Rule { algorithm: Algorithm::Lion, moments: Moments::Bf16, weight: Weight::F16Master };
    let pack = Shape {
        rule: adamw(Weight::Bf16Split),
        numel: 900,
        gap_pages: 0,
        segments: vec![(0, 300), (320, 500)],
    };
    Arc::new(Model::new(
        vec![Shape::whole(adamw(Weight::Bf16Split), 70_000, 0), Shape::whole(lion, 900, 1), pack],
        7,
    ))
}

fn setup() -> Setup {
    Setup { staging_chunks: 3, ..Setup::plain(Kind::Threads) }
}

fn options(choice: EngineChoice) -> StoreOptions {
    StoreOptions { engine: EngineOptions { choice, ..EngineOptions::default() }, ..StoreOptions::default() }
}

/// What a user has each step keep, behind its number.
fn state_of(step: u64) -> String {
    format!("{step} {}", "state ".repeat(LARGE_BYTES / 5))
}

fn step_of(store: &Store) -> u64 {
    store.state().expect("it was committed").split(' ').next().unwrap().parse().unwrap()
}

/// The process in which an allocation fails: opens the store, takes a step and commits it. Its exit code says whether it
/// was told of an error.
#[test]
#[ignore = "a process of the other tests"]
fn child() {
    let value = |name: &str| std::env::var(format!("MEMASCEND_CHILD_{name}"));
    let Ok(directory) = value("DIRECTORY") else { return };
    let (stage, engine) = (value("STAGE").unwrap(), value("ENGINE").unwrap());
    let (nth, least) = (value("NTH").unwrap().parse().unwrap(), value("LEAST").unwrap().parse().unwrap());
    let choice = if engine == "ring" { EngineChoice::Ring } else { EngineChoice::Threads };
    let (directories, options, model) = ([PathBuf::from(directory)], options(choice), model());
    let at = |now: &str| {
        if now == stage {
            LEAST_BYTES.store(least, Ordering::Relaxed);
            LEFT.store(nth, Ordering::Relaxed);
        }
    };
    let over = || LEFT.swap(0, Ordering::Relaxed);
    let result = (|| {
        at("resume");
        let store = Store::open(&directories, &options)?;
        store.settle_manifests()?;
        store.fill_holes()?;
        let left = over();
        let step = step_of(&store) + 1;
        let unit = Unit::found_on(Bench::on(store), &model, setup());
        unit.capture(step)?;
        let (lease, updates, state) = (unit.lease(), unit.updates(step), state_of(step));
        at("step");
        let ticket = unit.fetch(&lease, updates);
        ticket.wait()?;
        unit.pending.wait()?;
        let left = left.max(over());
        at("commit");
        unit.bench.store.commit(&state)?;
        Ok::<_, memascend_exec::ExecError>(left.max(over()))
    })();
    over();
    match result {
        Ok(left) => {
            println!("counted {}", nth - left);
            std::process::exit(DONE);
        }
        Err(error) => {
            eprintln!("told: {error}");
            std::process::exit(TOLD);
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
enum End {
    /// All was done; allocations that counted.
    Done(u64),
    Told(String),
    Aborted,
}

fn run(directory: &Path, stage: &str, engine: &str, nth: u64, least: usize) -> End {
    let what = format!("{stage}, {engine}, allocation {nth} of {least} bytes or more");
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child", "--ignored", "--nocapture", "--test-threads", "1"])
        .env("MEMASCEND_CHILD_DIRECTORY", directory)
        .env("MEMASCEND_CHILD_STAGE", stage)
        .env("MEMASCEND_CHILD_ENGINE", engine)
        .env("MEMASCEND_CHILD_NTH", nth.to_string())
        .env("MEMASCEND_CHILD_LEAST", least.to_string())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let end = Instant::now() + PATIENCE;
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > end {
            child.kill().unwrap();
            panic!("{what}: hung");
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    let output = child.wait_with_output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    match (output.status.code(), output.status.signal()) {
        (Some(DONE), _) => {
            let counted = out.split("counted ").nth(1).and_then(|rest| rest.split_whitespace().next());
            End::Done(counted.unwrap_or_else(|| panic!("{what}: {out}")).parse().unwrap())
        }
        (Some(TOLD), _) => End::Told(err.trim().to_owned()),
        (None, Some(libc::SIGABRT)) if err.contains("memory allocation of") => End::Aborted,
        ended => panic!("{what}: {ended:?} {out} {err}"),
    }
}

/// A run whose store is at some step.
struct Lab {
    root: tempfile::TempDir,
    step: u64,
}

impl Lab {
    fn new() -> Self {
        let root = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
        let store = Store::create(&[root.path().join("store")], &options(EngineChoice::Threads)).unwrap();
        let unit = Unit::put_on(Bench::on(store), &model(), setup()).unwrap();
        unit.bench.store.commit(&state_of(0)).unwrap();
        drop(unit);
        Self { root, step: 0 }
    }

    fn directory(&self) -> PathBuf {
        self.root.path().join("store")
    }

    /// Has one allocation fail, and looks at what the store has then.
    fn fail(&mut self, stage: &str, engine: &str, nth: u64, least: usize) -> End {
        let end = run(&self.directory(), stage, engine, nth, least);
        let what = format!("{stage}, {engine}, allocation {nth}: {end:?} after step {}", self.step);
        let store = Store::open(&[self.directory()], &options(EngineChoice::Threads)).unwrap();
        let step = step_of(&store);
        let is_new = step == self.step + 1;
        // The others go on while one thread ends the process, and may be faster.
        let is_same = step == self.step && !matches!(end, End::Done(_));
        assert!(is_same || is_new, "{what}: step {step}");
        assert_eq!(store.verify(&mut |_, _| true).unwrap(), [], "{what}");
        if step > 0 {
            let unit = Unit::found_on(Bench::on(store), &model(), setup());
            unit.on_ssd().unwrap().assert_same(&model().in_memory(step), &what);
        }
        self.step = step;
        if step > 30 {
            *self = Self::new(); // what is compared with takes as long as all steps
        }
        end
    }
}

/// Which of `count` allocations are to fail.
fn chosen(count: u64) -> Vec<u64> {
    let wanted = match std::env::var("MEMASCEND_ALLOCATIONS") {
        Ok(wanted) if wanted == "all" => count,
        Ok(wanted) => wanted.parse().expect("a number, or all"),
        Err(_) => 4,
    };
    let wanted = wanted.clamp(1, count);
    (0..wanted).map(|index| 1 + index * count / wanted).collect()
}

fn engines() -> Vec<&'static str> {
    if Kind::all(0).iter().any(|kind| matches!(kind, Kind::Ring)) {
        vec!["ring", "threads"]
    } else {
        vec!["threads"]
    }
}

#[test]
fn every_allocation_that_fails_leaves_a_step() {
    for engine in engines() {
        let mut lab = Lab::new();
        for stage in STAGES {
            let End::Done(count) = lab.fail(stage, engine, NONE, 0) else { panic!("nothing was to fail") };
            assert!(count > 10, "{stage}: {count}");
            let (mut told, mut aborted) = (0, 0);
            for nth in chosen(count) {
                match lab.fail(stage, engine, nth, 0) {
                    End::Told(_) => told += 1,
                    End::Aborted => aborted += 1,
                    End::Done(_) => {} // another thread was faster
                }
            }
            println!(
                "{engine}, {stage}: of {count} allocations {aborted} ended the process, {told} were told of"
            );
            assert!(told + aborted > 0);
        }
    }
}

#[test]
fn an_allocation_whose_size_a_user_decides_on_is_an_error() {
    let mut lab = Lab::new();
    for stage in STAGES {
        let End::Done(count) = lab.fail(stage, "threads", NONE, LARGE_BYTES) else {
            panic!("nothing was to fail")
        };
        for nth in 1..=count {
            match lab.fail(stage, "threads", nth, LARGE_BYTES) {
                End::Told(error) => assert!(error.contains("memory"), "{error}"),
                // What a manifest says is parsed before anything is written.
                End::Aborted => assert_eq!(stage, "resume", "allocation {nth}"),
                End::Done(_) => panic!("{stage}: allocation {nth} of {count} did not fail"),
            }
        }
        println!("{stage}: {count} allocations of {LARGE_BYTES} bytes or more");
        assert!(count > 1 || stage == "step", "{stage}: {count}");
    }
}
