"""Evidence: what was run is kept as one JSON file each in this folder, and bench/RESULTS.md and docs/plots are made of these files."""
