"""Kernels only: Numba for the CPU, Triton for the GPU. Imported at first use, by the engine that launches them."""
