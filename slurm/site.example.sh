# Copy to slurm/site.sh and adapt. Every batch script sources it on its first node; what it exports reaches all steps.
# None of it is required: without this file the scripts use .venv of the checkout on every node.

# module load cuda/13.0

# export SAO_LAUNCHER=.venv/bin/python   # the batch node's Python 3.12 or 3.13; it needs tools/setup/launcher.txt, no torch
# export SAO_PYTHON=python3              # the parts' Python (in a container: the container's)
# export SAO_CONTAINER=/shared/images/megatron-sao.sqsh   # pyxis; a .sif file: apptainer
# export SAO_MOUNTS="/shared/datasets"   # beside the checkout, model, data and run directories
# export SAO_INTERFACE=ib0               # where nodes have several; NCCL's InfiniBand choice (NCCL_IB_HCA) is apart
# export SAO_SCRATCH=/tmp                # each node's own disk, for temporary files and compilers' caches
# export SAO_PREFLIGHT=60                # seconds for the checks of all nodes; 0: none
# export SAO_BAD_NODES=exclude           # nodes that fail them: requeue the job without them; default: end it

# sbatch itself reads SBATCH_PARTITION, SBATCH_ACCOUNT, SBATCH_TIMELIMIT and the like: export them in your login shell.
