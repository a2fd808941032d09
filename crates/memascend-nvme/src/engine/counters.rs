//! Counters of an engine: bytes, requests, failures and latencies of each direction.

use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use memascend_mem::LockExt;

use crate::{Activity, Operation, Recorder};

/// Counters of an engine. A request costs two uncontended locks, cheap enough to count always.
#[derive(Debug, Default)]
pub struct Counters {
    inner: Mutex<Inner>,
    /// Every request by itself, while it is on.
    pub(crate) recorder: Recorder,
}

#[derive(Debug, Default)]
struct Inner {
    reads: Direction,
    writes: Direction,
    in_flight: usize,
    in_flight_max: usize,
    busy: Duration,
    busy_since: Option<Instant>,
}

#[derive(Debug, Default)]
struct Direction {
    bytes: u64,
    requests: u64,
    failures: u64,
    latency: Histogram,
}

impl Counters {
    /// Counts a request submitted at `now`.
    pub fn started(&self, now: Instant) {
        let mut inner = self.lock();
        inner.in_flight += 1;
        inner.in_flight_max = inner.in_flight_max.max(inner.in_flight);
        inner.busy_since.get_or_insert(now);
    }

    /// Counts the end of a request submitted at `started`.
    pub fn ended(&self, operation: Operation, bytes: usize, started: Instant, done: bool) {
        let now = Instant::now();
        let mut inner = self.lock();
        inner.in_flight -= 1;
        if inner.in_flight == 0
            && let Some(since) = inner.busy_since.take()
        {
            inner.busy += now.saturating_duration_since(since);
        }
        let direction = match operation {
            Operation::Read => &mut inner.reads,
            Operation::Write => &mut inner.writes,
        };
        if done {
            direction.bytes += bytes as u64;
            direction.requests += 1;
            direction.latency.add(now.saturating_duration_since(started));
        } else {
            direction.failures += 1;
        }
        drop(inner);
        let activity = match operation {
            Operation::Read => Activity::Read,
            Operation::Write => Activity::Write,
        };
        self.recorder.note(activity, bytes, started);
    }

    /// The values now.
    pub fn snapshot(&self) -> CountersSnapshot {
        let inner = self.lock();
        let running = inner.busy_since.map_or(Duration::ZERO, |since| since.elapsed());
        CountersSnapshot {
            reads: inner.reads.snapshot(),
            writes: inner.writes.snapshot(),
            in_flight: inner.in_flight,
            in_flight_max: inner.in_flight_max,
            busy: inner.busy + running,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.locked()
    }
}

impl Direction {
    fn snapshot(&self) -> DirectionSnapshot {
        DirectionSnapshot {
            bytes: self.bytes,
            requests: self.requests,
            failures: self.failures,
            latency_p50: self.latency.quantile(0.50),
            latency_p99: self.latency.quantile(0.99),
            latency_max: self.latency.max,
            latency_sum: self.latency.sum,
        }
    }
}

/// Values of [`Counters`] at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CountersSnapshot {
    /// Transfers from the volume.
    pub reads: DirectionSnapshot,
    /// Transfers to the volume.
    pub writes: DirectionSnapshot,
    /// Requests submitted and not ended.
    pub in_flight: usize,
    /// Highest value of `in_flight`.
    pub in_flight_max: usize,
    /// How long at least one request was in flight.
    pub busy: Duration,
}

impl CountersSnapshot {
    /// Bytes moved in both directions, per second in which a request was in flight. 0 before the
    /// first request.
    pub fn bytes_per_busy_second(&self) -> f64 {
        let seconds = self.busy.as_secs_f64();
        if seconds > 0.0 { (self.reads.bytes + self.writes.bytes) as f64 / seconds } else { 0.0 }
    }

    /// Mean number of requests in flight while there was any (Little's law: the sum of latencies
    /// over the time).
    pub fn in_flight_mean(&self) -> f64 {
        let seconds = self.busy.as_secs_f64();
        let sum = self.reads.latency_sum + self.writes.latency_sum;
        if seconds > 0.0 { sum.as_secs_f64() / seconds } else { 0.0 }
    }
}

