//! A unit trained on simulated disks, seed by seed: either it has the bits of training in memory, or an error
//! names the failure and the unit is given up. Never is it silently wrong, and nothing hangs or is left
//! behind.
//!
//! `MEMASCEND_SEEDS` is how many seeds are run, `MEMASCEND_SEED` runs one of them alone.

#[path = "../../memascend-store/tests/seeds/mod.rs"]
mod seeds;
mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use memascend_exec::{ExecError, Result};
use memascend_kernels::{GRADIENT_BLOCK, Moments};
use memascend_nvme::testing::Faults;
use seeds::for_each_seed;
use support::{Kept, Kind, Model, Random, Setup, Shape, Unit, every_rule, names_a_tensor, within_patience};

const SEEDS: u64 = 600;
const STEPS: u64 = 3;
/// The outcomes of the seeds.
#[derive(Debug, Default)]
struct Outcomes {
    /// Trained to the end.
    trained: AtomicU64,
    /// Given up for good.
    failed: AtomicU64,
    /// A read failed that harmed nothing, and training went on.
    read_again: AtomicU64,
    /// Dropped with everything under way.
    dropped: AtomicU64,
    /// Steps that were taken tensor by tensor.
    beside: AtomicU64,
}

impl Outcomes {
    fn count(outcome: &AtomicU64) {
        outcome.fetch_add(1, Ordering::Relaxed);
    }
}

struct Trial {
    seed: u64,
    faults: Faults,
    setup: Setup,
    model: Arc<Model>,
    /// The step that is given up half-way, if one is.
    dropped_at: u64,
    /// After each step, the quarters and the buffers of states that may stay from then on, if that
    /// changes.
    changes: Vec<Option<(usize, usize)>>,
    outcomes: Arc<Outcomes>,
}

fn below(random: &mut Random, limit: u64) -> usize {
    (random.next() % limit) as usize
}

fn faults(random: &mut Random, seed: u64) -> Faults {
    let mut faults = Faults { seed, reorder: below(random, 9), ..Faults::default() };
    faults.short_one_in = [0, 1, 2, 5][below(random, 4)];
    faults.again_one_in = [0, 2, 5, 20][below(random, 4)];
    // A third of the seeds has none but these, from which one recovers.
    if !seed.is_multiple_of(3) {
        faults.read_error_one_in = [0, 15, 60, 400][below(random, 4)];
        faults.write_error_one_in = [0, 20, 80, 400][below(random, 4)];
    }
    faults
}

/// Nothing stays in memory in a third of the seeds.
fn kept(random: &mut Random) -> Kept {
    if random.next().is_multiple_of(3) {
        return Kept::default();
    }
    Kept {
        buffers: below(random, 4),
        quarters: below(random, 5),
        weights: random.next().is_multiple_of(2),
        through: random.next(),
        beside: random.next(),
    }
}

fn shape(random: &mut Random) -> Shape {
    let rules = every_rule();
    let rule = rules[below(random, rules.len() as u64)];
    // Few of several chunks, which take long.
    let most = if random.next().is_multiple_of(12) { 2 * GRADIENT_BLOCK } else { 6_000 };
    let numel = 1 + below(random, most as u64);
    let gap_pages = below(random, 3);
    if numel < 100 || rule.moments == Moments::Block8 || !random.next().is_multiple_of(4) {
        return Shape::whole(rule, numel, gap_pages);
    }
    let middle = numel / 3;
    Shape { rule, numel, gap_pages, segments: vec![(1, middle - 1), (middle, 1), (middle + 7, numel / 2)] }
}

impl Trial {
    fn new(seed: u64, outcomes: &Arc<Outcomes>) -> Self {
        let mut random = Random(seed);
        let faults = faults(&mut random, seed);
        let shapes = (0..1 + below(&mut random, 3)).map(|_| shape(&mut random)).collect();
        let setup = Setup {
            kind: Kind::Sim(faults),
            volumes: 1 + below(&mut random, 3),
            chunk_blocks: 1,
            slots: 1 + below(&mut random, 3),
            compute_threads: 1 + below(&mut random, 2),
            // Up to eight, every gradient goes to the disks.
            staging_chunks: 2 + below(&mut random, 12),
            kept: kept(&mut random),
        };
        let dropped_at = if below(&mut random, 8) == 0 { 1 + below(&mut random, STEPS) as u64 } else { 0 };
        let rounded = random.next().is_multiple_of(2);
        let model = Arc::new(Model::new(shapes, seed).with_gradients_rounded(rounded));
        let change = |_| {
            let change = (below(&mut random, 5), below(&mut random, 5));
            random.next().is_multiple_of(2).then_some(change)
        };
        let changes = (0..STEPS).map(change).collect();
        Self { seed, faults, setup, model, dropped_at, changes, outcomes: Arc::clone(outcomes) }
    }

    fn run(&self) {
        match Unit::try_new(&self.model, self.setup) {
            Ok(unit) => {
                self.train(&unit);
                self.nothing_is_left(unit);
            }
            Err(error) => self.allowed(&error),
        }
    }

