//! Runs jobs: units read into their leases, and updated on the way where a step is due.

mod arriving;
mod compute;
mod coordinator;
mod groups;
mod part;
mod piece;
mod resident_states;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_channel::{Sender, unbounded};
use memascend_kernels::GRADIENT_BLOCK;
use memascend_mem::{LeaseSlice, Origin, Pool};
use memascend_nvme::Recorder;
use memascend_store::{Store, TensorId};

use self::arriving::ArrivedChunk;
pub use self::arriving::ArrivingUpdate;
use self::compute::compute;
use self::coordinator::Coordinator;
use self::groups::Groups;
use self::part::PartRead;
pub use self::part::write_part;
use self::piece::UpdatePiece;
pub use self::resident_states::ResidentStates;
use crate::{ExecError, InFlight, InFlightCounter, Result, UnitWeights, UpdateTensor};

/// A job under way.
pub struct Ticket {
    ready: Arc<InFlightCounter>,
    groups: Vec<Arc<InFlightCounter>>,
}

impl Ticket {
    /// Waits until the unit's (updated) weights are in the lease. Write-back may still be under
    /// way; the unit's [`InFlightCounter`] counts it.
    pub fn wait(&self) -> Result<()> {
        self.ready.wait()
    }

    /// Whether [`Ticket::wait`] would return at once.
    pub fn is_ready(&self) -> bool {
        self.ready.is_idle()
    }

    /// The groups of elements whose updated weights are counted by themselves: each is idle when all
    /// of its weights are written. See [`Executor::update_in_groups`].
    pub fn groups(&self) -> &[Arc<InFlightCounter>] {
        &self.groups
    }
}

/// Reads units, and updates them on the way if a step is due, in a pipeline over a bounded number
/// of slots: while one chunk is computed, the next are read and the previous ones are written.
pub struct Executor {
    jobs: Option<Sender<Job>>,
    threads: Vec<JoinHandle<()>>,
    compute_threads: usize,
    chunk_elements: usize,
    busy: Arc<Busy>,
    origin: Origin,
}

/// Counters of the kernels.
#[derive(Default)]
struct Busy {
    /// For how long they ran, over all threads.
    nanos: AtomicU64,
    recorder: Recorder,
}

struct Job {
    pending: Arc<InFlightCounter>,
    order: Order,
    ticket: Arc<Ticket>,
    ready: InFlight,
}

enum Order {
    Fetch {
        weights: Option<UnitWeights>,
        updates: Vec<UpdateTensor>,
        groups: Option<Groups>,
        /// Other jobs of the unit under way are of other tensors.
        beside: bool,
    },
    Arrived(ArrivedChunk),
    Part(PartRead),
    /// Each tensor keeps no more in memory than so many bytes.
    Release(Vec<(TensorId, u64)>),
}

impl Executor {
    /// Starts the coordinator and `compute_threads` kernel threads. `slots` holds buffers of
    /// `slot_bytes` bytes, each for the states and the gradient of a piece of a tensor, and for its
    /// weights if the unit has no lease. A piece is
    /// a chunk of `chunk_elements` elements, as in [`Gradients`](crate::Gradients); if a slot does
    /// not hold that, it is a half of the chunk, or a quarter, and so on. `kept` is memory for states
    /// that stay there.
    ///
    /// # Errors
    /// If the system starts no thread.
    ///
    /// # Panics
    /// If `chunk_elements` is not a multiple of [`GRADIENT_BLOCK`].
    pub fn new(
        store: Arc<Store>,
        slots: Pool,
        slot_bytes: usize,
        chunk_elements: usize,
        compute_threads: usize,
        kept: Option<ResidentStates>,
    ) -> Result<Self> {
        assert!(
            chunk_elements > 0 && chunk_elements.is_multiple_of(GRADIENT_BLOCK),
            "chunks are whole gradient blocks"
        );
        let (jobs, accepted) = unbounded::<Job>();
        let (computed, work) = unbounded::<UpdatePiece>();
        let mut threads = Vec::new();
        let compute_threads = compute_threads.max(1);
        let busy = Arc::<Busy>::default();
        for index in 0..compute_threads {
            let (work, store, busy) = (work.clone(), Arc::clone(&store), Arc::clone(&busy));
            threads.push(spawn(format!("memascend-update-{index}"), move || {
                for work in work {
                    compute(&store, work, &busy);
                }
            })?);
        }
        let files = OnceLock::new();
        let coordinator = Coordinator { store, slots, slot_bytes, chunk_elements, kept, computed, files };
        threads.push(spawn("memascend-executor".into(), move || {
            for job in accepted {
                coordinator.run(job);
            }
        })?);
        Ok(Self { jobs: Some(jobs), threads, compute_threads, chunk_elements, busy, origin: Origin::here() })
    }

    /// How long the kernels have run so far: the mean of the kernel threads.
    pub fn busy(&self) -> Duration {
        Duration::from_nanos(self.busy.nanos.load(Ordering::Relaxed) / self.compute_threads as u64)
    }

    /// Recorder of the times of kernels.
    pub fn recorder(&self) -> &Recorder {
        &self.busy.recorder
    }

