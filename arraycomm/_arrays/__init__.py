"""Any array in, and one like it out."""
