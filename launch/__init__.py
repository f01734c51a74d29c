"""Host side: compose a configuration, check it, plan it, run it, record it. Imports no torch."""
