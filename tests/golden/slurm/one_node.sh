#!/usr/bin/env bash
# sft-qwen3_4b-mi300x, written by `python launch/run.py runtime=slurm`. Every node must see the run directory,
# the repository and Python. The job inherits the environment of the shell that submits it, so
# tokens are not written to files.
#SBATCH --job-name=sft-qwen3_4b-mi300x
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:4
#SBATCH --chdir=/home/me/work
#SBATCH '--output=/shared/my runs/100%%/1/logs/slurm.log'
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@360
#SBATCH --export=ALL
#SBATCH --requeue

exec /repository/.venv/bin/python /repository/launch/execution/slurm_job.py '/shared/my runs/100%/1'
