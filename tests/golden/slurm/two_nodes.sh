#!/usr/bin/env bash
# sft-qwen3_4b-mi300x, written by `python launch/run.py runtime=slurm`. Every node must see the run directory,
# the repository and Python. The job inherits the environment of the shell that submits it, so
# tokens are not written to files.
#SBATCH --job-name=sft-qwen3_4b-mi300x
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:mi300x:8
#SBATCH --partition=gpu
#SBATCH '--account=it'"'"'s mine'
#SBATCH --qos=high
#SBATCH --time=1-12
#SBATCH --chdir=/home/me/work
#SBATCH '--output=/shared/my runs/100%%/1/logs/slurm.log'
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@600
#SBATCH --export=ALL
#SBATCH --no-requeue
#SBATCH --exclusive
#SBATCH '--comment=a b; rm -rf $HOME #'

exec '/opt/my env/bin/python' /repository/launch/execution/slurm_job.py '/shared/my runs/100%/1'
