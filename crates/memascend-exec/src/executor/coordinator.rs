//! Starts jobs in order, piece by piece, as update slots come free.

use std::ops::Range;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use crossbeam_channel::Sender;
use memascend_mem::{Lease, LeaseSlice, PAGE_BYTES, Pool, round_up_to_page};
use memascend_nvme::Operation;
use memascend_store::{Extent, Rewrite, Store, TensorId};

use super::arriving::{ArrivedChunk, Begun};
use super::groups::Groups;
use super::piece::{
    Areas, PieceReads, PlaneArea, SlotAreas, SlotLayout, SourceExtents, TargetExtents, UpdatePiece,
};
use super::resident_states::ResidentStates;
use super::{Job, Order, Ticket};
use crate::files::{FilePart, FileReader};
use crate::gradients::{Chunk, SourcePlace};
use crate::{ExecError, InFlight, InFlightCounter, Result, UnitTensor, UnitWeights, UpdateTensor};

/// How long an update slot may take to come free before the drive counts as hung, in seconds.
const PATIENCE_SECONDS: u64 = 120;

pub(super) struct Coordinator {
    pub(super) store: Arc<Store>,
    pub(super) slots: Pool,
    pub(super) slot_bytes: usize,
    pub(super) chunk_elements: usize,
    /// Memory for resident states, if there is any.
    pub(super) kept: Option<ResidentStates>,
    pub(super) computed: Sender<UpdatePiece>,
    /// Made for the first unit that has weights outside the store.
    pub(super) files: OnceLock<FileReader>,
}

/// Extent, offset in it and buffer of a read.
type ReadInto = (Extent, usize, LeaseSlice);

/// A job that has started.
struct Started<'a> {
    pending: &'a Arc<InFlightCounter>,
    weights: Option<&'a UnitWeights>,
    ticket: &'a Ticket,
}

/// A piece to start: elements `first .. first + numel` of `tensor`.
struct NewPiece<'a> {
    job: &'a Started<'a>,
    tensor: &'a Arc<UpdateTensor>,
    extents: &'a SourceExtents,
    layout: &'a SlotLayout,
    first: usize,
    numel: usize,
    /// The chunk of the gradient that holds these elements, if the gradient lies in chunks.
    gradient_chunk: Option<Chunk>,
    groups: Vec<InFlight>,
}

impl Coordinator {
    pub(super) fn run(&self, job: Job) {
        let Job { pending, order, ticket, ready } = job;
        let started = match order {
            Order::Release(tensors) => pending.wait_started_reads().map(|()| {
                tensors.into_iter().for_each(|(tensor, from)| self.release(&pending, &ticket, tensor, from));
            }),
            Order::Arrived(chunk) => self.start_arrived(&pending, &ticket, chunk),
            Order::Part(part) => pending.wait().map(|()| part.start(&self.store, &ticket)),
            Order::Fetch { weights, updates, mut groups, beside } => {
                let idle = match (beside, updates.is_empty()) {
                    (true, _) => pending.check(),
                    (false, true) => pending.wait(),
                    (false, false) => pending.wait_started_reads(),
                };
                // The lease is dropped before the end is signalled, so the waiter can reuse the
                // buffer.
                idle.and_then(|()| {
                    let job = Started { pending: &pending, weights: weights.as_ref(), ticket: &ticket };
                    self.start(&job, updates, &mut groups)
                })
            }
        };
        ready.end(started);
    }

    fn start(
        &self,
        job: &Started<'_>,
        mut updates: Vec<UpdateTensor>,
        groups: &mut Option<Groups>,
    ) -> Result<()> {
        updates.sort_by_key(|tensor| tensor.weight_offset);
        if let Some((weights, lease)) =
            job.weights.and_then(|weights| weights.lease.as_ref().map(|lease| (weights, lease)))
        {
            let updated: Vec<usize> = updates.iter().map(|tensor| tensor.weight_offset).collect();
            for tensor in &weights.tensors {
                if updated.binary_search(&tensor.offset).is_err() {
                    self.read_weights(lease, tensor, weights.resident, job.ticket);
                }
            }
        }
        for tensor in updates {
            self.start_tensor(job, tensor, groups)?;
        }
        // External files come last: their reads may fail, and by now every update has been taken.
        match job.weights {
            Some(UnitWeights { files, lease: Some(lease), .. }) if !files.is_empty() => {
                self.read_files(files, lease, job.ticket)
            }
            _ => Ok(()),
        }
    }

