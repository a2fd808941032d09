//! Settings of the C library's allocator.

/// Makes malloc return every block of 128 KiB or more to the system as soon as the block is freed.
///
/// glibc raises this threshold, up to 32 MiB, whenever a larger block is freed. From then on a
/// layer's temporaries come from the heap, between small objects that live for the whole pass. The
/// holes that the temporaries leave grow with the depth of the model: 0.9 MiB a layer at width
/// 1024. Setting the threshold, here to glibc's initial value, stops glibc from raising it. The
/// setting affects the whole process; it does nothing with another libc.
pub fn return_large_blocks_to_system() {
    #[cfg(target_env = "gnu")]
    // SAFETY: mallopt takes two integers and is thread-safe in glibc.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, 128 * 1024);
        libc::mallopt(libc::M_TRIM_THRESHOLD, 128 * 1024);
    }
}
