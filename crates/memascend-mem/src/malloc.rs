/// Has malloc give every block of 128 KiB or more back to the system when it is freed.
///
/// glibc raises this limit by itself, up to 32 MiB, whenever a larger block is freed. From then on a layer's
/// temporaries come from the heap, between small objects that live for the whole pass, and the holes they
/// leave grow with the depth of the model: 0.9 MiB a layer at width 1024. Setting the limit, here to glibc's own
/// first value, keeps it where it is. Affects the whole process; does nothing with another libc.
pub fn return_large_blocks_to_system() {
    #[cfg(target_env = "gnu")]
    // SAFETY: mallopt takes two integers and is thread-safe in glibc.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, 128 * 1024);
        libc::mallopt(libc::M_TRIM_THRESHOLD, 128 * 1024);
    }
}
