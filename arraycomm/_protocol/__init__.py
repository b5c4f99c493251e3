"""What ranks tell one another besides data."""
