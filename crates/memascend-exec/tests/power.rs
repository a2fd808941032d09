//! The power fails at every single operation of some optimizer steps: reads, writes of weights, states and
//! spilled gradients, flushes and manifests, on simulated disks that reorder and tear. Afterwards a step is
//! there, whole, to the bit; and the remaining steps have the results of a run without the failure.

mod support;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use memascend_kernels::{Algorithm, Moments, Rule, Weight};
use memascend_nvme::testing::{Faults, Power, SimDisk, SimEngine, SimNotePlace};
use memascend_nvme::{OpenedEngine, Volume, VolumeFile};
use memascend_store::{Store, StoreError, StoreOptions};
use support::{Bench, Kept, Kind, Model, Setup, Shape, Unit, adamw, within_patience};

const STEPS: u64 = 3;

struct Lab {
    power: Arc<Power>,
    disks: Vec<Arc<SimDisk>>,
    directories: Vec<PathBuf>,
    place: SimNotePlace,
}

impl Lab {
    fn new(root: &Path, volumes: u64, seed: u64, place: SimNotePlace) -> Self {
        let power = Power::new();
        let disk = |index| {
            let faults = Faults { seed: 2 * seed + index, torn: true, reorder: 5, ..Faults::default() };
            SimDisk::with_power(faults, Arc::clone(&power))
        };
        Self {
            disks: (0..volumes).map(disk).collect(),
            directories: (0..volumes).map(|index| root.join(index.to_string())).collect(),
            power,
            place,
        }
    }

    fn store(&self, create: bool) -> Result<Store, StoreError> {
        let options = StoreOptions { direct: false, ..StoreOptions::default() };
        let open = |file: &Arc<VolumeFile>| {
            let directory = file.path().parent().expect("a directory has it");
            let index = self.directories.iter().position(|known| known == directory).expect("one of ours");
            let engine = SimEngine::running(file, Arc::clone(&self.disks[index])).with_notes(self.place);
            Ok(OpenedEngine { engine: Arc::new(engine), notice: None })
        };
        if create {
            Store::create_with(&self.directories, &options, &open)
        } else {
            Store::open_with(&self.directories, &options, &open)
        }
    }

    /// The files after a power failure, without any clean-up by the process.
    fn crash(&self) {
        for directory in &self.directories {
            std::fs::create_dir_all(directory).unwrap();
            let file = directory.join(Volume::FILE_NAME);
            std::fs::OpenOptions::new().create(true).append(true).open(file).unwrap();
        }
        self.power.restore();
        self.disks.iter().for_each(|disk| disk.crash());
    }
}

/// Steps `from + 1 ..= STEPS`, one of `every` committed; tells of the last that was.
fn train(unit: &Unit, from: u64, every: u64, mut committed: impl FnMut(u64)) -> Result<(), String> {
    let told = |error: &dyn std::fmt::Display| error.to_string();
    for step in from + 1..=STEPS {
        unit.capture(step).map_err(|error| told(&error))?;
        let lease = unit.lease();
        unit.fetch(&lease, unit.updates(step)).wait().map_err(|error| told(&error))?;
        unit.pending.wait().map_err(|error| told(&error))?;
        if step.is_multiple_of(every) {
            unit.bench.store.commit(&step.to_string()).map_err(|error| told(&error))?;
            committed(step);
        }
    }
    Ok(())
}

/// A tensor in two pieces, a pack, one with other rules, and frozen weights between them; gradients
/// find little room.
fn model() -> Arc<Model> {
    let lion = Rule { algorithm: Algorithm::Lion, moments: Moments::Bf16, weight: Weight::F16Master };
    let pack = Shape {
        rule: adamw(Weight::Bf16Split),
        numel: 900,
        gap_pages: 0,
        segments: vec![(0, 300), (320, 500)],
    };
    let shapes = vec![Shape::whole(adamw(Weight::Bf16Split), 70_000, 0), Shape::whole(lion, 9_000, 1), pack];
    Arc::new(Model::new(shapes, 7))
}

/// Where a run lies, its resident part, and its committed steps.
#[derive(Debug, Clone, Copy)]
struct Run {
    volumes: u64,
    place: SimNotePlace,
    kept: Kept,
    every: u64,
}

/// Returns how many operations there were before the power failed, or in all.
fn fail_at(model: &Arc<Model>, run: Run, cut: Option<u64>) -> u64 {
    let Run { volumes, place, kept, every } = run;
    let root = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    let lab = Lab::new(root.path(), volumes, cut.unwrap_or(0), place);
    let setup = Setup { staging_chunks: 3, kept, ..Setup::plain(Kind::Sim(Faults::default())) };
    let unit = Unit::put_on(Bench::on(lab.store(true).unwrap()), model, setup).unwrap();
    unit.bench.store.commit("0").unwrap();
    let before = lab.power.count();
    if let Some(cut) = cut {
        lab.power.cut_at(cut);
    }
    let mut last = 0;
    let trained = train(&unit, 0, every, |step| last = step);
    let operations = lab.power.count() - before;
    drop(unit);
    let Some(cut) = cut else {
        trained.unwrap();
        return operations;
    };
    assert!(lab.power.is_off() || trained.is_ok(), "cut {cut}: {trained:?}");
    lab.crash();
    let what = format!("{run:?}, cut {cut}");
    let unit = Unit::found_on(Bench::on(lab.store(false).unwrap()), model, setup);
    let step: u64 = unit.bench.store.state().expect("the first commit came before").parse().unwrap();
    assert!(step == last || step == last + every, "{what}: step {step} after {last}");
    if step > 0 {
        // Before the first step there are no states.
        unit.on_ssd().unwrap().assert_same(&model.in_memory(step), &what);
    }
    train(&unit, step, every, |_| ()).unwrap();
    unit.on_ssd().unwrap().assert_same(&model.in_memory(STEPS), &what);
    operations
}

#[test]
fn a_power_failure_at_any_operation_of_a_step_leaves_a_step() {
    let model = model();
    let some = Kept { buffers: 1, quarters: 2, weights: false, through: u64::MAX, beside: 0 };
    for (volumes, place, kept, every) in [
        (1, SimNotePlace::File, Kept::default(), 1),
        (2, SimNotePlace::Slots, Kept::default(), 1),
        (1, SimNotePlace::Slots, some, 1),
        // The second step writes resident data; then only the commit does.
        (2, SimNotePlace::File, Kept { through: 0b100, ..Kept::ALL }, 2),
        (1, SimNotePlace::File, Kept::ALL, 1),
    ] {
        let run = Run { volumes, place, kept, every };
        let mut cuts = 0;
        for cut in 1.. {
            let model = Arc::clone(&model);
            let (sender, receiver) = std::sync::mpsc::channel();
            within_patience(&format!("{run:?}, cut {cut}"), move || {
                let _ = sender.send(fail_at(&model, run, Some(cut)));
            });
            cuts = cut;
            if receiver.recv().unwrap() < cut {
                break; // it went through
            }
        }
        println!("{run:?}: {cuts} cuts");
        assert!(cuts > 30, "{cuts} cuts: {}", fail_at(&model, run, None));
    }
}
