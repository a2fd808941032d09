//! What a pool has done so far.

/// What the pool has done so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PoolCounters {
    /// Requests served at once.
    pub hits: u64,
    /// Requests served after waiting for a return.
    pub waits: u64,
    /// Requests that found nothing free and were told so.
    pub refusals: u64,
    /// Bytes asked for by the live leases.
    pub live_bytes: usize,
    /// Highest value of `live_bytes`.
    pub live_bytes_max: usize,
    /// Bytes of the live leases' buffers, which are never smaller than what was asked for.
    pub leased_bytes: usize,
    /// Bytes of buffers that were dropped while a fence still holds them.
    pub fenced_bytes: usize,
    /// Bytes of the pool's share of the arena.
    pub reserved_bytes: usize,
}

impl PoolCounters {
    /// Bytes lost inside live leases: what their buffers are larger than the requests.
    pub fn waste_bytes(&self) -> usize {
        self.leased_bytes - self.live_bytes
    }
}

/// One size class of an arena when the live bytes of all its pools together were highest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClassAtPeak {
    /// Bytes of one buffer.
    pub bytes: usize,
    /// How many buffers.
    pub count: usize,
    /// Bytes asked for by the live leases at that moment.
    pub live_bytes_at_peak: usize,
}