    /// Starts the update of a tensor, piece by piece.
    fn start_tensor(
        &self,
        job: &Started<'_>,
        mut tensor: UpdateTensor,
        groups: &mut Option<Groups>,
    ) -> Result<()> {
        let begun = self.begin_tensor(job, &tensor)?;
        // Each chunk of the gradient goes with its last piece, and returns to the pool as soon as
        // it is consumed.
        let mut gradient_chunks = match &mut tensor.gradient.place {
            SourcePlace::Chunks { chunks, .. } => std::mem::take(chunks),
            SourcePlace::Packed { .. } | SourcePlace::Addresses | SourcePlace::Arriving { .. } => Vec::new(),
        };
        let all = 0..tensor.numel;
        self.start_pieces(job, &Arc::new(tensor), &begun, all, &mut gradient_chunks, groups)
    }

    /// Starts the update of the elements whose gradient has arrived in a chunk.
    fn start_arrived(
        &self,
        pending: &Arc<InFlightCounter>,
        ticket: &Ticket,
        arrived: ArrivedChunk,
    ) -> Result<()> {
        let ArrivedChunk { arriving, index, chunk } = arrived;
        let (tensor, first) = (&arriving.tensor, index * self.chunk_elements);
        let job = Started { pending, weights: Some(&arriving.weights), ticket };
        let begun = if let Some(begun) = arriving.begun.get() {
            pending.check()?;
            begun
        } else {
            if arriving.beside {
                pending.check()?
            } else {
                pending.wait_started_reads()?
            }
            let begun = self.begin_tensor(&job, tensor)?;
            arriving.begun.get_or_init(|| begun)
        };
        let elements = first..tensor.numel.min(first + self.chunk_elements);
        self.start_pieces(&job, tensor, begun, elements, &mut [Chunk::Host(chunk)], &mut None)
    }

    /// Has the store say where a tensor that is about to be updated goes.
    fn begin_tensor(&self, job: &Started<'_>, tensor: &UpdateTensor) -> Result<Begun> {
        let extents = self.extents(job.weights, tensor).inspect_err(|error| {
            // Other tensors of the unit may be updated already: record the error, so that no later
            // job reads the unit.
            job.pending.begin().end(Err(error.clone()));
        })?;
        let in_slot = extents.weights.is_some() && job.weights.is_some_and(|weights| weights.lease.is_none());
        let layout = SlotLayout::new(tensor, self.slot_bytes, self.chunk_elements, in_slot);
        Ok(Begun { extents, layout })
    }

    /// Starts the pieces of some elements of a tensor, from the start of a chunk on. `gradient_chunks` hold
    /// their gradient, if it lies in chunks.
    fn start_pieces(
        &self,
        job: &Started<'_>,
        tensor: &Arc<UpdateTensor>,
        begun: &Begun,
        elements: Range<usize>,
        gradient_chunks: &mut [Chunk],
        groups: &mut Option<Groups>,
    ) -> Result<()> {
        let Begun { extents, layout } = begun;
        for first in elements.clone().step_by(layout.elements) {
            let numel = layout.elements.min(elements.end - first);
            let chunk = (first - elements.start) / self.chunk_elements;
            let gradient_chunk = gradient_chunks.get_mut(chunk).map(|chunk| {
                let last = (first + layout.elements).is_multiple_of(self.chunk_elements);
                if last { std::mem::replace(chunk, Chunk::Empty) } else { chunk.clone() }
            });
            let groups = groups.as_mut().map_or_else(Vec::new, |groups| groups.begin(first, numel));
            self.start_piece(NewPiece {
                job,
                tensor,
                extents,
                layout,
                first,
                numel,
                gradient_chunk,
                groups,
            })?;
        }
        Ok(())
    }

    /// Where a tensor's values are read from, and where its new values go.
    fn extents(&self, weights: Option<&UnitWeights>, tensor: &UpdateTensor) -> Result<SourceExtents> {
        // Without a lease, a tensor whose segments name their addresses is not one of the unit's.
        let by_address = matches!(tensor.gradient.place, SourcePlace::Addresses);
        let weights = weights.filter(|weights| weights.lease.is_some() || !by_address);
        let weights_tensor = weights.map(|weights| {
            let unit_tensor = weights.tensors.iter().find(|part| part.offset == tensor.weight_offset);
            unit_tensor.expect("an update is of one of the unit's tensors").tensor
        });
        let weights = weights_tensor.map(|id| self.store.rewrite(id)).transpose()?;
        let planes = tensor.planes.iter().map(|state| self.store.rewrite(state.tensor));
        let planes: Vec<Rewrite> = planes.collect::<std::result::Result<_, _>>()?;
        let targets = TargetExtents {
            weights: weights.as_ref().map(|rewrite| rewrite.target),
            planes: planes.iter().map(|rewrite| rewrite.target).collect(),
        };
        Ok(SourceExtents {
            weights: weights.map(|rewrite| rewrite.source),
            planes,
            targets: Arc::new(targets),
        })
    }

