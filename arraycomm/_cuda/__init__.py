"""Arrays on CUDA devices: their memory, the kernels that reduce it, and links between devices."""
