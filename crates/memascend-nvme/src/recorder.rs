//! A record of events and their times, kept while a caller asks for it.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use memascend_mem::LockExt;

/// The kind of work of a [`Span`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activity {
    /// A request that reads, from its submission to its end.
    Read,
    /// A request that writes, from its submission to its end.
    Write,
    /// A flush of a volume.
    Flush,
    /// A manifest being written.
    Manifest,
    /// An update kernel.
    Kernel,
}

impl Activity {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Flush => "flush",
            Self::Manifest => "manifest",
            Self::Kernel => "kernel",
        }
    }
}

/// One activity.
#[derive(Debug, Clone, Copy)]
pub struct Span {
    /// The kind of work.
    pub activity: Activity,
    /// Bytes that were moved.
    pub bytes: usize,
    /// When it began.
    pub began: Instant,
    /// When it ended.
    pub ended: Instant,
}

/// Keeps the spans that end while it is on. Off, a span costs a load.
#[derive(Debug, Default)]
pub struct Recorder {
    on: AtomicBool,
    recording: Mutex<Recording>,
}

/// The spans of a [`Recorder`].
#[derive(Debug, Default)]
pub struct Recording {
    /// The spans, in the order of their ends.
    pub spans: Vec<Span>,
    /// How many more there were than the recorder was to keep.
    pub missed: usize,
    most: usize,
}

impl Recorder {
    /// Forgets earlier spans, and keeps the next `most`.
    pub fn begin(&self, most: usize) {
        *self.recording.locked() = Recording { most, ..Recording::default() };
        self.on.store(true, Ordering::Relaxed);
    }

    /// Returns the spans, and stops recording.
    pub fn end(&self) -> Recording {
        self.on.store(false, Ordering::Relaxed);
        std::mem::take(&mut *self.recording.locked())
    }

    /// Keeps a span that ends now.
    pub fn note(&self, activity: Activity, bytes: usize, began: Instant) {
        if self.on.load(Ordering::Relaxed) {
            self.keep(Span { activity, bytes, began, ended: Instant::now() });
        }
    }

    /// Runs `work` and keeps the time that it took.
    pub fn timed<T>(&self, activity: Activity, work: impl FnOnce() -> T) -> T {
        let began = Instant::now();
        let done = work();
        self.note(activity, 0, began);
        done
    }

    fn keep(&self, span: Span) {
        let mut recording = self.recording.locked();
        if recording.spans.len() < recording.most {
            recording.spans.push(span);
        } else {
            recording.missed += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_ends_while_it_is_on_is_kept_up_to_a_number() {
        let recorder = Recorder::default();
        recorder.note(Activity::Read, 1, Instant::now());
        recorder.begin(2);
        let began = Instant::now();
        assert_eq!(recorder.timed(Activity::Flush, || 7), 7);
        recorder.note(Activity::Read, 4096, began);
        recorder.note(Activity::Write, 4096, began);
        let Recording { spans, missed, .. } = recorder.end();
        let kept: Vec<_> = spans.iter().map(|span| (span.activity.name(), span.bytes)).collect();
        assert_eq!((kept, missed), (vec![("flush", 0), ("read", 4096)], 1));
        assert!(spans.iter().all(|span| began <= span.began && span.began <= span.ended));
        recorder.note(Activity::Kernel, 0, began);
        assert!(recorder.end().spans.is_empty());
    }
}