    /// Reads weights that no update changes, unless they are in the lease.
    fn read_weights(&self, lease: &Arc<Lease>, tensor: &UnitTensor, resident: bool, ticket: &Ticket) {
        let buffer = LeaseSlice::new(Arc::clone(lease), tensor.offset, tensor.bytes);
        let extent = self.store.current(tensor.tensor);
        if resident && self.store.is_kept(extent, 0, &buffer) {
            return;
        }
        let read = ticket.ready.begin();
        let keep_in = resident.then(|| (Arc::clone(&self.store), buffer.clone()));
        let done = Box::new(move |result: std::result::Result<(), _>| {
            if let (Ok(()), Some((store, buffer))) = (&result, keep_in) {
                store.keep(extent, 0, buffer, true);
            }
            read.end(result.map_err(ExecError::from));
        });
        self.store.transfer(Operation::Read, extent, 0, buffer, done);
    }

    /// Evicts the bytes of a tensor after `from`.
    fn release(&self, pending: &Arc<InFlightCounter>, ticket: &Ticket, tensor: TensorId, from: u64) {
        let from = from.next_multiple_of(PAGE_BYTES as u64);
        self.store.release(self.store.current(tensor), from, || {
            let (write, ready) = (pending.begin(), ticket.ready.begin());
            Box::new(move |result: std::result::Result<(), _>| {
                let result = result.map_err(ExecError::from);
                write.end(result.clone());
                ready.end(result);
            })
        });
    }

    /// Reads weights that lie in external files.
    fn read_files(&self, files: &[FilePart], lease: &Arc<Lease>, ticket: &Ticket) -> Result<()> {
        let reader = match self.files.get() {
            Some(reader) => reader,
            None => {
                let reader = FileReader::new()?;
                self.files.get_or_init(|| reader)
            }
        };
        for part in files {
            let buffer = LeaseSlice::new(Arc::clone(lease), part.offset, part.bytes);
            reader.read(part, &buffer, || ticket.ready.begin());
        }
        Ok(())
    }

    /// An update slot, waiting for one to come free.
    fn slot(&self) -> Result<Arc<Lease>> {
        let slot = self.slots.lease(self.slot_bytes, Duration::from_secs(PATIENCE_SECONDS))?;
        slot.map(Arc::new).ok_or(ExecError::Stalled { seconds: PATIENCE_SECONDS })
    }

    /// Starts the reads of a piece; the last of them to end passes the piece on to the kernel
    /// threads.
    fn start_piece(&self, piece: NewPiece<'_>) -> Result<()> {
        let update = piece.job.pending.begin();
        let (areas, mut reads) = match self.areas(&piece) {
            Ok(areas) => areas,
            Err(error) => {
                // Other pieces may be updated already: record the error, so that no later job reads
                // the unit.
                update.end(Err(error.clone()));
                return Err(error);
            }
        };
        let NewPiece { job, tensor, extents, first, numel, gradient_chunk, groups, .. } = piece;
        let element = tensor.dtype.bytes();
        let weights = job.weights.zip(extents.weights).map(|(weights, source)| {
            let in_lease = |lease: &Arc<Lease>| {
                let offset = tensor.weight_offset + first * element;
                LeaseSlice::new(Arc::clone(lease), offset, round_up_to_page(numel * element))
            };
            let in_slot = || areas.slot.as_ref().and_then(|slot| slot.weights.clone());
            let range = weights.lease.as_ref().map(in_lease).or_else(in_slot);
            let range = range.expect("weights without a lease have an area of the slot");
            let offset = first * element;
            if weights.resident && self.store.is_kept(source, offset as u64, &range) {
                self.store.forget_kept(source, offset as u64, range.bytes());
            } else {
                reads.push((source, offset, range.clone()));
            }
            range
        });
        let weights_resident = job.weights.is_some_and(|weights| weights.resident && weights.lease.is_some());
        let weights_written =
            tensor.write_through || job.weights.is_some_and(|weights| weights.write_through);
        let (tensor, targets) = (Arc::clone(tensor), Arc::clone(&extents.targets));
        let (pending, ready) = (Arc::clone(job.pending), job.ticket.ready.begin());
        let piece = UpdatePiece {
            tensor,
            first,
            numel,
            areas,
            weights,
            weights_resident,
            weights_written,
            targets,
            gradient_chunk,
            pending,
            groups,
            update,
            ready,
        };
        self.submit_reads(reads, piece);
        Ok(())
    }

