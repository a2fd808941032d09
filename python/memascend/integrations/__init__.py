"""Other libraries' training loops over offloaded models: one module for each library."""
