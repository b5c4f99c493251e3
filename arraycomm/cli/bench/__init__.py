"""`arraycomm bench` and `arraycomm overlap`: how long collectives take."""
