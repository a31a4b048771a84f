"""GPU kernels: Triton for everything around the products, CUDA C++ for NVFP4 products of few tokens."""
