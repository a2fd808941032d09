"""Runs in their stores: resumed, inspected, verified, exported, divided anew."""