    fn train(&self, unit: &Unit) {
        for step in 1..=STEPS {
            let beside = unit.goes_beside(step) && step != self.dropped_at;
            if !beside && let Err(error) = unit.capture(step) {
                self.allowed(&error);
                return self.given_up(unit, &error);
            }
            let lease = unit.lease();
            let expected = self.model.in_memory(step);
            let fetched = if beside {
                // The forward pass has brought the weights, as often as it takes.
                while let Err(error) = unit.fetch(&lease, Vec::new()).wait() {
                    self.allowed(&error);
                    Outcomes::count(&self.outcomes.read_again);
                }
                Outcomes::count(&self.outcomes.beside);
                unit.update_beside(&lease, step).wait()
            } else {
                let ticket = unit.fetch(&lease, unit.updates(step));
                if step == self.dropped_at {
                    return Outcomes::count(&self.outcomes.dropped);
                }
                ticket.wait()
            };
            match &fetched {
                Ok(()) => {
                    assert!(unit.weights(&lease) == expected.unit, "step {step}: weights in the buffer")
                }
                Err(error) => self.allowed(error),
            }
            drop(lease);
            if let Err(error) = unit.pending.wait() {
                self.allowed(&error);
                return self.given_up(unit, &error);
            }
            // Who waited finds every buffer free: returned before the end is told.
            assert_eq!(unit.live_bytes(), [0; 3], "step {step}: leases of slots, staging, units");
            if fetched.is_err() {
                // Weights that no update touches could not be read: the step is done all the same.
                Outcomes::count(&self.outcomes.read_again);
            }
            let change = self.changes[step as usize - 1];
            if let Some(Err(error)) = change.map(|(quarters, buffers)| unit.change_kept(quarters, buffers)) {
                self.allowed(&error);
                return self.given_up(unit, &error);
            }
            unit.on_ssd_at_last().unwrap().assert_same(&expected, &format!("on the disks after step {step}"));
        }
        Outcomes::count(&self.outcomes.trained);
    }

    /// The error is one that the faults can give, and names its operation.
    fn allowed(&self, error: &ExecError) {
        let Faults { read_error_one_in, write_error_one_in, .. } = self.faults;
        let ExecError::Store(store) = error else { panic!("not of a transfer: {error}") };
        let message = error.to_string();
        let (one_in, errnos): (_, &[i32]) = if message.contains("write of") {
            (write_error_one_in, &[5, 28])
        } else {
            (read_error_one_in, &[5])
        };
        assert!(one_in > 0, "an error out of nowhere: {error}");
        assert!(store.errno().is_some_and(|errno| errnos.contains(&errno)), "{error}");
        assert!(names_a_tensor(error), "{error}");
    }

    /// A unit that may be updated in part is not used again.
    fn given_up(&self, unit: &Unit, error: &ExecError) {
        Outcomes::count(&self.outcomes.failed);
        let refused = |result: Result<()>, what: &str| {
            let again = result.err().unwrap_or_else(|| panic!("{what} after {error}"));
            assert_eq!(again.to_string(), error.to_string(), "{what}");
        };
        for _ in 0..2 {
            refused(unit.pending.wait(), "a wait that succeeds");
            let lease = unit.lease();
            refused(unit.fetch(&lease, Vec::new()).wait(), "weights");
            refused(unit.fetch(&lease, unit.updates(STEPS + 1)).wait(), "an update");
            drop(lease);
            refused(unit.on_ssd().map(drop), "reading back");
        }
    }

    fn nothing_is_left(&self, unit: Unit) {
        let Unit { executor, gradients, slots, chunks, units, kept, staying, bench, pending, .. } = unit;
        // Gradients that were captured but never taken go with their owner; jobs and transfers
        // under way end first.
        drop((executor, gradients));
        let ended = pending.wait();
        drop((bench, staying));
        if let Err(error) = ended {
            self.allowed(&error);
        }
        for (name, pool) in [("slots", slots), ("staging", chunks), ("units", units), ("states", kept)] {
            assert_eq!(pool.counters().live_bytes, 0, "seed {}: buffers of {name}", self.seed);
        }
    }
}

#[test]
fn a_unit_is_trained_bit_for_bit_or_given_up_with_an_error() {
    let outcomes = Arc::<Outcomes>::default();
    for_each_seed(SEEDS, |seed| {
        let trial = Trial::new(seed, &outcomes);
        let Faults { read_error_one_in, write_error_one_in, .. } = trial.faults;
        let before = outcomes.trained.load(Ordering::Relaxed);
        let completes = read_error_one_in + write_error_one_in + trial.dropped_at == 0;
        within_patience(&format!("seed {seed}"), move || trial.run());
        if completes {
            assert_eq!(outcomes.trained.load(Ordering::Relaxed), before + 1, "one recovers from such faults");
        }
    });
    eprintln!("{outcomes:?}");
    let Outcomes { trained, failed, read_again, dropped, beside } = &*outcomes;
    // Of all seeds or none: a few may well not do everything.
    if trained.load(Ordering::Relaxed) > 500 {
        for (count, least) in [(failed, 300), (read_again, 20), (dropped, 100), (beside, 300)] {
            assert!(count.load(Ordering::Relaxed) > least, "{outcomes:?}");
        }
    }
}
