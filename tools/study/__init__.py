"""The comparison of SAO with its baselines on two CPU cores: how it samples, and the long task it plays."""
