//! Updates of tensors whose gradients arrive chunk by chunk.
//!
//! Each chunk is a job of its own, so fetches of other units go between the chunks. The first chunk asks the
//! store for the tensor's next extent. A gradient that does not arrive completely fails the unit, since a
//! part of the tensor may have been updated.

use std::sync::{Arc, OnceLock};

use crossbeam_channel::Sender;
use memascend_kernels::ChannelFactors;
use memascend_mem::Lease;

use super::piece::{SlotLayout, SourceExtents};
use super::{Job, Order, Ticket};
use crate::gradients::{GradientSource, SourcePlace};
use crate::{ExecError, InFlight, InFlightCounter, Result, UnitWeights, UpdateTensor};

/// An update that waits for its gradient: each chunk is taken over as it arrives, and returned to its
/// pool once it is used. Dropping it before the last chunk fails the unit.
pub struct ArrivingUpdate {
    jobs: Sender<Job>,
    pending: Arc<InFlightCounter>,
    arriving: Arc<Arriving>,
    ticket: Arc<Ticket>,
    chunk_bytes: usize,
    /// Held until the last chunk has been taken over.
    whole: Option<InFlight>,
}

/// State shared by the chunks of one update.
pub(super) struct Arriving {
    pub(super) weights: UnitWeights,
    pub(super) tensor: Arc<UpdateTensor>,
    /// Other jobs of the unit under way are of other tensors.
    pub(super) beside: bool,
    /// Set with the first chunk.
    pub(super) begun: OnceLock<Begun>,
}

/// Where a tensor under update is read from and written to, and how its pieces are cut.
pub(super) struct Begun {
    pub(super) extents: SourceExtents,
    pub(super) layout: SlotLayout,
}

/// A chunk of a gradient that has arrived.
pub(super) struct ArrivedChunk {
    pub(super) arriving: Arc<Arriving>,
    pub(super) index: usize,
    pub(super) chunk: Arc<Lease>,
}

impl ArrivingUpdate {
    pub(super) fn new(
        jobs: Sender<Job>,
        pending: Arc<InFlightCounter>,
        weights: UnitWeights,
        mut tensor: UpdateTensor,
        chunk_elements: usize,
        beside: bool,
    ) -> (Arc<Ticket>, Self) {
        let ticket = Arc::new(Ticket { ready: Arc::default(), groups: Vec::new() });
        let chunk_bytes = chunk_elements * tensor.dtype.bytes();
        tensor.gradient = GradientSource { place: SourcePlace::Arriving { chunk_elements }, rounded: false };
        let arriving = Arriving { weights, tensor: Arc::new(tensor), beside, begun: OnceLock::new() };
        let whole = Some(ticket.ready.begin());
        let update = Self {
            jobs,
            pending,
            arriving: Arc::new(arriving),
            ticket: Arc::clone(&ticket),
            chunk_bytes,
            whole,
        };
        (ticket, update)
    }

    /// Bytes of a chunk of the gradient; the last one may have fewer.
    pub(crate) fn chunk_bytes(&self) -> usize {
        self.chunk_bytes
    }

    /// Gives every segment the factors of its matrix's channels, before the first chunk.
    ///
    /// # Panics
    /// If a chunk has arrived.
    pub(crate) fn set_factors(&mut self, factors: &Arc<ChannelFactors>) {
        let arriving = Arc::get_mut(&mut self.arriving).expect("no chunk has arrived");
        let tensor = Arc::get_mut(&mut arriving.tensor).expect("no chunk has arrived");
        tensor.segments.iter_mut().for_each(|segment| segment.factors = Some(Arc::clone(factors)));
    }

    /// Starts updating the elements of chunk number `index` of the gradient, in which its values are.
    ///
    /// # Errors
    /// The first failure of the unit: no further chunk is of use.
    pub(crate) fn arrived(&self, index: usize, chunk: Arc<Lease>) -> Result<()> {
        self.pending.check()?;
        let order = Order::Arrived(ArrivedChunk { arriving: Arc::clone(&self.arriving), index, chunk });
        let (pending, ticket) = (Arc::clone(&self.pending), Arc::clone(&self.ticket));
        let job = Job { pending, order, ticket, ready: self.ticket.ready.begin() };
        if let Err(refused) = self.jobs.send(job) {
            refused.0.ready.end(Err(ExecError::Closed));
        }
        Ok(())
    }

    /// Says that the last chunk has arrived, or that the others never will: then a part of the tensor may
    /// be updated, so that no later job takes the unit.
    pub(crate) fn end(mut self, result: Result<()>) {
        self.finish(result);
    }

    fn finish(&mut self, result: Result<()>) {
        if let Some(whole) = self.whole.take() {
            if result.is_err() {
                self.pending.begin().end(result.clone());
            }
            whole.end(result);
        }
    }
}

impl Drop for ArrivingUpdate {
    fn drop(&mut self) {
        self.finish(Err(ExecError::Abandoned));
    }
}
