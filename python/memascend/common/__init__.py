"""Small tools that every other folder uses: no model, no store."""
