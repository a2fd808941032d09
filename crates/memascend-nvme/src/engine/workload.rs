//! A measuring workload: requests of one size at a constant depth.

use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use memascend_mem::{LeaseSlice, LockExt, Pool, WaitExt};

use crate::engine::counters::Histogram;
use crate::{Completion, Engine, IoError, Operation, Request, Result};

/// Requests of one size at a constant depth, which measure a volume.
#[derive(Debug, Clone, Copy)]
pub struct Workload {
    /// How many of 100 requests are reads.
    pub read_percent: u32,
    /// Whether offsets are random. If not, they are sequential and wrap around at the end of the
    /// span.
    pub random: bool,
    /// Length of a request.
    pub request_bytes: usize,
    /// Requests in flight at once.
    pub depth: usize,
    /// Requests lie in the first so many bytes of the volume's data, which must be allocated.
    pub span_bytes: u64,
    /// For how long new requests are submitted.
    pub duration: Duration,
}

/// Results of a [`Workload`].
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Measured {
    /// Bytes read.
    pub bytes_read: u64,
    /// Bytes written.
    pub bytes_written: u64,
    /// Requests of either kind.
    pub requests: u64,
    /// From the first submission to the last completion.
    pub seconds: f64,
    /// Half of the requests took no longer.
    pub latency_p50: Duration,
    /// 99 of 100 requests took no longer.
    pub latency_p99: Duration,
    /// The slowest request.
    pub latency_max: Duration,
}

impl Measured {
    /// Bytes in either direction per second.
    pub fn bytes_per_second(&self) -> f64 {
        (self.bytes_read + self.bytes_written) as f64 / self.seconds
    }

    /// Requests per second.
    pub fn requests_per_second(&self) -> f64 {
        self.requests as f64 / self.seconds
    }
}

impl Workload {
    /// Runs on `engine` with buffers from `pool`, which must have `depth` of them free. Every
    /// completion submits the next request from the engine's own thread, so that the depth is
    /// constant. Writes write the contents of the buffers.
    ///
    /// # Errors
    /// The first transfer that failed.
    pub fn run(self, engine: &Arc<dyn Engine>, pool: &Pool) -> Result<Measured> {
        let started = Instant::now();
        let runner = Arc::new(Runner {
            workload: self,
            engine: Arc::clone(engine),
            until: started + self.duration,
            state: Mutex::new(State { random: 0x5EED_1234_ABCD, ..State::default() }),
            ended: Condvar::new(),
        });
        for _ in 0..self.depth {
            let lease =
                pool.try_lease(self.request_bytes).ok().flatten().expect("a buffer for every request");
            runner.lock().running += 1;
            Runner::submit(&runner, LeaseSlice::new(Arc::new(lease), 0, self.request_bytes));
        }
        let mut state = runner.lock();
        while state.running > 0 {
            state = runner.ended.wait_locked(state);
        }
        let seconds = started.elapsed().as_secs_f64();
        match state.error.take() {
            Some(error) => Err(error),
            None => Ok(Measured {
                seconds,
                latency_p50: state.latency.quantile(0.5),
                latency_p99: state.latency.quantile(0.99),
                latency_max: state.latency.max(),
                ..state.measured
            }),
        }
    }
}

struct Runner {
    workload: Workload,
    engine: Arc<dyn Engine>,
    until: Instant,
    state: Mutex<State>,
    ended: Condvar,
}

#[derive(Default)]
struct State {
    random: u64,
    /// Where the next read and the next write go, in requests.
    next: [u64; 2],
    running: usize,
    measured: Measured,
    latency: Histogram,
    error: Option<IoError>,
}

impl Runner {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.locked()
    }

    fn submit(runner: &Arc<Self>, buffer: LeaseSlice) {
        let (operation, offset) = runner.lock().next(&runner.workload);
        let (again, started) = (Arc::clone(runner), Instant::now());
        runner.engine.submit(Request {
            operation,
            offset,
            buffer,
            on_complete: Box::new(move |completion| Self::complete(&again, operation, started, completion)),
        });
    }

    fn complete(runner: &Arc<Self>, operation: Operation, started: Instant, completion: Completion) {
        let now = Instant::now();
        let Completion { buffer, result } = completion;
        let bytes = buffer.bytes() as u64;
        let mut state = runner.lock();
        match result {
            Ok(()) => {
                state.measured.requests += 1;
                state.latency.add(now - started);
                match operation {
                    Operation::Read => state.measured.bytes_read += bytes,
                    Operation::Write => state.measured.bytes_written += bytes,
                }
            }
            Err(error) => {
                state.error.get_or_insert(error);
            }
        }
        if state.error.is_none() && now < runner.until {
            drop(state);
            return Self::submit(runner, buffer);
        }
        // Drop the lease before signalling, so the waiter can reuse the buffer.
        drop(buffer);
        state.running -= 1;
        if state.running == 0 {
            runner.ended.notify_all();
        }
    }
}

impl State {
    fn next(&mut self, workload: &Workload) -> (Operation, u64) {
        let places = (workload.span_bytes / workload.request_bytes as u64).max(1);
        let read = match workload.read_percent {
            0 => false,
            100 => true,
            percent => self.random() % 100 < u64::from(percent),
        };
        let operation = if read { Operation::Read } else { Operation::Write };
        let place = if workload.random {
            self.random() % places
        } else {
            let next = &mut self.next[usize::from(read)];
            *next += 1;
            (*next - 1) % places
        };
        (operation, place * workload.request_bytes as u64)
    }

    /// xorshift64*.
    fn random(&mut self) -> u64 {
        self.random ^= self.random >> 12;
        self.random ^= self.random << 25;
        self.random ^= self.random >> 27;
        self.random.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 11
    }
}

#[cfg(test)]
mod tests {
    use memascend_mem::{PageableAllocator, SizeClass};

    use super::*;
    use crate::{EngineOptions, Volume, open_engine};

    #[test]
    fn reads_and_writes_are_mixed_as_asked_for_and_counted_exactly() {
        let directory = tempfile::tempdir().unwrap();
        let volume = Volume::create(directory.path(), true).unwrap();
        volume.reserve(8 << 20).unwrap();
        let class = SizeClass::new("test", 65_536, 4);
        let pool = Pool::new(&PageableAllocator::default(), &[class]).unwrap();
        let engine = open_engine(volume.file(), EngineOptions::default()).unwrap().engine;
        let workload = Workload {
            read_percent: 55,
            random: false,
            request_bytes: 65_536,
            depth: 4,
            span_bytes: 8 << 20,
            duration: Duration::from_millis(200),
        };
        let measured = workload.run(&engine, &pool).unwrap();
        let counters = engine.counters();
        assert_eq!(measured.bytes_read, counters.reads.bytes);
        assert_eq!(measured.bytes_written, counters.writes.bytes);
        assert_eq!(measured.requests * 65_536, measured.bytes_read + measured.bytes_written);
        assert!(measured.requests > 20, "{measured:?}");
        assert!(counters.in_flight_max <= 4);
        assert_eq!(pool.counters().live_bytes, 0);
        // Reads beyond the end of the file fail.
        let error =
            Workload { span_bytes: 1 << 40, random: true, read_percent: 100, ..workload }.run(&engine, &pool);
        assert_eq!(error.unwrap_err().errno(), Some(libc::EIO));
    }
}
