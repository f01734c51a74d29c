"""Stand-ins for machines without a GPU: FSDP2 and ZeRO ranks, and weight transfer over gloo.

topology=split on one GPU also uses the transfer.
"""
