//! Gradients of a device are applied chunk by chunk as they arrive, with the bits of the update in memory.

use std::sync::Arc;

use memascend_kernels::{Moments, Rule, Weight};

use crate::rig::{BLOCK, RESERVE, Rig, Timing, device_failure, until};
use crate::support::{Kept, Kind, Model, Setup, Shape, Unit, adamw, within_patience};

fn model() -> Arc<Model> {
    let block8 = Rule { moments: Moments::Block8, ..adamw(Weight::Bf16Split) };
    let shapes = [adamw(Weight::F32), adamw(Weight::F16Master), block8]
        .map(|rule| Shape::whole(rule, 3 * BLOCK + 1_234, 1));
    Arc::new(Model::new(shapes.to_vec(), 11))
}

/// With chunks for a part of a gradient, and with chunks for all; where weights lie in a buffer, and where
/// they are only on the store.
#[test]
fn gradients_are_applied_as_they_arrive() {
    for (chunks, timing) in [2, RESERVE + 2, 40].into_iter().zip(Timing::all()) {
        for stay in [true, false] {
            let what = format!("{chunks} chunks, {timing:?}, weights in memory: {stay}");
            within_patience(&what.clone(), move || {
                let (rig, model) = (Rig::new(chunks, timing), model());
                let kept = Kept { weights: stay, through: u64::MAX, ..Kept::default() };
                let unit = Unit::new(&model, Setup { kept, slots: 3, ..Setup::plain(Kind::Threads) });
                let lease = stay.then(|| unit.lease());
                for step in 1..=2 {
                    if let Some(lease) = &lease {
                        unit.fetch(lease, Vec::new()).wait().unwrap();
                    }
                    let link = (&*rig.link, &rig.staging);
                    let applied = unit.apply(link, lease.as_ref(), step, |gradient| rig.computed(gradient));
                    for (applying, gradient) in applied.applying.iter().zip(&applied.gradients) {
                        assert_eq!(applying.wait().unwrap(), None, "{what}");
                        rig.fake.access(gradient, true); // the memory is the computation's again
                    }
                    applied.tickets.iter().for_each(|ticket| ticket.wait().unwrap());
                    assert_eq!(rig.chunks_live(), 0, "{what}: chunks are free once they are used");
                    let expected = model.in_memory(step);
                    unit.on_ssd().unwrap().assert_same(&expected, &format!("{what}, step {step}"));
                    if let Some(lease) = &lease {
                        assert!(unit.weights(lease) == expected.unit, "{what}, step {step}: the buffer");
                    }
                }
                drop(unit);
                rig.end();
            });
        }
    }
}

/// A part of the tensor may be updated, so the unit is neither trained nor committed any more.
#[test]
fn a_gradient_that_does_not_arrive_fails_the_unit() {
    within_patience("a copy fails", || {
        let (rig, model) = (Rig::new(3, Timing::AT_ONCE), model());
        let unit = Unit::new(&model, Setup { slots: 3, ..Setup::plain(Kind::Threads) });
        rig.fake.fail(c"cudaMemcpyAsync", 719);
        let applied = unit.apply((&*rig.link, &rig.staging), None, 1, |gradient| rig.computed(gradient));
        for (applying, ticket) in applied.applying.iter().zip(&applied.tickets) {
            let said = device_failure(applying.wait());
            assert_eq!(device_failure(ticket.wait()), said);
        }
        rig.fake.fail(c"cudaMemcpyAsync", 0);
        assert!(unit.pending.wait().is_err());
        assert!(unit.fetch(&unit.lease(), Vec::new()).wait().is_err());
        until("all chunks are returned", || rig.chunks_live() == 0);
        drop(unit);
        rig.end();
    });
}
