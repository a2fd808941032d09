"""Which steps are durable, and the record of each."""
