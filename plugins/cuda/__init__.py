"""NVIDIA GPUs: kernels compiled ahead of time for one architecture, products through cuBLASLt."""
