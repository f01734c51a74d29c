"""Detect this host: GPUs from the kernel's files or NVML, and the masks that choose among them."""
