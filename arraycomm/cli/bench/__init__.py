"""`arraycomm bench`: how long reductions take."""
