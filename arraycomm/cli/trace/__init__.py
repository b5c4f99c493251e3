"""`arraycomm trace`: a recorded trace as tables and as a picture."""