    /// The memory of a piece, and its reads: states, and a spilled gradient. A
    /// slot is taken only by a piece that needs it.
    fn areas(&self, piece: &NewPiece<'_>) -> Result<(Areas, Vec<ReadInto>)> {
        let NewPiece { job, tensor, extents, layout, first, numel, gradient_chunk, .. } = piece;
        let (first, numel) = (*first, *numel);
        let resident = first + numel <= tensor.kept_elements;
        let mut slot: Option<Arc<Lease>> = None;
        let mut slot_once = || -> Result<Arc<Lease>> {
            if slot.is_none() {
                slot = Some(self.slot()?);
            }
            Ok(Arc::clone(slot.as_ref().expect("set above")))
        };
        let spilled = matches!(
            (&tensor.gradient.place, gradient_chunk),
            (SourcePlace::Chunks { .. }, Some(Chunk::Ssd))
        );
        let weights_in_slot =
            extents.weights.is_some() && job.weights.is_some_and(|weights| weights.lease.is_none());
        let mut rest = None;
        if spilled || tensor.gradient.rounded || weights_in_slot {
            rest = Some(SlotAreas::new(&slot_once()?, tensor, layout, numel));
        }
        let mut reads: Vec<ReadInto> = Vec::new();
        let mut planes = Vec::with_capacity(tensor.planes.len());
        let spans = tensor.planes.iter().zip(&extents.planes).map(|(state, place)| {
            let span = state.plane.span(first, numel);
            let (offset, bytes) = (span.start, round_up_to_page(span.len()));
            (offset, bytes, self.store.take_kept(place.source, offset as u64, bytes))
        });
        let spans: Vec<_> = spans.collect();
        let new = spans.iter().filter(|(_, _, here)| here.is_none()).map(|(_, bytes, _)| *bytes);
        let mut rooms = match &self.kept {
            Some(kept) if resident => kept.take(&new.collect::<Vec<_>>())?.into_iter(),
            _ => Vec::new().into_iter(),
        };
        for (index, (state, (offset, bytes, here))) in tensor.planes.iter().zip(spans).enumerate() {
            if let Some(buffer) = here {
                planes.push(PlaneArea { buffer, resident });
                continue;
            }
            let place = &extents.planes[index];
            let (buffer, resident) = match rooms.next().flatten() {
                Some(buffer) => (buffer, true),
                None => (SlotAreas::plane(&slot_once()?, layout, index, bytes), false),
            };
            if state.written {
                reads.push((place.source, offset, buffer.clone()));
            } else {
                // SAFETY: the memory is fresh, so no other thread knows the area.
                unsafe { buffer.as_mut_slice() }.fill(0);
            }
            planes.push(PlaneArea { buffer, resident });
        }
        if let (Some(rest), SourcePlace::Chunks { extent, .. }, true) =
            (&rest, &tensor.gradient.place, spilled)
        {
            let kept = if tensor.gradient.rounded { size_of::<u16>() } else { tensor.dtype.bytes() };
            reads.push((*extent, first * kept, rest.spilled.clone()));
        }
        Ok((Areas { planes, slot: rest }, reads))
    }

    /// Submits the reads of `piece`.
    fn submit_reads(&self, reads: Vec<ReadInto>, piece: UpdatePiece) {
        // One more than there are reads, so that the piece is not passed on before all of them are
        // submitted.
        let join = Arc::new(PieceReads {
            left: AtomicUsize::new(reads.len() + 1),
            outcome: Mutex::new((None, Some(piece))),
            computed: self.computed.clone(),
        });
        for (extent, offset, buffer) in reads {
            let join = Arc::clone(&join);
            let done = Box::new(move |result: std::result::Result<(), _>| {
                join.ended(result.map_err(ExecError::from));
            });
            let bytes = buffer.bytes();
            self.store.transfer(Operation::Read, extent, offset as u64, buffer, done);
            // The update runs where some of it may be resident: resident bytes are no longer the old value.
            self.store.forget_kept(extent, offset as u64, bytes);
        }
        join.ended(Ok(()));
    }
}
