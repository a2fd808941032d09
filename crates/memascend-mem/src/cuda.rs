//! CUDA, loaded at run time: the runtime library, its events and its streams.

mod context;
pub(crate) mod error;
pub(crate) mod event;
mod functions;
pub(crate) mod library;
pub(crate) mod stream;
