//! Counters of a pool: requests served, bytes live, bytes leased.

/// Counters of one pool since the pool was made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PoolCounters {
    /// Requests served at once.
    pub hits: u64,
    /// Requests served after waiting for a return.
    pub waits: u64,
    /// Requests refused because no buffer was free.
    pub refusals: u64,
    /// Bytes asked for by the live leases.
    pub live_bytes: usize,
    /// Highest value of `live_bytes`.
    pub live_bytes_max: usize,
    /// Bytes of the live leases' buffers, which may be larger than the requests.
    pub leased_bytes: usize,
    /// Bytes of buffers whose lease was dropped and whose fences are not done.
    pub fenced_bytes: usize,
    /// Bytes of memory in the pool's share of the arena; only addresses are not counted.
    pub reserved_bytes: usize,
    /// Of these, bytes that are given back to the system when their leases and fences end.
    pub leaving_bytes: usize,
}

impl PoolCounters {
    /// Bytes wasted inside live leases: by how much their buffers exceed the requests.
    pub fn waste_bytes(&self) -> usize {
        self.leased_bytes - self.live_bytes
    }
}

/// One size class of an arena at the moment when the live bytes of all pools together were highest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClassAtPeak {
    /// Bytes of one buffer.
    pub bytes: usize,
    /// How many buffers.
    pub count: usize,
    /// Bytes asked for by the live leases at that moment.
    pub live_bytes_at_peak: usize,
}
