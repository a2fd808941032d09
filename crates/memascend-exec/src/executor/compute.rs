//! Runs the kernels on pieces whose reads have ended.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use memascend_kernels::{step, step_channels};
use memascend_mem::LeaseSlice;
use memascend_nvme::{Activity, Operation};
use memascend_store::{Store, StoreError};

use super::Busy;
use super::piece::{Areas, SlotAreas, UpdatePiece};
use crate::gradients::{Chunk, SourcePlace, widen};
use crate::{ExecError, Segment};

/// Runs the kernel on a piece whose reads have ended and starts its write-back.
pub(super) fn compute(store: &Store, piece: UpdatePiece, busy: &Busy) {
    let began = Instant::now();
    if piece.tensor.gradient.rounded {
        widen_gradient(&piece);
    }
    for segment in &piece.tensor.segments {
        let start = segment.start.max(piece.first);
        let end = (segment.start + segment.numel).min(piece.first + piece.numel);
        if start < end {
            update(&piece, segment, start, end - start);
        }
    }
    busy.nanos.fetch_add(began.elapsed().as_nanos() as u64, Ordering::Relaxed);
    busy.recorder.note(Activity::Kernel, piece.numel * piece.tensor.dtype.bytes(), began);
    let UpdatePiece {
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
    } = piece;
    let Areas { planes, slot } = areas;
    let mut results = Vec::with_capacity(planes.len() + 1);
    for ((state, area), target) in tensor.planes.iter().zip(planes).zip(&targets.planes) {
        let offset = state.plane.span(first, numel).start;
        let goes = !area.resident || tensor.write_through;
        results.push((*target, offset, area.buffer, area.resident, goes, Vec::new()));
    }
    if let Some((range, target)) = weights.zip(targets.weights) {
        let goes = !weights_resident || weights_written;
        results.push((target, first * tensor.dtype.bytes(), range, weights_resident, goes, groups));
    }
    // From here on only the results hold the buffers.
    drop((slot, gradient_chunk));
    for (extent, offset, buffer, resident, goes, groups) in results {
        let resident = resident.then(|| buffer.clone());
        let keep = |written| {
            if let Some(buffer) = resident {
                store.keep(extent, offset as u64, buffer, written);
            }
        };
        if !goes {
            drop(buffer);
            keep(false);
            groups.into_iter().for_each(|group| group.end(Ok(())));
            continue;
        }
        // Begun before the ticket is ready, so that a caller that sees the weights also sees their
        // write-back pending.
        let write = pending.begin();
        let done = move |result: std::result::Result<(), StoreError>| {
            let result = result.map_err(ExecError::from);
            groups.into_iter().for_each(|group| group.end(result.clone()));
            write.end(result);
        };
        store.transfer(Operation::Write, extent, offset as u64, buffer, Box::new(done));
        keep(true);
    }
    drop(tensor);
    update.end(Ok(()));
    ready.end(Ok(()));
}

/// Updates the elements `start .. start + numel` of the tensor, which lie in `segment` and in the
/// piece.
fn update(piece: &UpdatePiece, segment: &Segment, start: usize, numel: usize) {
    let tensor = &piece.tensor;
    let local = start - piece.first;
    let bytes = numel * tensor.dtype.bytes();
    let weight = weight_address(piece, segment, start, numel);
    let gradient = gradient_address(piece, segment, start, numel);
    // SAFETY: here and below, the piece's reads have ended, and until its writes are submitted only
    // this thread uses the slot's areas and the piece's weights; segments do not overlap. Captures
    // wait for this update, and a gradient's chunk was handed over by its record. The code that
    // made the segment vouches for addresses of host memory until the ticket is ready.
    let weight = unsafe { std::slice::from_raw_parts_mut(weight, bytes) };
    // SAFETY: see above.
    let gradient = unsafe { std::slice::from_raw_parts(gradient, bytes) };
    let areas: Vec<LeaseSlice> = segment
        .rule
        .planes()
        .into_iter()
        .map(|plane| {
            let index = tensor.planes.iter().position(|state| state.plane == plane);
            let area = &piece.areas.planes[index.expect("the tensor has the planes of its segments' rules")];
            let area = &area.buffer;
            let span = plane.span(local, numel);
            area.narrow(span.start, span.len())
        })
        .collect();
    let mut planes: Vec<&mut [u8]> = areas
        .iter()
        // SAFETY: see above; the planes of a rule are distinct.
        .map(|area| unsafe { area.as_mut_slice() })
        .collect();
    for (plane, _) in planes.iter_mut().zip(&segment.fresh).filter(|(_, fresh)| **fresh) {
        plane.fill(0);
    }
    let first = segment.first_element + (start - segment.start) as u64;
    match &segment.factors {
        None => step(segment.rule, weight, &mut planes, gradient, first, &segment.scalars),
        Some(factors) => {
            step_channels(segment.rule, weight, &mut planes, gradient, first, &segment.scalars, factors);
        }
    }
}

