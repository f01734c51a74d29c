"""Parts of smoke runs on a CPU: FSDP2 and ZeRO without GPUs, and weight transfer over gloo.

The weight transfer also serves topology=split on one GPU.
"""
