"""Runs that are kept: resumed, inspected, verified, exported."""
