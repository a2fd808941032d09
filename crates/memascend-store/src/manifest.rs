//! The manifest, which every volume of a store holds: which bytes belong to which generation.
//!
//! A line, then JSON:
//!
//! ```text
//! memascend-store 3 <length of the JSON> <its CRC-32C, eight digits>
//! {"volume": 0, ...
//! ```
//!
//! Apart from `volume` it is the same on every volume. The manifest with the highest sequence
//! number counts.

use std::collections::{BTreeMap, HashSet};
use std::io;
use std::sync::Arc;

use memascend_nvme::BLOCK_BYTES;
use memascend_nvme::memory::{Growing, with_room};
use serde::{Deserialize, Serialize};

use crate::checksums::{Checksums, Encoded, checksum, checksum_of_both};
use crate::id::StoreId;
use crate::{Extent, Layout};

/// The format that is written and read.
pub(crate) const FORMAT: u32 = 3;
const MAGIC: &str = "memascend-store";
/// Limit of numbers that count upwards, so that none overflows.
const COUNT_MAX: u64 = u64::MAX / 2;
/// More volumes than a machine has; the layout takes time that grows with their square.
const VOLUMES_MAX: usize = 4096;

/// The JSON of a manifest.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Body {
    /// The id of the store.
    pub store: String,
    /// The manifest with the highest number counts.
    pub sequence: u64,
    /// Where to find each volume: a path or a UUID.
    pub volumes: Vec<String>,
    /// Stripes of each volume in every pattern of the layout.
    pub stripes: Vec<u32>,
    /// Bytes written to each volume over the store's whole life.
    pub life: Vec<u64>,
    pub versions: Vec<Version>,
    pub current: Option<Written>,
    pub snapshots: Vec<Written>,
}

/// The bytes of a tensor in one or more generations.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Version {
    pub ranges: Vec<(u64, u64)>,
    pub sums: Encoded,
}

/// A generation.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Written {
    pub number: u64,
    /// The snapshot's name; empty for the current generation.
    pub tag: String,
    /// Unix time in seconds.
    pub time: u64,
    /// The caller's.
    pub state: Arc<String>,
    /// Name of each tensor, and the index of its version.
    pub tensors: Vec<(String, usize)>,
}

/// Why bytes are not a manifest of this format.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum NotManifest {
    /// It differs from the written text.
    Damaged(String),
    /// Another version of memascend wrote it.
    Format(u32),
}

impl NotManifest {
    fn damaged(reason: impl Into<String>) -> Self {
        Self::Damaged(reason.into())
    }
}

impl std::fmt::Display for NotManifest {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Damaged(reason) => out.write_str(reason),
            Self::Format(found) => {
                write!(out, "its manifest has format {found}, this version reads format {FORMAT}")
            }
        }
    }
}

/// A manifest that is whole and consistent.
#[derive(Debug)]
pub(crate) struct Manifest {
    /// Index of the volume that it was found on.
    pub volume: usize,
    pub id: StoreId,
    pub layout: Layout,
    pub body: Body,
    /// Checksums of each version.
    pub sums: Vec<Checksums>,
}

/// The JSON of a manifest without `volume`.
pub(crate) struct Common(Vec<u8>);

impl Common {
    /// # Errors
    /// ENOMEM.
    pub(crate) fn of(body: &Body) -> io::Result<Self> {
        // Nearly all of it is checksums: reserve space for them at once.
        let sums: usize = body.versions.iter().map(|version| version.sums.text_bytes() + 100).sum();
        let mut json = Growing(with_room(sums + sums / 4 + 4096)?);
        serde_json::to_writer(&mut json, body)?;
        Ok(Self(json.0))
    }

    /// Length of the note for one of the volumes.
    pub(crate) fn note_bytes(&self, volume: usize) -> u64 {
        let (begin, rest) = (format!("{{\"volume\":{volume},"), &self.0[1..]);
        let json_bytes = begin.len() + rest.len();
        (first_line(json_bytes, 0).len() + json_bytes) as u64
    }

    /// The note for one of the volumes.
    ///
    /// # Errors
    /// ENOMEM.
    pub(crate) fn note(&self, volume: usize) -> io::Result<Vec<u8>> {
        let (begin, rest) = (format!("{{\"volume\":{volume},"), &self.0[1..]);
        let line = first_line(begin.len() + rest.len(), checksum_of_both(begin.as_bytes(), rest));
        let mut note = with_room(line.len() + begin.len() + rest.len())?;
        [line.as_bytes(), begin.as_bytes(), rest].into_iter().for_each(|part| note.extend_from_slice(part));
        Ok(note)
    }
}

fn first_line(bytes: usize, sum: u32) -> String {
    format!("{MAGIC} {FORMAT} {bytes} {sum:08x}\n")
}

impl Manifest {
    /// Parses a note: a whole and consistent manifest, or why it is not one.
    pub(crate) fn parse(note: &[u8]) -> Result<Self, NotManifest> {
        let json = check_line(note)?;
        let inconsistent =
            |what: &str| NotManifest::damaged(format!("its manifest contradicts itself in {what}"));
        let volume: Volume =
            serde_json::from_slice(json).map_err(|error| inconsistent(&error.to_string()))?;
        let body: Body = serde_json::from_slice(json).map_err(|error| inconsistent(&error.to_string()))?;
        let volume = volume.volume;
        let id = StoreId::parse(&body.store).ok_or_else(|| inconsistent("the store's UUID"))?;
        let volumes = body.volumes.len();
        let is_possible = volume < volumes && volumes <= VOLUMES_MAX;
        if !is_possible || body.stripes.len() != volumes || body.life.len() != volumes {
            return Err(inconsistent("the number of volumes"));
        }
        let layout = Layout::from_counts(&body.stripes).ok_or_else(|| inconsistent("the stripes"))?;
        let numbers = body.snapshots.iter().chain(&body.current).map(|written| written.number);
        if numbers.chain([body.sequence]).any(|number| number > COUNT_MAX) {
            return Err(inconsistent("a number"));
        }
        check_ranges(&body.versions).ok_or_else(|| inconsistent("the ranges"))?;
        check_generations(&body).ok_or_else(|| inconsistent("the generations"))?;
        let sums = |version: &Version| Checksums::decode(version.bytes(), &version.sums);
        let sums: Option<Vec<_>> = body.versions.iter().map(sums).collect();
        let sums = sums.ok_or_else(|| inconsistent("the checksums"))?;
        Ok(Self { volume, id, layout, body, sums })
    }

