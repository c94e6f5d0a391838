"""NVIDIA GPUs: kernels compiled ahead of time for one architecture, large products through cuBLASLt."""
