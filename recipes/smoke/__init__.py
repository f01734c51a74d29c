"""What a machine without a GPU lacks: weight transfer over gloo, and real FSDP2 and ZeRO ranks. Only smoke=true and hardware=cpu use it."""
