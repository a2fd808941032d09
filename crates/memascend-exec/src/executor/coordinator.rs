//! Starts jobs in order, piece by piece, as far as there are update slots.

use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use crossbeam_channel::Sender;
use memascend_mem::{Lease, LeaseSlice, Pool, round_up_to_page};
use memascend_nvme::Operation;
use memascend_store::{Extent, Rewrite, Store};

use super::piece::{Areas, Places, Reads, SlotLayout, Targets, Work};
use super::{Job, Ticket};
use crate::files::FileReader;
use crate::gradients::{Chunk, SourcePlace};
use crate::{OptimError, Pending, Result, UnitTensor, UnitWeights, UpdateTensor};

/// How long an update slot may take to come free before the drive counts as hung, in seconds.
const PATIENCE_SECONDS: u64 = 120;

pub(super) struct Coordinator {
    pub(super) store: Arc<Store>,
    pub(super) slots: Pool,
    pub(super) slot_bytes: usize,
    pub(super) chunk_elements: usize,
    pub(super) computed: Sender<Work>,
    /// Made when a unit first has weights outside of the store.
    pub(super) files: OnceLock<FileReader>,
}

impl Coordinator {
    pub(super) fn run(&self, job: Job) {
        let Job { pending, weights, updates, ticket, ready } = job;
        let started = pending.wait().and_then(|()| self.start(&pending, weights.as_ref(), updates, &ticket));
        // Returned before anybody hears of the end, so that who waited finds the buffer free.
        drop(weights);
        ready.end(started);
    }

    fn start(
        &self,
        pending: &Arc<Pending>,
        weights: Option<&UnitWeights>,
        mut updates: Vec<UpdateTensor>,
        ticket: &Arc<Ticket>,
    ) -> Result<()> {
        updates.sort_by_key(|tensor| tensor.weight_offset);
        if let Some(weights) = weights {
            let updated: Vec<usize> = updates.iter().map(|tensor| tensor.weight_offset).collect();
            for tensor in &weights.tensors {
                if updated.binary_search(&tensor.offset).is_err() {
                    self.read_weights(&weights.lease, tensor, ticket);
                }
            }
        }
        for mut tensor in updates {
            let places = self.places(weights, &tensor).inspect_err(|error| {
                // Updated in part, the unit on the SSD must not be taken for whole.
                pending.begin().end(Err(error.clone()));
            })?;
            // Each chunk of the gradient goes with its last piece, to return to the pool as soon as it is consumed.
            let mut gradient_chunks = match &mut tensor.gradient.place {
                SourcePlace::Chunks { chunks, .. } => std::mem::take(chunks),
                SourcePlace::Packed { .. } | SourcePlace::Addresses => Vec::new(),
            };
            let tensor = Arc::new(tensor);
            let layout = SlotLayout::new(&tensor, self.slot_bytes, self.chunk_elements);
            for first in (0..tensor.numel).step_by(layout.elements) {
                let numel = layout.elements.min(tensor.numel - first);
                let chunk = gradient_chunks.get_mut(first / self.chunk_elements).map(|chunk| {
                    let last = (first + layout.elements).is_multiple_of(self.chunk_elements);
                    if last { std::mem::replace(chunk, Chunk::Empty) } else { chunk.clone() }
                });
                self.start_piece(pending, weights, &tensor, &places, &layout, first, numel, chunk, ticket)?;
            }
        }
        // Last: it may fail, and the updates are taken.
        match weights {
            Some(weights) if !weights.files.is_empty() => self.read_files(weights, ticket),
            _ => Ok(()),
        }
    }

    /// Where a tensor's values lie and where its new ones go.
    fn places(&self, weights: Option<&UnitWeights>, tensor: &UpdateTensor) -> Result<Places> {
        let of_weights = weights.map(|weights| {
            let found = weights.tensors.iter().find(|part| part.offset == tensor.weight_offset);
            found.expect("an update is of one of the unit's tensors").tensor
        });
        let weights = of_weights.map(|id| self.store.rewrite(id)).transpose()?;
        let planes = tensor.planes.iter().map(|state| self.store.rewrite(state.tensor));
        let planes: Vec<Rewrite> = planes.collect::<std::result::Result<_, _>>()?;
        let targets = Targets {
            weights: weights.as_ref().map(|place| place.target),
            planes: planes.iter().map(|place| place.target).collect(),
        };
        Ok(Places { weights: weights.map(|place| place.source), planes, targets: Arc::new(targets) })
    }

