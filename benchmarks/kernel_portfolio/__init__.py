"""The parts of kernel_cfgs.py: what is timed, which kernels to choose, and the report."""
