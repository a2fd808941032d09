"""The one command for a machine with a GPU: `benches/device_run.sh` runs its stages (README.md)."""
