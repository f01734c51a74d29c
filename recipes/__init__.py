"""The programs that ranks run. Each reads one resolved `config.yaml` and writes into its run directory; none composes a configuration."""
