"""What scripts and notebooks need around communication: ranks that a function starts, and logs."""
