"""Small tools for every other folder: sizes, directories that appear whole, signals, progress, timing."""
