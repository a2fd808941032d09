"""Which steps are durable, and what is recorded with them."""
