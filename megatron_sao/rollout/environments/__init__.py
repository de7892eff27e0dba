"""Environments that come with the product."""
