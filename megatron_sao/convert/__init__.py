"""Between Hugging Face directories and Megatron checkpoints, and the proof that both are the same model."""