    /// Whether all bytes that it describes have checksums, which reveal later writes.
    pub(crate) fn is_checked(&self) -> bool {
        self.sums.iter().all(Checksums::is_complete)
    }

    /// End of the address space that it describes.
    pub(crate) fn end(&self) -> u64 {
        let ends = self.body.versions.iter().flat_map(|version| &version.ranges);
        ends.map(|(offset, bytes)| offset + bytes).max().unwrap_or(0)
    }
}

#[derive(Deserialize)]
struct Volume {
    volume: usize,
}

impl Body {
    /// About how long its JSON is.
    pub(crate) fn about_bytes(&self) -> u64 {
        let states = self.snapshots.iter().chain(&self.current).map(|written| written.state.len());
        let sums = self.versions.iter().map(|version| version.sums.text_bytes() + 100);
        states.chain(sums).sum::<usize>() as u64
    }
}

impl Version {
    pub(crate) fn extents(&self) -> Vec<Extent> {
        self.ranges.iter().map(|&(offset, bytes)| Extent { offset, bytes }).collect()
    }

    /// Total length; the ranges were checked before.
    fn bytes(&self) -> u64 {
        self.ranges.iter().map(|(_, bytes)| bytes).sum()
    }
}

/// The JSON behind the first line, if its checksum matches.
fn check_line(note: &[u8]) -> Result<&[u8], NotManifest> {
    #[derive(Deserialize)]
    struct Old {
        format: u32,
    }
    // Before format 3 there was no first line.
    if note.first() == Some(&b'{') {
        let old: Result<Old, _> = serde_json::from_slice(note);
        return Err(match old {
            Ok(old) if old.format < FORMAT => NotManifest::Format(old.format),
            _ => NotManifest::damaged("its manifest is damaged"),
        });
    }
    let end = note.iter().take(100).position(|byte| *byte == b'\n');
    let line = end.and_then(|end| std::str::from_utf8(&note[..end]).ok());
    let words: Vec<&str> = line.map(|line| line.split(' ').collect()).unwrap_or_default();
    if words.first() != Some(&MAGIC) {
        return Err(NotManifest::damaged(
            "its manifest is damaged: it does not begin with the line of a manifest",
        ));
    }
    // Other formats define length and checksum in their own way, so the format is compared first.
    match words.get(1).and_then(|format| format.parse::<u32>().ok()) {
        Some(FORMAT) => {}
        // Before format 3 there was no first line.
        Some(format) if format > FORMAT => return Err(NotManifest::Format(format)),
        _ => return Err(NotManifest::damaged("its manifest is damaged: its first line has no format")),
    }
    let json = &note[end.map_or(0, |end| end + 1)..];
    // The bytes behind the JSON are room for a longer one.
    let bytes = words.get(2).and_then(|bytes| bytes.parse().ok()).unwrap_or(json.len());
    let note = &note[..note.len() - json.len() + json.len().min(bytes)];
    let json = &json[..json.len().min(bytes)];
    if note[..note.len() - json.len()] != *first_line(json.len(), checksum(json)).as_bytes() {
        return Err(NotManifest::damaged("its manifest is damaged: its checksum does not match"));
    }
    Ok(json)
}

/// Whether all ranges are whole blocks, and none belongs to two versions.
fn check_ranges(versions: &[Version]) -> Option<()> {
    let mut all: Vec<(u64, u64)> =
        versions.iter().flat_map(|version| version.ranges.iter().copied()).collect();
    all.sort_unstable();
    let mut end = 0;
    for (offset, bytes) in all {
        if !(offset | bytes).is_multiple_of(BLOCK_BYTES as u64) || bytes == 0 || offset < end {
            return None;
        }
        end = offset.checked_add(bytes)?;
    }
    versions.iter().all(|version| !version.ranges.is_empty()).then_some(())
}

/// Whether every version belongs to one tensor, no generation has a tensor twice, and no two have
/// the same tag.
fn check_generations(body: &Body) -> Option<()> {
    let mut names: BTreeMap<usize, &str> = BTreeMap::new();
    let mut tags = HashSet::new();
    for written in &body.snapshots {
        if !is_tag(&written.tag) || !tags.insert(&written.tag) {
            return None;
        }
    }
    if body.current.as_ref().is_some_and(|written| !written.tag.is_empty()) {
        return None;
    }
    for written in body.snapshots.iter().chain(&body.current) {
        let mut seen = HashSet::new();
        for (name, version) in &written.tensors {
            let once = seen.insert(name.as_str());
            if !once || *version >= body.versions.len() || *names.entry(*version).or_insert(name) != name {
                return None;
            }
        }
    }
    // A version that no generation has would never be freed.
    (names.len() == body.versions.len()).then_some(())
}

/// Whether a snapshot can have that name, which appears in command lines and messages.
pub(crate) fn is_tag(tag: &str) -> bool {
    (1..=128).contains(&tag.chars().count())
        && !tag.starts_with(['-', '.'])
        && !tag.contains('/')
        && !tag.chars().any(char::is_control)
}