    /// Starts reading `weights`, applying `updates` on the way; without a lease only updated tensors are
    /// read, into the update slots. Without `weights`, and for tensors whose segments name their addresses,
    /// the updates run on host memory. Waits first for the operations that `pending` counts: earlier
    /// write-back of the same unit and spills of its gradients.
    pub fn fetch(
        &self,
        pending: Arc<InFlightCounter>,
        weights: Option<UnitWeights>,
        updates: Vec<UpdateTensor>,
    ) -> Arc<Ticket> {
        self.send(pending, Order::Fetch { weights, updates, groups: None, beside: false })
    }

    /// As [`Executor::fetch`] of tensors with which no other job of the unit under way has to do: it
    /// waits for none of them. Earlier write-back of these tensors has ended.
    pub fn update_beside(
        &self,
        pending: Arc<InFlightCounter>,
        weights: UnitWeights,
        updates: Vec<UpdateTensor>,
    ) -> Arc<Ticket> {
        self.send(pending, Order::Fetch { weights: Some(weights), updates, groups: None, beside: true })
    }

    /// Prepares the update of one tensor, whose gradient is yet to arrive in chunks of
    /// [`Gradients`](crate::Gradients). The gradient that `update` names counts for nothing. The first
    /// chunk waits as [`Executor::fetch`] does, with `beside` as [`Executor::update_beside`] does. The
    /// ticket is ready once all chunks have arrived and are computed.
    pub fn update_arriving(
        &self,
        pending: Arc<InFlightCounter>,
        weights: UnitWeights,
        update: UpdateTensor,
        beside: bool,
    ) -> (Arc<Ticket>, ArrivingUpdate) {
        let jobs = self.jobs.clone().expect("open until dropped");
        ArrivingUpdate::new(jobs, pending, weights, update, self.chunk_elements, beside)
    }

    /// As [`Executor::fetch`] without a lease, for one tensor, whose weights can be read while the update
    /// goes on: each group of `elements` elements once the ticket's group is idle.
    ///
    /// # Panics
    /// If `elements` is 0.
    pub fn update_in_groups(
        &self,
        pending: Arc<InFlightCounter>,
        weights: UnitWeights,
        update: UpdateTensor,
        elements: usize,
    ) -> Arc<Ticket> {
        let groups = Some(Groups::new(update.numel, elements));
        self.send(
            pending,
            Order::Fetch { weights: Some(weights), updates: vec![update], groups, beside: false },
        )
    }

    /// Starts reading bytes of a tensor's current value, from `offset` on, into `buffer`. Waits
    /// first as [`Executor::fetch`] does, and an update of the unit waits for the read. The error of
    /// the read is the ticket's alone.
    ///
    /// The range is in the tensor and begins at a page.
    pub fn read_part(
        &self,
        pending: Arc<InFlightCounter>,
        tensor: TensorId,
        offset: u64,
        buffer: LeaseSlice,
    ) -> Arc<Ticket> {
        let reading = pending.ask_read();
        self.send(pending, Order::Part(PartRead { tensor, offset, buffer, reading }))
    }

    /// As [`Executor::read_part`], of bytes that are known to be written: waits for nothing.
    pub fn read_written(
        store: &Store,
        pending: &Arc<InFlightCounter>,
        tensor: TensorId,
        offset: u64,
        buffer: LeaseSlice,
    ) -> Arc<Ticket> {
        let ticket = Arc::new(Ticket { ready: Arc::default(), groups: Vec::new() });
        PartRead { tensor, offset, buffer, reading: pending.ask_read() }.start(store, &ticket);
        ticket
    }

    /// Shrinks the resident part of each tensor's states to so many bytes, rounded up to a page. Bytes that
    /// only memory has are written. Waits first as [`Executor::fetch`] does, and later jobs of the unit wait
    /// for the writes, which the ticket counts too: when it is ready, the buffers have returned. A commit has
    /// to wait for the ticket.
    ///
    /// An update may keep more again, unless its [`UpdateTensor::kept_elements`] are fewer.
    pub fn release_states(
        &self,
        pending: Arc<InFlightCounter>,
        tensors: Vec<(TensorId, u64)>,
    ) -> Arc<Ticket> {
        self.send(pending, Order::Release(tensors))
    }

    fn send(&self, pending: Arc<InFlightCounter>, order: Order) -> Arc<Ticket> {
        let groups = match &order {
            Order::Fetch { groups: Some(groups), .. } => groups.pending(),
            _ => Vec::new(),
        };
        let ticket = Arc::new(Ticket { ready: Arc::default(), groups });
        let job = Job { pending, order, ticket: Arc::clone(&ticket), ready: ticket.ready.begin() };
        if let Err(refused) = self.jobs.as_ref().expect("open until dropped").send(job) {
            refused.0.ready.end(Err(ExecError::Closed));
        }
        ticket
    }
}

impl Drop for Executor {
    fn drop(&mut self) {
        // A forked child has no such threads.
        if !self.origin.is_here() {
            return;
        }
        self.jobs = None;
        // The coordinator is last: when it ends, its channel closes and the kernel threads follow.
        for thread in self.threads.drain(..).rev() {
            let _ = thread.join();
        }
    }
}

fn spawn(name: String, run: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>> {
    std::thread::Builder::new().name(name).spawn(run).map_err(ExecError::no_thread)
}