/// The counters of one direction. Latencies are of successful requests, from submission to
/// completion. Quantiles are exact to within 7 %.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DirectionSnapshot {
    /// Bytes moved.
    pub bytes: u64,
    /// Requests that succeeded.
    pub requests: u64,
    /// Requests that failed.
    pub failures: u64,
    /// Half of the requests took no longer.
    pub latency_p50: Duration,
    /// 99 of 100 requests took no longer.
    pub latency_p99: Duration,
    /// The slowest request.
    pub latency_max: Duration,
    /// All latencies together.
    pub latency_sum: Duration,
}

/// Sub-buckets to a power of two, as a shift.
const FINE: u32 = 3;
const BUCKETS: usize = 64 << FINE;

/// Durations in buckets that grow by powers of two, eight to each.
pub(crate) struct Histogram {
    counts: Box<[u64; BUCKETS]>,
    count: u64,
    max: Duration,
    sum: Duration,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { counts: Box::new([0; BUCKETS]), count: 0, max: Duration::ZERO, sum: Duration::ZERO }
    }
}

impl std::fmt::Debug for Histogram {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Histogram").field("count", &self.count).field("max", &self.max).finish()
    }
}

impl Histogram {
    pub(crate) fn add(&mut self, latency: Duration) {
        let nanos = u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX);
        self.counts[bucket(nanos)] += 1;
        self.count += 1;
        self.sum += latency;
        self.max = self.max.max(latency);
    }

    pub(crate) fn max(&self) -> Duration {
        self.max
    }

    /// The duration that a part `share` of the durations does not exceed; 0 if there are none.
    pub(crate) fn quantile(&self, share: f64) -> Duration {
        let rank = ((self.count as f64 * share).ceil() as u64).max(1);
        let mut seen = 0;
        for (index, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= rank {
                return Duration::from_nanos(middle(index)).min(self.max);
            }
        }
        Duration::ZERO
    }
}

fn bucket(nanos: u64) -> usize {
    if nanos < 1 << FINE {
        return nanos as usize;
    }
    let exponent = nanos.ilog2();
    let fine = (nanos >> (exponent - FINE)) & ((1 << FINE) - 1);
    (((exponent - FINE + 1) as usize) << FINE) + fine as usize
}

/// The middle of a bucket.
fn middle(index: usize) -> u64 {
    let (coarse, fine) = ((index >> FINE) as u32, (index & ((1 << FINE) - 1)) as u64);
    if coarse == 0 {
        return fine;
    }
    let width = 1_u64 << (coarse - 1);
    ((1_u64 << FINE) + fine) * width + width / 2
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_bucket_is_within_seven_percent_of_what_it_holds(nanos in 1_u64..1 << 50) {
            let told = middle(bucket(nanos));
            prop_assert!((told as f64 / nanos as f64 - 1.0).abs() <= 0.07, "{} for {}", told, nanos);
        }
    }

    #[test]
    fn quantiles_and_sums_are_of_what_was_added() {
        let mut histogram = Histogram::default();
        for micros in 1..=1000 {
            histogram.add(Duration::from_micros(micros));
        }
        let close = |told: Duration, micros: f64| (told.as_secs_f64() * 1e6 / micros - 1.0).abs() < 0.08;
        assert!(close(histogram.quantile(0.5), 500.0), "{:?}", histogram.quantile(0.5));
        assert!(close(histogram.quantile(0.99), 990.0), "{:?}", histogram.quantile(0.99));
        assert_eq!(histogram.max, Duration::from_millis(1));
        assert_eq!(histogram.sum, Duration::from_micros(500_500));
        assert_eq!(Histogram::default().quantile(0.5), Duration::ZERO);
    }

    #[test]
    fn the_time_without_requests_does_not_count() {
        let counters = Counters::default();
        for _ in 0..2 {
            let now = Instant::now();
            counters.started(now);
            counters.started(now);
            assert_eq!(counters.snapshot().in_flight, 2);
            counters.ended(Operation::Read, 4096, now, true);
            counters.ended(Operation::Write, 8192, now, false);
        }
        let busy = counters.snapshot().busy;
        std::thread::sleep(Duration::from_millis(5));
        let now = counters.snapshot();
        assert_eq!(now.busy, busy);
        assert_eq!((now.reads.bytes, now.reads.requests, now.reads.failures), (8192, 2, 0));
        assert_eq!((now.writes.bytes, now.writes.requests, now.writes.failures), (0, 0, 2));
        assert_eq!((now.in_flight, now.in_flight_max), (0, 2));
    }
}