/// Address of the weights of elements `start .. start + numel`, all of them contiguous in memory.
fn weight_address(piece: &UpdatePiece, segment: &Segment, start: usize, numel: usize) -> *mut u8 {
    let element = piece.tensor.dtype.bytes();
    match (&segment.host, &piece.weights) {
        (Some((weight, _)), _) => weight.0.wrapping_add((start - segment.start) * element),
        (None, Some(range)) => {
            range.narrow((start - piece.first) * element, numel * element).address().as_ptr()
        }
        (None, None) => unreachable!("a segment without an address belongs to a unit"),
    }
}

fn slot_areas(piece: &UpdatePiece) -> &SlotAreas {
    piece.areas.slot.as_ref().expect("a gradient that is read or widened has an area of a slot")
}

/// Widens a gradient that is kept in bf16, into the slot.
fn widen_gradient(piece: &UpdatePiece) {
    let (numel, element) = (piece.numel, size_of::<u16>());
    let source = match (&piece.tensor.gradient.place, &piece.gradient_chunk) {
        (SourcePlace::Packed { buffer }, _) => buffer.narrow(piece.first * element, numel * element),
        (SourcePlace::Chunks { chunk_elements, .. }, Some(Chunk::Host(lease))) => {
            let offset = piece.first % chunk_elements * element;
            LeaseSlice::new(Arc::clone(lease), offset, numel * element)
        }
        (SourcePlace::Chunks { .. }, Some(Chunk::Ssd)) => {
            slot_areas(piece).spilled.narrow(0, numel * element)
        }
        _ => return, // no segment is updated where no gradient was captured
    };
    let target = slot_areas(piece).gradient.narrow(0, numel * size_of::<f32>());
    // SAFETY: the piece's reads have ended, and only this thread uses the slot's areas; captures wait
    // for this update. A source in the slot lies in the last half of the area, which may be longer
    // than the target.
    unsafe { widen(source.address().as_ptr(), target.address().as_ptr(), numel) };
}

/// Address of the gradient of elements `start .. start + numel`, all of them contiguous in memory.
fn gradient_address(piece: &UpdatePiece, segment: &Segment, start: usize, numel: usize) -> *const u8 {
    let element = piece.tensor.dtype.bytes();
    let bytes = numel * element;
    if piece.tensor.gradient.rounded {
        return slot_areas(piece).gradient.narrow((start - piece.first) * element, bytes).address().as_ptr();
    }
    match (&segment.host, &piece.tensor.gradient.place, &piece.gradient_chunk) {
        (Some((_, gradient)), SourcePlace::Addresses, _) => {
            gradient.0.wrapping_add((start - segment.start) * element).cast_const()
        }
        (_, SourcePlace::Packed { buffer }, _) => buffer.narrow(start * element, bytes).address().as_ptr(),
        (
            _,
            SourcePlace::Chunks { chunk_elements, .. } | SourcePlace::Arriving { chunk_elements },
            Some(Chunk::Host(lease)),
        ) => {
            let offset = start % chunk_elements * element;
            LeaseSlice::new(Arc::clone(lease), offset, bytes).address().as_ptr()
        }
        (_, SourcePlace::Chunks { .. }, Some(Chunk::Ssd)) => {
            slot_areas(piece).gradient.narrow((start - piece.first) * element, bytes).address().as_ptr()
        }
        _ => unreachable!("a segment is updated only where its gradient was captured"),
    }
}
