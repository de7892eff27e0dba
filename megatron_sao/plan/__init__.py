"""``megatron-sao plan``: whether a run fits a cluster, from models of full size that take no memory."""
