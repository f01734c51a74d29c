"""What a machine without a GPU lacks: real FSDP2 and ZeRO ranks, and a weight transfer over gloo, which a split of one GPU takes too."""
