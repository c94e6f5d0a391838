"""TensorRT: a plan as native layers, and a plugin for the attention of each layer that launches the CUDA kernels."""
