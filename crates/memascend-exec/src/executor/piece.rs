//! A piece of a tensor on its way through the pipeline, and where its parts lie in an update slot.
//!
//! Weights that have no unit buffer are read into the update slot, in smaller pieces where they do not fit
//! beside states and gradient. A piece whose planes and weights stay in memory takes no slot, so an update in
//! memory does not wait for one.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use crossbeam_channel::Sender;
use memascend_kernels::GRADIENT_BLOCK;
use memascend_mem::{Lease, LeaseSlice, LockExt, PAGE_BYTES, round_up_to_page};
use memascend_store::{Extent, Rewrite};

use crate::gradients::Chunk;
use crate::{ExecError, InFlight, InFlightCounter, Result, UpdateTensor};

/// A piece of a tensor on its way through the pipeline.
pub(super) struct UpdatePiece {
    pub(super) tensor: Arc<UpdateTensor>,
    pub(super) first: usize,
    pub(super) numel: usize,
    pub(super) areas: Areas,
    /// The piece's weights, in the unit's lease or in the slot.
    pub(super) weights: Option<LeaseSlice>,
    /// Whether they stay where they are after the update.
    pub(super) weights_resident: bool,
    /// Whether resident weights are written as well.
    pub(super) weights_written: bool,
    pub(super) targets: Arc<TargetExtents>,
    pub(super) gradient_chunk: Option<Chunk>,
    pub(super) pending: Arc<InFlightCounter>,
    /// Counted by the groups that the piece is a part of, until its weights are written.
    pub(super) groups: Vec<InFlight>,
    // Declared last, so that even a dropped piece returns its buffers before it signals its end.
    /// Counted by the unit's [`InFlightCounter`], so that no later job reads the unit before this update.
    pub(super) update: InFlight,
    /// Counted by the job's ticket.
    pub(super) ready: InFlight,
}

/// Where a tensor's new values go: to other extents than the old ones while a generation holds
/// those.
pub(super) struct TargetExtents {
    pub(super) weights: Option<Extent>,
    /// In the order of the tensor's planes.
    pub(super) planes: Vec<Extent>,
}

/// The reads of a piece under way; the last to end passes the piece on.
pub(super) struct PieceReads {
    pub(super) left: AtomicUsize,
    pub(super) outcome: Mutex<(Option<ExecError>, Option<UpdatePiece>)>,
    pub(super) computed: Sender<UpdatePiece>,
}

/// Where a tensor to be updated is read from, and where it is written to.
pub(super) struct SourceExtents {
    pub(super) weights: Option<Extent>,
    pub(super) planes: Vec<Rewrite>,
    pub(super) targets: Arc<TargetExtents>,
}

impl PieceReads {
    pub(super) fn ended(&self, result: Result<()>) {
        if let Err(error) = result {
            self.lock().0.get_or_insert(error);
        }
        if self.left.fetch_sub(1, Ordering::AcqRel) != 1 {
            return;
        }
        let (error, piece) = std::mem::take(&mut *self.lock());
        let piece = piece.expect("the last read ends once");
        match error {
            None => {
                // A refused piece is dropped, which ends its operations with an error.
                let _ = self.computed.send(piece);
            }
            Some(error) => piece.fail(error),
        }
    }

    fn lock(&self) -> MutexGuard<'_, (Option<ExecError>, Option<UpdatePiece>)> {
        self.outcome.locked()
    }
}

impl UpdatePiece {
    /// Returns the buffers, and reports `error` to the ticket and to the unit, whose other pieces
    /// may have been updated.
    fn fail(self, error: ExecError) {
        let Self { tensor, areas, weights, gradient_chunk, groups, update, ready, .. } = self;
        drop((tensor, areas, weights, gradient_chunk));
        groups.into_iter().for_each(|group| group.end(Err(error.clone())));
        update.end(Err(error.clone()));
        ready.end(Err(error));
    }
}

/// How a piece lies in an update slot: the tensor's planes one after the other, then the gradient,
/// then the weights if the unit has no lease.
pub(super) struct SlotLayout {
    /// Elements of a piece.
    pub(super) elements: usize,
    /// Where each plane begins, then the gradient, and last the weights if they lie in the slot.
    pub(super) offsets: Vec<usize>,
}

impl SlotLayout {
    /// The largest pieces that a slot holds, with their weights if `with_weights`.
    pub(super) fn new(
        tensor: &UpdateTensor,
        slot_bytes: usize,
        chunk_elements: usize,
        with_weights: bool,
    ) -> Self {
        let mut elements = chunk_elements;
        loop {
            let mut offsets = vec![0];
            for state in &tensor.planes {
                offsets
                    .push(offsets[offsets.len() - 1] + round_up_to_page(state.plane.span(0, elements).len()));
            }
            let mut end = offsets[offsets.len() - 1] + elements * tensor.dtype.bytes();
            if with_weights {
                // A piece is whole pages of elements, so this is the start of a page.
                offsets.push(end);
                end += elements * tensor.dtype.bytes();
            }
            if end <= slot_bytes {
                return Self { elements, offsets };
            }
            elements /= 2;
            // Every area begins at a page, and 8-bit states are cut between records.
            let smallest = if tensor.planes.iter().any(|state| state.plane.has_records()) {
                GRADIENT_BLOCK
            } else {
                PAGE_BYTES
            };
            assert!(
                elements.is_multiple_of(smallest),
                "slots of {slot_bytes} bytes are too small for any piece of a tensor"
            );
        }
    }
}

/// The bytes of a piece in memory.
pub(super) struct Areas {
    pub(super) planes: Vec<PlaneArea>,
    /// Where the rest lies, for pieces that need it.
    pub(super) slot: Option<SlotAreas>,
}

/// Where a plane of a piece lies.
pub(super) struct PlaneArea {
    pub(super) buffer: LeaseSlice,
    /// Whether it stays there after the update.
    pub(super) resident: bool,
}

/// The parts of an update slot that one piece uses, beside its planes.
pub(super) struct SlotAreas {
    /// The gradient as the kernel takes it.
    pub(super) gradient: LeaseSlice,
    /// Where a spilled gradient is read to: the same area, or its last half if it is to be widened.
    pub(super) spilled: LeaseSlice,
    /// The weights, if they lie in the slot.
    pub(super) weights: Option<LeaseSlice>,
}

impl SlotAreas {
    pub(super) fn new(slot: &Arc<Lease>, tensor: &UpdateTensor, layout: &SlotLayout, numel: usize) -> Self {
        let area = |index: usize, bytes| {
            LeaseSlice::new(Arc::clone(slot), layout.offsets[index], round_up_to_page(bytes))
        };
        let (gradient, bytes) = (tensor.planes.len(), numel * tensor.dtype.bytes());
        let spilled = if tensor.gradient.rounded {
            // A piece is whole pages of elements, so this is the start of a page.
            let half = layout.offsets[gradient] + layout.elements * size_of::<u16>();
            LeaseSlice::new(Arc::clone(slot), half, round_up_to_page(numel * size_of::<u16>()))
        } else {
            area(gradient, bytes)
        };
        Self {
            gradient: area(gradient, bytes),
            spilled,
            weights: (layout.offsets.len() > gradient + 1).then(|| area(gradient + 1, bytes)),
        }
    }

    /// The area of a plane.
    pub(super) fn plane(slot: &Arc<Lease>, layout: &SlotLayout, index: usize, bytes: usize) -> LeaseSlice {
        LeaseSlice::new(Arc::clone(slot), layout.offsets[index], bytes)
    }
}
