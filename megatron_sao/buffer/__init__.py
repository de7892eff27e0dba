"""The trajectory buffer: an HTTP server in front of a durable store, and its clients."""
