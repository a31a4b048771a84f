"""GPU kernels: CUDA C++ for NVFP4 weights and the step of a delta net, Triton for the rest."""
