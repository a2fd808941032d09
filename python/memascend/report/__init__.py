"""What a run records of itself, and the page that shows it."""
