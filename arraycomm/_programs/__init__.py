"""What comes back from ranks that a function starts: see `arraycomm.launch`."""
