"""Where processes run: on this machine, in containers, or as a job of Slurm; and the sandbox beside them."""