    /// Reads weights that no update touches.
    fn read_weights(&self, lease: &Arc<Lease>, tensor: &UnitTensor, ticket: &Ticket) {
        let buffer = LeaseSlice::new(Arc::clone(lease), tensor.offset, tensor.bytes);
        let read = ticket.ready.begin();
        let done =
            Box::new(move |result: std::result::Result<(), _>| read.end(result.map_err(OptimError::from)));
        self.store.transfer(Operation::Read, self.store.current(tensor.tensor), 0, buffer, done);
    }

    fn read_files(&self, weights: &UnitWeights, ticket: &Ticket) -> Result<()> {
        let reader = match self.files.get() {
            Some(reader) => reader,
            None => {
                let reader = FileReader::new()?;
                self.files.get_or_init(|| reader)
            }
        };
        for part in &*weights.files {
            let buffer = LeaseSlice::new(Arc::clone(&weights.lease), part.offset, part.bytes);
            reader.read(part, &buffer, || ticket.ready.begin());
        }
        Ok(())
    }

    fn slot(&self) -> Result<Arc<Lease>> {
        let slot = self.slots.lease(self.slot_bytes, Duration::from_secs(PATIENCE_SECONDS))?;
        slot.map(Arc::new).ok_or(OptimError::Stalled { seconds: PATIENCE_SECONDS })
    }

    #[allow(clippy::too_many_arguments)]
    fn start_piece(
        &self,
        pending: &Arc<Pending>,
        weights: Option<&UnitWeights>,
        tensor: &Arc<UpdateTensor>,
        places: &Places,
        layout: &SlotLayout,
        first: usize,
        numel: usize,
        gradient_chunk: Option<Chunk>,
        ticket: &Ticket,
    ) -> Result<()> {
        let update = pending.begin();
        let slot = match self.slot() {
            Ok(slot) => slot,
            Err(error) => {
                // Half-updated, the unit on the SSD must not be taken for whole.
                update.end(Err(error.clone()));
                return Err(error);
            }
        };
        let areas = Areas::new(slot, tensor, layout, numel);
        let element = tensor.dtype.bytes();
        let mut reads: Vec<(Extent, usize, LeaseSlice)> = Vec::new();
        for ((state, area), place) in tensor.planes.iter().zip(&areas.planes).zip(&places.planes) {
            if state.written {
                reads.push((place.source, state.plane.span(first, numel).start, area.clone()));
            } else {
                // SAFETY: the slot is fresh: nobody else knows it yet.
                unsafe { area.as_mut_slice() }.fill(0);
            }
        }
        if let (SourcePlace::Chunks { extent, .. }, Some(Chunk::Ssd)) =
            (&tensor.gradient.place, &gradient_chunk)
        {
            reads.push((*extent, first * element, areas.gradient.clone()));
        }
        let weights = weights.zip(places.weights).map(|(weights, source)| {
            let offset = tensor.weight_offset + first * element;
            let bytes = round_up_to_page(numel * element);
            let range = LeaseSlice::new(Arc::clone(&weights.lease), offset, bytes);
            reads.push((source, first * element, range.clone()));
            range
        });
        let work = Work {
            tensor: Arc::clone(tensor),
            first,
            numel,
            areas,
            weights,
            targets: Arc::clone(&places.targets),
            gradient_chunk,
            pending: Arc::clone(pending),
            update,
            ready: ticket.ready.begin(),
        };
        let join = Arc::new(Reads {
            left: AtomicUsize::new(reads.len() + 1),
            outcome: Mutex::new((None, Some(work))),
            computed: self.computed.clone(),
        });
        for (extent, offset, buffer) in reads {
            let join = Arc::clone(&join);
            let done = Box::new(move |result: std::result::Result<(), _>| {
                join.ended(result.map_err(OptimError::from));
            });
            self.store.transfer(Operation::Read, extent, offset as u64, buffer, done);
        }
        join.ended(Ok(()));
        Ok(())
    }
}
