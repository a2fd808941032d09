"""The names of a step's figures, as records have them: what reads these imports no more than this."""

SSD_COUNTERS = ("ssd_bytes_read", "ssd_bytes_written")
#: Of each volume in a step's figures, in this order.
VOLUME_COUNTERS = ("bytes_read", "bytes_written", "busy_seconds")
#: Of each rank in the figures of a step, in this order.
RANK_FIGURES = ("tokens", "seconds", *SSD_COUNTERS, "network_bytes_sent", "host_bytes_peak", "peak_rss_bytes")
